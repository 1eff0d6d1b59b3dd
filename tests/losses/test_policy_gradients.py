"""Policy gradients and ``sft`` against their definitions, token by token, in probabilities.

``LOSSES`` has what multiplies -rho, and which tokens the trust region drops. Value and gradient of
all follow from these.
"""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import parse_loss, setup_loss_fn
from tests.builders import double

TOKENS, LENGTH = 48, 12
"""Four responses, each of which ends in a masked token."""


def drawn(seed):
    """Return tokens in probabilities: student p, sampler mu, teacher q, and more."""
    g = torch.Generator().manual_seed(seed)
    p, q = (0.05 + 0.9 * torch.rand(2, TOKENS, generator=g)).tolist()
    near = (0.1 * torch.randn(TOKENS, generator=g)).tolist()
    a, w = torch.randn(2, TOKENS, generator=g).tolist()
    return [
        SimpleNamespace(
            p=p[t],
            mu=min(max(p[t] - near[t], 0.02), 0.99),
            q=q[t],
            a=0.0 if t == 5 else a[t // LENGTH],
            w=0.5 + abs(w[t]),
            trains=t % LENGTH < LENGTH - 1,
        )
        for t in range(TOKENS)
    ]


def run(table, tokens, **changed):
    inputs = {
        "trainer_logprobs": double([t.p for t in tokens]).log().requires_grad_(),
        "inference_logprobs": double([t.mu for t in tokens]).log(),
        "ref_logprobs": double([t.q for t in tokens]).log(),
        "advantages": double([t.a for t in tokens]),
        "loss_mask": torch.tensor([t.trains for t in tokens]),
        "loss_weights": double([t.w for t in tokens]),
    } | changed
    out = setup_loss_fn(parse_loss(table))(LossInputs(**inputs))
    (grad,) = torch.autograd.grad(out.loss, inputs["trainer_logprobs"])
    return out, grad


def rose(t, limit=0.05):
    return t.p - t.mu > limit


def fell(t, limit=0.06):
    return t.p - t.mu < -limit


def signed(signal, t):
    """The trust region by the sign of the signal: at 0 it drops nothing."""
    return rose(t) if signal > 0 else signal < 0 and fell(t)


def by_advantage(_, t):
    """DPPO's and v0.6's: an advantage of 0 is on the low side."""
    return rose(t) if t.a > 0 else fell(t)


def reward(t):
    return 0.7 * t.a


def log_ratio(t):
    return math.log(t.q / t.p)


DELTAS = {"delta_low": 0.06, "delta_high": 0.05}
SAMPLED = {"type": "sampled_reverse_kl", **DELTAS}
SIGNED = {**SAMPLED, "mode": "signed", "kl_tau": 0.01}
LOSSES = [
    ({"type": "default", "dppo_mask_low": 0.06, "dppo_mask_high": 0.05, "adv_tau": 0.7},
     reward, by_advantage, 1e-3),
    ({"type": "ipo", "ipo_threshold": 0.05, "adv_tau": 0.7, "kl_tau": 0.01},
     reward, lambda _, t: rose(t) or fell(t, 0.05), 0.01),
    ({"type": "icepop", "ratio_low": 0.8, "ratio_high": 1.1, "adv_tau": 0.7},
     reward, lambda _, t: not 0.8 <= t.p / t.mu <= 1.1, 0.0),
    (SAMPLED, log_ratio, lambda _, t: fell(t), 1e-3),
    ({**SAMPLED, "dialect": "v0.6"}, log_ratio, by_advantage, 1e-3),
    (SIGNED, log_ratio, signed, 0.01),
    ({**SIGNED, "clip": 0.5}, lambda t: min(max(log_ratio(t), -0.5), 0.5), signed, 0.01),
]  # fmt: skip
"""Table, signal S of a token, whether (S, token) is dropped, kl_tau."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("table", "signal", "drops", "kl_tau"), LOSSES, ids=[str(one[0]) for one in LOSSES]
)
def test_loss_is_its_definition(table, signal, drops, kl_tau, seed):
    """-keep S rho + kl_tau (log rho)^2 of each token of the mask, and its derivative for log p."""
    tokens = drawn(seed)
    out, grad = run(table, tokens)
    loss, expected, dropped = 0.0, [], []
    for t in tokens:
        drop, drift = drops(signal(t), t), math.log(t.p / t.mu)
        dropped += [drop] * t.trains
        pull = 0.0 if drop else signal(t) * t.p / t.mu
        loss += t.trains * t.w * (-pull + kl_tau * drift**2)
        expected.append(t.trains * t.w * (-pull + 2 * kl_tau * drift))
    assert out.loss.item() == pytest.approx(loss, rel=1e-11)
    assert grad.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-13)
    share = out.metrics[f"{table['type']}/is_masked"].item()
    assert share == pytest.approx(statistics.mean(dropped)) and 0.1 < share < 0.9


def test_metrics_of_the_signed_region_are_those_of_its_tokens():
    tokens = drawn(0)
    kept = [t for t in tokens if t.trains]
    metrics = run(SIGNED, tokens)[0].metrics
    for side, drops, sign in (("high", rose, 1), ("low", fell, -1)):
        expected = statistics.mean(sign * log_ratio(t) > 0 and drops(t) for t in kept)
        assert metrics[f"sampled_reverse_kl/is_masked_{side}"].item() == pytest.approx(expected)
    expected = statistics.mean(map(log_ratio, kept))
    assert metrics["sampled_reverse_kl/ref_kl"].item() == pytest.approx(expected)


def test_sft_is_the_weighted_negative_log_likelihood():
    tokens = drawn(0)
    kept = [t for t in tokens if t.trains]
    out, grad = run({"type": "sft"}, tokens)
    assert out.loss.item() == pytest.approx(-sum(t.w * math.log(t.p) for t in kept))
    assert grad.tolist() == [-t.w * t.trains for t in tokens]
    expected = -statistics.mean(math.log(t.p) for t in kept)
    assert out.metrics["sft/nll"].item() == pytest.approx(expected)


def test_an_overflowing_dropped_ratio_leaves_gradients_finite():
    tokens = [SimpleNamespace(p=0.5, mu=0.5, q=0.4, a=0.0, w=1.0, trains=True) for _ in range(2)]
    far = torch.tensor([-120.0, math.log(0.5)])
    p = torch.tensor([-0.1, -0.5], requires_grad=True)
    q = torch.tensor([-0.01, -0.7])
    table = {**SIGNED, "kl_tau": 0.0, "delta_high": 0.2, "delta_low": 0.2}
    changed = {"trainer_logprobs": p, "inference_logprobs": far, "ref_logprobs": q}
    out, grad = run(table, tokens, loss_weights=None, **changed)
    rho = math.exp(-0.5) / 0.5
    assert out.loss.isfinite() and grad.tolist() == pytest.approx([0.0, 0.2 * rho], abs=1e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "icepop", "ratio_low": 2.0, "ratio_high": 1.0}, "no token would be kept"),
        ({"type": "sampled_reverse_kl", "clip": 1.0}, "mode = 'signed'"),
    ],
)  # fmt: skip
def test_knobs_that_cannot_be_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        parse_loss(table)
