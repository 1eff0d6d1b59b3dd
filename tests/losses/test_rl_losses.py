"""``default``, ``ipo`` and ``sft`` token by token, from the definitions, in probabilities."""

import math

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

P = [0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.5, 0.9, 0.2]
MU = [0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.45, 0.9, 0.3]
A = [1.5, -0.7, 0.0, 1.1, -2.0, 0.0, 0.4, -0.3, 0.9]
W = [1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.25, 1.0, 1.0]
MASK = [True] * 8 + [False]


def run(config, weights=True):
    t = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    inputs = LossInputs(
        trainer_logprobs=t(P).log().requires_grad_(),
        inference_logprobs=t(MU).log(),
        ref_logprobs=None,
        advantages=t(A),
        loss_mask=torch.tensor(MASK),
        loss_weights=t(W) if weights else None,
    )
    out = setup_loss_fn(config)(inputs)
    out.loss.backward()
    return out, inputs.trainer_logprobs.grad


def dppo_drops(p, mu, a, low=0.25, high=0.2):
    return p - mu > high if a > 0 else p - mu < -low


def ipo_drops(p, mu, a):
    return abs(p - mu) > 0.2


@pytest.mark.parametrize(
    ("config", "drops"),
    [
        (
            LOSS_TYPES["default"](dppo_mask_low=0.25, dppo_mask_high=0.2, adv_tau=0.7, kl_tau=0.01),
            dppo_drops,
        ),
        (LOSS_TYPES["ipo"](ipo_threshold=0.2, adv_tau=0.7, kl_tau=0.01), ipo_drops),
    ],
    ids=["default", "ipo"],
)
def test_each_token_is_its_definition(config, drops):
    out, grad = run(config)
    loss, expected, dropped = 0.0, [], []
    for p, mu, a, w, m in zip(P, MU, A, W, MASK, strict=True):
        dropped.append(m and drops(p, mu, a))
        pull = 0.0 if dropped[-1] else 0.7 * a * p / mu
        loss += m * w * (-pull + 0.01 * math.log(p / mu) ** 2)
        expected.append(m * w * (-pull + 0.02 * math.log(p / mu)))
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert out.metrics[f"{config.type}/is_masked"].item() == pytest.approx(sum(dropped) / 8)
    assert 2 <= sum(dropped) <= 6


def test_band_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no token would be kept"):
        LOSS_TYPES["icepop"](ratio_low=2.0, ratio_high=1.0)


def test_icepop_equals_the_policy_gradient_without_drift():
    """At rho = 1 no band matters: the gradient is -A of each token."""
    logprobs = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor(A, dtype=torch.float64)
    mask = torch.tensor(MASK)
    inputs = LossInputs(logprobs, logprobs.detach(), None, advantages, mask)
    setup_loss_fn(LOSS_TYPES["icepop"]())(inputs).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-a * m for a, m in zip(A, MASK, strict=True)])


def test_sft_is_the_weighted_negative_log_likelihood():
    out, grad = run(LOSS_TYPES["sft"]())
    assert out.loss.item() == pytest.approx(
        -sum(w * math.log(p) for p, w, m in zip(P, W, MASK, strict=True) if m)
    )
    assert grad.tolist() == [-w * m for w, m in zip(W, MASK, strict=True)]
    assert out.metrics["sft/nll"].item() == pytest.approx(-sum(math.log(p) for p in P[:8]) / 8)
