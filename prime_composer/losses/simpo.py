"""SimPO on (chosen, rejected) pairs, without a reference policy: a loss of the replay channel.

Per pair, with the *mean* log-prob of each response's tokens,

    -log sigmoid(beta (mean log p(chosen) - mean log p(rejected)) - gamma)

Pairs are laid out and weighted as in ``dpo``. The loss is a SUM over pairs.

Reference: "SimPO" (2024), https://arxiv.org/abs/2405.14734, Eq. 6.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat

from prime_composer.contract import Count, LossInputs, LossOutputs, PairMean
from prime_composer.divergences import upcast
from prime_composer.losses.config import ChannelName, LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.pairs import pairs_of
from prime_composer.losses.shared.reductions import masked_sum


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
    policy = torch.where(inputs.loss_mask, upcast(inputs.trainer_logprobs), 0.0)
    pairs = pairs_of(inputs, policy.dtype)
    chosen, rejected = pairs.sums(policy) / pairs.lengths.clamp(min=1)
    margin = config.beta * (chosen - rejected) - config.gamma
    loss = masked_sum(-F.logsigmoid(margin), pairs.complete, pairs.weights)

    with torch.no_grad():
        metrics: dict[str, torch.Tensor] = {
            "loss": PairMean(token_mean(-F.logsigmoid(margin), pairs.complete)),
            "margin": PairMean(token_mean(margin, pairs.complete)),
            "accuracy": PairMean(token_mean(margin > -config.gamma, pairs.complete)),
            "pairs": Count(pairs.complete.sum().to(policy.dtype)),
        }
    return LossOutputs(loss=loss, metrics=metrics)
