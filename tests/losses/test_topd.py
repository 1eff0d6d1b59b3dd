"""``topd``: the credit of a group, and the loss that reads it."""

import json
import math
import statistics
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, LossConfig, parse_loss, setup_loss_fn
from prime_composer.losses.topd import TopDCredit

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "authors_rl_and_teacher.json").read_text()
)
# Probabilities of the trained tokens of three rollouts of a group.
MU = [[0.7, 0.2, 0.9, 0.35], [0.4], [0.8, 0.05]]
Q = [[0.9, 0.001, 0.85, 0.35], [0.6], [0.1, 0.5]]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def logs(rows):
    return [double(row).log() for row in rows]


def written(alpha):
    """Return the credit by the paper's formula, token by token, in probabilities."""
    returns = []
    for mu_row, q_row in zip(MU, Q, strict=True):
        rewards = [
            math.log(alpha * q / mu + 1 - alpha) for mu, q in zip(mu_row, q_row, strict=True)
        ]
        later = [rewards[k + 1 :] for k in range(len(rewards))]
        returns.append(
            [
                r + (statistics.mean(rest) if rest else 0)
                for r, rest in zip(rewards, later, strict=True)
            ]
        )
    tokens = [value for row in returns for value in row]
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    return [[(value - mean) / std for value in row] for row in returns]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.9])
def test_credit_is_the_papers_normalized_return(alpha):
    got = TopDCredit(alpha)(logs(Q), logs(MU))
    for own, expected in zip(got, written(alpha), strict=True):
        assert own.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_credit_equals_that_of_prime_rls_pull_request(alpha):
    """Recorded in float32, with every masked token at the end of its rollout."""
    inputs, recorded = GOLDEN["inputs"], GOLDEN[f"topd {alpha}"]["advantages"]
    mask = torch.tensor(inputs["mask"])
    log_q, log_mu = (double(inputs[f"{who}_logprobs"]) for who in ("teacher", "student"))
    got = TopDCredit(alpha)(
        [row[keep] for row, keep in zip(log_q, mask, strict=True)],
        [row[keep] for row, keep in zip(log_mu, mask, strict=True)],
    )
    expected = double(recorded)[mask].tolist()
    assert torch.cat(got).tolist() == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_credit_of_a_group_without_spread_is_zero():
    """A single token, equal tokens, and no token at all have no credit."""
    one = double([-0.5])
    assert TopDCredit(0.2)([one], [one - 1])[0].tolist() == [0]
    same = TopDCredit(0.2)([one, one], [one - 1, one - 1])
    assert [row.tolist() for row in same] == [[0], [0]]
    none = one[:0]
    rows = TopDCredit(0.2)([none, one], [none, one])
    assert [len(row) for row in rows] == [0, 1]


def test_credit_stays_finite_where_the_teacher_rejects_a_token():
    """The reward of an impossible token is log(1 - alpha), not minus infinity."""
    log_q = [double([-math.inf, -1.0]), double([-1e4, -0.1])]
    credit = TopDCredit(0.2)(log_q, [double([-0.1, -1.0]), double([-0.1, -1e4])])
    assert all(row.isfinite().all() for row in credit)
    half = TopDCredit(0.2)([row.half() for row in log_q], [double([-0.1, -1.0]).float()] * 2)
    assert all(row.dtype is torch.float32 for row in half)


def test_topd_gradient_is_minus_the_credit_times_rho():
    """Value, gradient and trust region, token by token, in probabilities."""
    p, mu = [0.7, 0.2, 0.9, 0.35, 0.5], [0.6, 0.25, 0.9, 0.45, 0.5]
    credit, w = [1.5, -0.7, 2.0, -1.0, 9.0], [1.0, 2.0, 0.5, 3.0, 1.0]
    mask = [True, True, True, True, False]
    log_p = double(p).log().requires_grad_()
    inputs = LossInputs(
        trainer_logprobs=log_p,
        inference_logprobs=double(mu).log(),
        ref_logprobs=double(p).log(),
        advantages=None,
        credit=double(credit),
        loss_mask=torch.tensor(mask),
        loss_weights=double(w),
    )
    config = LOSS_TYPES["topd"](delta_low=0.06, delta_high=0.2, kl_tau=0.01)
    out = setup_loss_fn(config)(inputs)
    (grad,) = torch.autograd.grad(out.loss, log_p)
    kept = [True, True, True, False, False]  # the fourth fell by .1
    loss, expected = 0.0, []
    for a, b, c, v, keep, m in zip(p, mu, credit, w, kept, mask, strict=True):
        loss += m * v * (-keep * c * a / b + 0.01 * math.log(a / b) ** 2)
        expected.append(m * v * (-keep * c * a / b + 0.02 * math.log(a / b)))
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert out.metrics["topd/is_masked"].item() == 1 / 4


def test_a_sum_has_one_kind_of_credit():
    """A config finds the credit of the losses within it, and refuses two different ones."""

    def composed(*alphas):
        parts = {
            f"c{i}": {"weight": 1.0, "loss": {"type": "topd", "alpha": alpha}}
            for i, alpha in enumerate(alphas)
        }
        return parse_loss({"type": "compose", "distillation": parts})

    assert parse_loss({"type": "compose"}).credit is None
    assert parse_loss({"type": "topd", "alpha": 0.3}).credit == TopDCredit(0.3)
    assert parse_loss({"type": "topd", "rl_mix": {"kd": 1.0}}).credit == TopDCredit(0.2)
    assert composed(0.3, 0.3).credit == TopDCredit(0.3)
    with pytest.raises(ValueError, match="compute the credit of a token in different ways"):
        _ = composed(0.3, 0.4).credit


def test_a_need_of_credit_without_its_rule_is_refused():
    with pytest.raises(TypeError, match="Ruleless needs credit.*own_credit"):

        class Ruleless(LossConfig):
            type: str = "ruleless"
            needs_inputs: ClassVar[frozenset[str]] = frozenset({"credit"})
