"""SimPO on (chosen, rejected) pairs, without a reference policy: a loss of the replay channel.

Per pair, with the *mean* log-prob of each response's tokens,

    -log sigmoid(beta (mean log p(chosen) - mean log p(rejected)) - gamma)

Pairs are laid out and weighted as in ``dpo``. The loss is a SUM over pairs.

Stale rollouts: p is the current student's, without an importance ratio. Pairs are of any policy.

Reference: "SimPO" (2024), https://arxiv.org/abs/2405.14734, Eq. 6.
"""

from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import upcast
from prime_composer.losses.config import ChannelName, LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.pairs import logistic_loss, pairs_of


class SimPOLossConfig(LossConfig):
    """Knobs of ``simpo_loss_fn``."""

    type: Literal["simpo"] = "simpo"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"segment_ids"})
    channel: ClassVar[ChannelName] = "replay"

    beta: PositiveFloat = 2.0
    """Scale of the difference of the mean log-probs."""

    gamma: NonNegativeFloat = 1.0
    """Margin that the chosen response has to exceed."""


@register(SimPOLossConfig)
def simpo_loss_fn(inputs: LossInputs, config: SimPOLossConfig) -> LossOutputs:
    """Return the sum over pairs of -w log sigmoid(beta difference - gamma)."""
    policy = torch.where(inputs.loss_mask, upcast(inputs.own_logprobs), 0.0)
    pairs = pairs_of(inputs, policy.dtype)
    chosen, rejected = pairs.sums(policy) / pairs.lengths.clamp(min=1)
    margin = config.beta * (chosen - rejected) - config.gamma
    return logistic_loss(pairs, margin, margin > -config.gamma)
