"""Gated distillation (SDAR): the sampled token behind a sigmoid gate, beside an RL loss.

    L = sum over the mask of  g (log q(y) - log p(y)),    g = sg sigmoid(beta (log q(y) - log p(y)))

The gate is near 1 where the teacher supports the sampled token more than the student does, and
fades where the teacher rejects it. A rejection may come from a hint that does not fit. The gradient
with respect to log p(y) is -g: the student's own tokens gain, the more the better the teacher likes
them. The value is the authors', and no divergence: it can be negative and its size is not a
distance. At p = q the gate is 1/2 for every token, and the expected gradient over y ~ p is 0.
beta = 0 is refused: the gate would be 1/2 everywhere, and the teacher drop out.

It is an auxiliary term: put it into ``[loss.distillation.<name>]`` of ``compose``, with a weight of
about 0.01, beside the RL loss. There is no importance ratio, as in the authors' code.

Stale rollouts: p is the current student's, without an importance ratio.

References: "Self-Distilled Agentic Reinforcement Learning" (2026),
https://arxiv.org/abs/2605.15155, and ZJU-REAL/SDAR 8b85c23, verl/trainer/ppo/sdar_utils.py.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences.base import upcast
from prime_composer.losses.config import LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class SDARLossConfig(LossConfig):
    """Knobs of ``sdar_loss_fn``."""

    type: Literal["sdar"] = "sdar"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"beta": 1.5})
    surrogate: ClassVar[bool] = True

    beta: PositiveFloat = 5.0
    """Steepness of the gate, per nat."""


@register(SDARLossConfig)
def sdar_loss_fn(inputs: LossInputs, config: SDARLossConfig) -> LossOutputs:
    """Return sum_mask w sg(sigmoid(beta (log q - log p))) (log q - log p)."""
    mask = inputs.loss_mask
    student = torch.where(mask, upcast(inputs.own_logprobs), 0.0)
    teacher = torch.where(mask, upcast(given(inputs.ref_logprobs)).detach(), 0.0)
    gap = teacher - student
    gate = torch.sigmoid(config.beta * gap.detach())
    loss = masked_sum(gate * gap, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            "gap": token_mean(gap, mask),
            "gate": token_mean(gate, mask),
            "gate_open": token_mean(gate > 0.5, mask),
            "signal_top1pct": top_share(gate, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
