"""Weights of unequal sequences and environments, against means that are computed one by one."""

import dataclasses

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.balance import Balance

TOKENS = [1, 4, 5, 10]
NAMES = ["short", "short", "long", "long"]
LOSSES = [[3.0], [1.0, 2.0, 3.0, 6.0], [1.0] * 5, [0.5] * 10]
"""Losses of the tokens of each sequence: means 3, 3, 1 and 0.5."""


def step_loss(balance: Balance) -> float:
    """Return (1/N) sum_t w_t loss_t, as a trainer divides."""
    weights = balance.of_sequences(TOKENS, NAMES)
    return sum(w * sum(own) for w, own in zip(weights, LOSSES, strict=True)) / sum(TOKENS)


@pytest.mark.parametrize(
    "balance,expected",
    [
        ({"by": "token"}, (3 + 12 + 5 + 5) / 20),
        ({"by": "token", "weights": {"short": 3.0}}, (3 * 15 + 10) / (3 * 5 + 15)),
        ({"by": "sequence"}, (3 + 3 + 1 + 0.5) / 4),
        ({"by": "sequence", "weights": {"long": 2.0}}, (3 + 3 + 2 * 1.5) / (2 + 2 * 2)),
        ({"by": "environment"}, (15 / 5 + 10 / 15) / 2),
        ({"weights": {"short": 0.5}}, (0.5 * 15 / 5 + 10 / 15) / 1.5),
    ],
)
def test_balance_gives_the_mean_of_means(balance, expected):
    assert step_loss(Balance(**balance)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("by", ["token", "sequence", "environment"])
def test_balance_keeps_the_steps_total_weight(by):
    """Learning rates stay comparable. A sequence without a token counts in no mean."""
    weights = Balance(by=by).of_sequences([0, *TOKENS], ["long", *NAMES])
    assert weights[0] == 0
    assert weights[1:] == Balance(by=by).of_sequences(TOKENS, NAMES)
    assert sum(w * n for w, n in zip(weights[1:], TOKENS, strict=True)) == pytest.approx(20)
    assert Balance(by=by).of_sequences([0, 0], ["a", "b"]) == [0, 0]


def inputs_of(weights: torch.Tensor | None, own: torch.Tensor | None = None) -> LossInputs:
    p = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True])
    return LossInputs(p, p.detach(), p.detach() - 1, None, mask, own, balance=weights)


def test_balance_scales_each_tokens_gradient():
    """Beside weights that a trainer gives; what is outside of the mask is not read."""
    loss = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](balance={}))
    plain = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"]())
    weights = torch.tensor([2.0, torch.nan, 0.5], dtype=torch.float64)
    own = torch.tensor([3.0, torch.nan, 7.0], dtype=torch.float64)
    gradients = []
    for fn, inputs in (
        (loss, inputs_of(weights, own)),
        (loss, inputs_of(weights)),
        (plain, inputs_of(None)),
    ):
        fn(inputs).loss.backward()
        gradients.append(inputs.trainer_logprobs.grad.tolist())
    both, alone, without = gradients
    assert alone == pytest.approx([2 * without[0], 0, 0.5 * without[2]])
    assert both == pytest.approx([6 * without[0], 0, 3.5 * without[2]])


@pytest.mark.parametrize("kd", [0.0, 0.5])
def test_balance_scales_both_parts_of_an_rl_mix(kd):
    weights = torch.tensor([2.0, torch.nan, 0.5], dtype=torch.float64)
    gradients = []
    for knobs, own in (({"balance": {}}, weights), ({}, None)):
        config = LOSS_TYPES["sampled_reverse_kl"](rl_mix={"kd": kd, "form": "add"}, **knobs)
        advantages = torch.tensor([1.0, 0.0, -3.0], dtype=torch.float64)
        inputs = dataclasses.replace(inputs_of(own), advantages=advantages)
        setup_loss_fn(config)(inputs).loss.backward()
        gradients.append(inputs.trainer_logprobs.grad.tolist())
    balanced, plain = gradients
    assert balanced == pytest.approx([2 * plain[0], 0, 0.5 * plain[2]]) and all(plain[::2])
