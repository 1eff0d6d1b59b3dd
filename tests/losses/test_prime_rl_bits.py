"""``default``, ``ipo``, ``sft`` and ``sampled_reverse_kl`` in mode prime_rl against prime-rl's own functions.

Live: the unmodified loss module of each tag, read with git from a checkout (``PRIME_RL_CHECKOUT`` or the per-user cache
directory) and executed with its two config imports stubbed; compared bit for bit. Everywhere: numbers that these functions
returned once (prime-rl eaf95997f ``opd_loss_fn``, 559b4477 ``ref_kl_loss_fn``, float64, twelve decimals).
"""

import dataclasses
import subprocess
import sys
import types

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

TAGS = {"v0.6.0": "v0_6", "v0.7.0": "v0_7", "v0.8.0": "v0_7", "HEAD": "v0_7"}


@pytest.fixture(params=TAGS)
def upstream(request, monkeypatch, checkout):
    if checkout is None:
        pytest.skip("no prime-rl checkout (--prime-rl=PATH)")
    source = subprocess.run(
        ["git", "-C", str(checkout), "show", f"{request.param}:src/prime_rl/trainer/rl/loss.py"],
        capture_output=True,
        text=True,
    )
    if source.returncode:
        pytest.skip(f"the checkout at {checkout} has no {request.param}")
    configs = types.ModuleType("prime_rl.configs.trainer")
    for name in ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"):
        setattr(configs, name, type(name, (), {}))
    utils = types.ModuleType("prime_rl.utils.utils")
    utils.import_object = None
    module = types.ModuleType("upstream_loss")
    for name, fake in (
        ("prime_rl", types.ModuleType("prime_rl")),
        ("prime_rl.configs", types.ModuleType("prime_rl.configs")),
        ("prime_rl.configs.trainer", configs),
        ("prime_rl.utils", types.ModuleType("prime_rl.utils")),
        ("prime_rl.utils.utils", utils),
        ("upstream_loss", module),
    ):
        monkeypatch.setitem(sys.modules, name, fake)
    exec(compile(source.stdout, "loss.py", "exec"), module.__dict__)
    module.dialect = TAGS[request.param]
    return module


def inputs_that_fire_the_masks(seed: int, dtype: torch.dtype, weights: bool) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    seq = 257
    p = torch.rand(seq, generator=g).clamp(min=1e-3).log().to(dtype)
    mu = torch.rand(seq, generator=g).clamp(min=1e-3).log().to(dtype)
    advantages = torch.randn(seq, generator=g).to(dtype)
    advantages[::7] = 0
    return LossInputs(
        trainer_logprobs=p.requires_grad_(),
        inference_logprobs=mu,
        ref_logprobs=(3 * torch.rand(seq, generator=g)).neg().to(dtype),
        advantages=advantages,
        loss_mask=torch.rand(seq, generator=g) > 0.2
        if seed
        else torch.zeros(seq, dtype=torch.bool),
        loss_weights=torch.rand(seq, generator=g).to(dtype) if weights else None,
    )


def upstream_inputs(module, inputs: LossInputs):
    ref = "teacher_logprobs" if module.dialect == "v0_6" else "ref_logprobs"
    kwargs = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(LossInputs)}
    kwargs[ref] = kwargs["ref_logprobs"]
    return module.LossInputs(
        **{f.name: kwargs[f.name] for f in dataclasses.fields(module.LossInputs)}
    )


def run(fn, inputs, leaf):
    leaf.grad = None
    out = fn(inputs)
    out.loss.backward()
    return out, leaf.grad.clone()


KNOBS = {
    "default": dict(dppo_mask_low=0.15, dppo_mask_high=0.3, adv_tau=0.7, kl_tau=2e-3),
    "ipo": dict(ipo_threshold=0.25, adv_tau=0.7, kl_tau=2e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("seed", [0, 1, 2], ids=["empty mask", "one", "two"])
@pytest.mark.parametrize("loss", ["sampled_reverse_kl", "default", "ipo", "sft"])
def test_loss_gradient_and_metrics_are_upstreams_bit_for_bit(upstream, loss, seed, weights, dtype):
    if weights and upstream.dialect == "v0_6":
        weights = False  # v0.6 has no weights
    inputs = inputs_that_fire_the_masks(seed, dtype, weights)
    if loss == "sampled_reverse_kl":
        config = LOSS_TYPES[loss](dialect=upstream.dialect)
        theirs_fn = upstream.opd_loss_fn if upstream.dialect == "v0_6" else upstream.ref_kl_loss_fn
    elif loss == "sft":
        config = LOSS_TYPES[loss]()
        theirs_fn = upstream.sft_loss_fn if upstream.dialect == "v0_6" else upstream.ce_loss_fn
    else:
        config = LOSS_TYPES[loss](**KNOBS[loss])
        theirs_fn = lambda i: getattr(upstream, f"{loss}_loss_fn")(
            i, types.SimpleNamespace(**KNOBS[loss])
        )  # noqa: E731
    theirs, their_grad = run(theirs_fn, upstream_inputs(upstream, inputs), inputs.trainer_logprobs)
    ours, our_grad = run(setup_loss_fn(config), inputs, inputs.trainer_logprobs)
    assert ours.loss.dtype == theirs.loss.dtype
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(our_grad, their_grad)
    for name, value in theirs.metrics.items():
        short = name.removeprefix("ref_kl/")
        mine = ours.metrics[f"{config.type}/{short}"]
        assert torch.equal(mine, value.detach()) and mine.dtype == value.dtype, name
    if seed and loss != "sft":
        assert 0.05 < ours.metrics[f"{config.type}/is_masked"] < 0.95


def example_b() -> LossInputs:
    t = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return LossInputs(
        trainer_logprobs=t(-0.2, -2.5, -0.3, -1.6, -0.7).requires_grad_(),
        inference_logprobs=t(-1.2, -0.4, -1.5, -0.3, -0.7),
        ref_logprobs=t(-0.1, -3, -2, -0.5, -0.9),
        advantages=t(1, 1, -1, -1, 0),
        loss_mask=torch.ones(5, dtype=torch.bool),
    )


GOLDEN = {
    "v0_6": (
        5.913966982779,
        [0.002, 0.057028214126, 5.646598768652, -0.0026, 0.2],
        dict(
            masked_mismatch_kl=0.645406810747,
            is_masked=0.4,
            is_masked_low=0.2,
            is_masked_high=0.2,
            teacher_kl=-0.24,
        ),
    ),
    "v0_7": (
        5.580910585806,
        [-0.269828182846, -0.0042, 5.646598768652, -0.0026, 0.2],
        dict(
            masked_mismatch_kl=0.897494110643,
            unmasked_mismatch_kl=0.612799583732,
            is_masked=0.4,
            ref_kl=-0.24,
        ),
    ),
}


@pytest.mark.parametrize("dialect", GOLDEN)
def test_sampled_reverse_kl_returns_the_numbers_recorded_from_prime_rl(dialect):
    loss, grad, metrics = GOLDEN[dialect]
    inputs = example_b()
    out, our_grad = run(
        setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](dialect=dialect)),
        inputs,
        inputs.trainer_logprobs,
    )
    assert out.loss.item() == pytest.approx(loss, abs=1e-11)
    assert our_grad.tolist() == pytest.approx(grad, abs=1e-11)
    for name, value in metrics.items():
        # Upstream's share of tokens is float32.
        assert out.metrics[f"sampled_reverse_kl/{name}"].item() == pytest.approx(value, abs=1e-7), (
            name
        )
