"""Mode signed: the trust region by the signal's sign, and three ways to reshape the signal."""

import math

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn


def one_token_each(p, mu, q, support=None, mask=None) -> LossInputs:
    t = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return LossInputs(
        trainer_logprobs=t(p).log().requires_grad_(),
        inference_logprobs=t(mu).log(),
        ref_logprobs=t(q).log(),
        advantages=None,
        loss_mask=torch.ones(len(p), dtype=torch.bool) if mask is None else torch.tensor(mask),
        support=support,
    )


def run(inputs, **knobs):
    out = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](**knobs))(inputs)
    out.loss.backward()
    grad, inputs.trainer_logprobs.grad = inputs.trainer_logprobs.grad, None
    return out, grad


# Probability rose or fell since sampling; the teacher wants more or less of it.
P = [0.7, 0.7, 0.2, 0.2, 0.5]
MU = [0.4, 0.4, 0.5, 0.5, 0.5]
Q = [0.9, 0.1, 0.9, 0.1, 0.3]
AWAY = [True, False, False, True, False]  # moved on in the direction of A: dropped


def test_signed_drops_tokens_that_moved_the_teachers_way():
    """Signed drops what already moved the teacher's way and keeps what has to come back."""
    inputs = one_token_each(P, MU, Q)
    out, grad = run(inputs, mode="signed", kl_tau=0.0)
    # d/dlog p of -rho sg(A) is -rho A.
    expected = [
        0.0 if away else -(p / mu) * math.log(q / p)
        for p, mu, q, away in zip(P, MU, Q, AWAY, strict=True)
    ]
    assert grad.tolist() == pytest.approx(expected, abs=1e-14)
    assert out.loss.item() == pytest.approx(sum(expected), abs=1e-12)
    assert out.metrics["sampled_reverse_kl/is_masked"].item() == pytest.approx(2 / 5)
    assert out.metrics["sampled_reverse_kl/is_masked_high"].item() == pytest.approx(1 / 5)
    assert out.metrics["sampled_reverse_kl/is_masked_low"].item() == pytest.approx(1 / 5)
    assert out.metrics["sampled_reverse_kl/ref_kl"].item() == pytest.approx(
        sum(math.log(q / p) for p, q in zip(P, Q, strict=True)) / 5
    )


def test_prime_rl_since_v07_drops_on_the_low_side_only():
    """Mode prime_rl since v0.7 drops on the low side, whatever the teacher gives."""
    _, grad = run(one_token_each(P, MU, Q), kl_tau=0.0)
    assert [g == 0 for g in grad.tolist()] == [False, False, True, True, False]


def test_the_region_has_two_sides_of_its_own_width():
    _, grad = run(one_token_each(P, MU, Q), mode="signed", kl_tau=0.0, delta_high=0.31)
    assert [g == 0 for g in grad.tolist()] == [False, False, False, True, False]
    _, grad = run(one_token_each(P, MU, Q), mode="signed", kl_tau=0.0, delta_low=0.31)
    assert [g == 0 for g in grad.tolist()] == [True, False, False, False, False]


def test_the_squared_log_ratio_is_kept_for_dropped_tokens_too():
    _, without = run(one_token_each(P, MU, Q), mode="signed", kl_tau=0.0)
    _, grad = run(one_token_each(P, MU, Q), mode="signed", kl_tau=0.5)
    expected = [2 * 0.5 * math.log(p / mu) for p, mu in zip(P, MU, strict=True)]
    assert (grad - without).tolist() == pytest.approx(expected, abs=1e-14)


def test_clip_and_floor_bound_the_signal():
    """The clip bounds the signal and the floor bounds it from below."""
    p, q = [0.5, 0.5, 0.5], [0.999, 0.5, 1e-9]
    _, grad = run(one_token_each(p, p, q), mode="signed", kl_tau=0.0, clip=0.5)
    assert grad.tolist() == pytest.approx([-0.5, 0.0, 0.5], abs=1e-12)
    _, grad = run(one_token_each(p, p, q), mode="signed", kl_tau=0.0, top_d=0.9)
    # log(a q/p + 1 - a), worked in probabilities; the last tends to log .1.
    expected = [-math.log(0.9 * b / a + 0.1) for a, b in zip(p, q, strict=True)]
    assert grad.tolist() == pytest.approx(expected, abs=1e-12)
    assert grad[2].item() == pytest.approx(-math.log(0.1), abs=1e-7)


def test_the_baseline_adds_the_kl_and_the_region_reads_the_sum():
    """The baseline adds the support KL and the region reads the sum."""
    log_p, log_q = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.4], [0.2, 0.7]))
    support = Support(torch.tensor([[0, 1]]), log_q, log_p.clone().requires_grad_())
    kl = 0.5 * math.log(0.5 / 0.2) + 0.4 * math.log(0.4 / 0.7) + 0.1 * math.log(0.1 / 0.1)
    _, grad = run(
        one_token_each([0.5], [0.5], [0.48], support),
        mode="signed",
        kl_tau=0.0,
        baseline="topk_kl",
        k=2,
    )
    assert grad.item() == pytest.approx(-(math.log(0.48 / 0.5) + kl), abs=1e-12)
    assert support.student_logprobs.grad is None
    # A = log .48/.5 < 0 but the sum is positive: risen by .3, it is dropped by the high side.
    out, grad = run(
        one_token_each([0.5], [0.2], [0.48], support),
        mode="signed",
        kl_tau=0.0,
        baseline="topk_kl",
        k=2,
    )
    assert grad.item() == 0 and out.metrics["sampled_reverse_kl/is_masked_high"] == 1


def test_knobs_of_mode_signed_are_refused_in_mode_prime_rl():
    """Knobs of mode signed are refused in prime-rl's arithmetic."""
    for knobs in ({"clip": 1.0}, {"top_d": 0.5}, {"baseline": "topk_kl"}):
        with pytest.raises(ValidationError, match="mode = 'signed'"):
            LOSS_TYPES["sampled_reverse_kl"](**knobs)


def test_an_overflowing_dropped_ratio_leaves_gradients_finite():
    """A ratio that overflows where it is dropped does not make NaN of the gradient."""
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([-0.1, -0.5], requires_grad=True),
        inference_logprobs=torch.tensor([-120.0, -0.5]),
        ref_logprobs=torch.tensor([-0.01, -0.7]),
        advantages=None,
        loss_mask=torch.ones(2, dtype=torch.bool),
    )
    out, grad = run(inputs, mode="signed", kl_tau=0.0)
    assert out.loss.isfinite() and grad[0] == 0 and grad[1].item() == pytest.approx(0.2, abs=1e-6)
