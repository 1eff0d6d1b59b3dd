"""The rule that says what fits, and what a hook takes by it at import time."""

import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from prime_composer.upstream.versions.capabilities import (
    COMPUTE_LOSS,
    FUSED_HEAD,
    GEMMA_FUSED_HEAD,
    LOADER_INIT,
    PREFILL,
    SAMPLES,
    SLOT,
    Capability,
    HookPlace,
    UnknownSurface,
    find,
    misfits,
    take,
)
from prime_composer.upstream.versions.records import probe_contract
from tests.upstream import fake_prime_rl


def module(name, **members):
    made = types.ModuleType(f"prime_rl.{name}")
    made.__dict__.update(members)
    return made


@pytest.mark.parametrize(
    "signature,open,expected",
    [
        ({"x": True, "y": True}, False, ()),
        ({"y": False, "x": True, "more": False}, False, ()),
        ({"x": True}, False, ("has no y",)),
        (
            {"x": True, "y": True, "more": True},
            False,
            ("requires more, which we do not know",),
        ),
        ({"x": True, "y": True, "more": True}, True, ()),
        ({"z": True}, False, ("has no x, y", "requires z, which we do not know")),
    ],
)
def test_misfits_needs_names_and_refuses_required_ones(signature, open, expected):
    """What we need is there, and everything else has a default, unless it is handed on."""
    place = HookPlace("prime_rl.a", "f", ("x", "y"), open)
    assert misfits(signature, place) == expected


def test_find_takes_the_newest_place_that_fits():
    old, new = HookPlace("prime_rl.old", "f", ("x",)), HookPlace("prime_rl.new", "f", ("x",))
    capability = Capability("f", ("adapter",), (new, old))

    def where(**tree):
        finding = find(capability, lambda module, _: tree.get(module.rpartition(".")[2]))
        return finding.place, finding.misfits

    assert where(old={"x": True}, new={"x": True}) == (new, ())
    assert where(old={"x": True}) == (old, ())
    assert where(old={"x": True}, new={"y": True}) == (old, ())
    assert where(new={"x": True, "y": True}) == (new, ("requires y, which we do not know",))
    assert where() == (None, ("there is no new:f or old:f",))


def test_take_returns_what_fits_with_more_defaults():
    """Heads and losses with more parameters fit where these have defaults."""

    def compute_loss(
        trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights,
        ce_weights, ref_kl_weights, rl_loss_fn, rl_scale, ce_scale, ref_kl_scale,
        student_topk_logprobs=None, *rest, **more,
    ): ...  # fmt: skip

    loss = module("trainer.rl.loss", compute_loss=compute_loss)
    assert take(COMPUTE_LOSS, loss) is compute_loss

    class FusedOutputLinear:
        def forward(self, hidden_states, labels=None, temperature=None, extra_gather_ids=None): ...

    heads = module("trainer.models.layers.lm_head", FusedOutputLinear=FusedOutputLinear)
    assert take(FUSED_HEAD, heads) is FusedOutputLinear.forward
    samples = module("orchestrator.trajectories", trace_to_samples=lambda trace, *, env_name="": 0)
    assert take(SAMPLES, samples) is samples.trace_to_samples


def test_take_refuses_a_new_required_parameter_by_name():
    class FusedOutputLinear:
        def forward(self, hidden_states, labels, temperature, mask): ...

    heads = module("trainer.models.layers.lm_head", FusedOutputLinear=FusedOutputLinear)
    message = "lm_head:FusedOutputLinear.forward requires mask, which we do not know .costs adapter"
    with pytest.raises(UnknownSurface, match=message):
        take(FUSED_HEAD, heads)


def test_take_hands_on_what_it_does_not_know():
    """The data loader's other arguments are the trainer's own business."""

    class DataLoader:
        def __init__(self, output_dir, start_step, anything): ...

    loader = module("trainer.rl.data", DataLoader=DataLoader)
    assert take(LOADER_INIT, loader) is DataLoader.__init__


def test_take_of_a_moved_name_leaves_the_old_module_alone():
    """Where another module may have it, nothing is wrapped; the doctor says when none has."""
    prefill = lambda openai, model, token_ids: None  # noqa: E731
    assert take(PREFILL, module("utils.client")) is None
    assert take(PREFILL, module("orchestrator.clients", prefill_logprobs=prefill)) is prefill
    assert take(GEMMA_FUSED_HEAD, module("trainer.models.layers.lm_head_gemma")) is None
    with pytest.raises(UnknownSurface, match="distillation slot: there is no"):
        take(SLOT, module("trainer.rl.loss"))


def test_probe_contract_accepts_fields_with_defaults():
    """LossInputs with two more fields is the contract that it was."""

    @dataclass
    class LossInputs(fake_prime_rl.LossInputsV07):
        ref_topk_logprobs: Any = None
        student_topk_logprobs: Any = field(default=None)

    loss = fake_prime_rl.loss_module("v0.7")
    loss.LossInputs = LossInputs
    assert probe_contract(loss).name == "v0.7"


def test_probe_contract_refuses_a_required_field():
    @dataclass
    class LossInputs:
        prompts: Any
        trainer_logprobs: Any
        inference_logprobs: Any
        ref_logprobs: Any
        advantages: Any
        loss_mask: Any

    loss = fake_prime_rl.loss_module("v0.7")
    loss.LossInputs = LossInputs
    with pytest.raises(UnknownSurface, match="LossInputs requires prompts, which we do not know"):
        probe_contract(loss)


def test_probe_contract_refuses_halves_of_two_contracts():
    """The newer setup function with the older fields is no version that ever was."""
    loss = fake_prime_rl.loss_module("v0.7")
    loss.LossInputs = fake_prime_rl.LossInputsV06
    with pytest.raises(UnknownSurface, match="setup_rl_loss_fn with LossInputs.*559b4477"):
        probe_contract(loss)
