"""Losses on (chosen, rejected) pairs, for the replay channel of ``compose``.

Per pair,

    -log sigmoid(margin)

Segment 2i of the pack is the chosen response of pair i, and 2i + 1 the rejected one. A pair with
one side entirely outside the mask trains nothing.

A loss is a SUM over *pairs*. Where the trainer divides by tokens, ``loss_weights`` of tokens/pairs
make that the mean over pairs. A pair's weight is the mean weight of its tokens.

Stale rollouts: p is the current student's, without an importance ratio. Pairs are of any policy.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from prime_composer.contract import Count, LossInputs, LossOutputs, given
from prime_composer.divergences import upcast
from prime_composer.losses.config import ChannelName, LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.modifiers import segment_starts
from prime_composer.losses.shared.reductions import masked_sum


class DPOLossConfig(LossConfig):
    """DPO on (chosen, rejected) pairs, with a frozen reference policy, for the replay channel.

        margin = beta [(log p - log r)(chosen) - (log p - log r)(rejected)]

    with the log-probs summed over each response's tokens. r is the reference policy, and
    ``ref_logprobs`` of the pairs' inputs are log r.

    Reference: "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290, Eq. 7.
    """

    type: Literal["dpo"] = "dpo"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs", "segment_ids"})
    channel: ClassVar[ChannelName] = "replay"

    beta: PositiveFloat = 0.1
    """Inverse temperature: how far the policy may leave the reference for a preference."""


@register(DPOLossConfig)
def dpo_loss_fn(inputs: LossInputs, config: DPOLossConfig) -> LossOutputs:
    """Return the sum over pairs of -w log sigmoid(beta margin)."""
    mask = inputs.loss_mask
    policy = torch.where(mask, upcast(inputs.own_logprobs), 0.0)
    reference = torch.where(mask, upcast(given(inputs.ref_logprobs)).detach(), 0.0)
    pairs = Pairs(inputs, policy.dtype)
    chosen, rejected = pairs.sums(policy - reference)
    margin = config.beta * (chosen - rejected)
    return logistic_loss(pairs, margin, margin > 0)


class SimPOLossConfig(LossConfig):
    """SimPO on (chosen, rejected) pairs, without a reference policy, for the replay channel.

        margin = beta (mean log p(chosen) - mean log p(rejected)) - gamma

    with the *mean* log-prob of each response's tokens.

    Reference: "SimPO" (2024), https://arxiv.org/abs/2405.14734, Eq. 6.
    """

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
    pairs = Pairs(inputs, policy.dtype)
    chosen, rejected = pairs.sums(policy) / pairs.lengths.clamp(min=1)
    margin = config.beta * (chosen - rejected) - config.gamma
    return logistic_loss(pairs, margin, margin > -config.gamma)


class Pairs:
    """Pairs of a pack, in order. The arrays are as long as the pack, and most rows are empty.

    ``complete`` is True where both responses have a token of the mask, [seq]; any other pair trains
    nothing. ``weights`` are the mean ``loss_weights`` of the pair's tokens, [seq], and ``lengths``
    the tokens of the mask, chosen then rejected, [2, seq]. Rows are counted, not read, so that the
    host waits for nothing.
    """

    def __init__(self, inputs: LossInputs, dtype: torch.dtype):
        mask, segments = inputs.loss_mask, given(inputs.segment_ids)
        self._row = segment_starts(segments // 2).long().cumsum(0) - 1
        self._side = segments % 2
        own = inputs.loss_weights
        weights = torch.ones_like(mask, dtype=dtype) if own is None else own.to(dtype)
        self.lengths = self.sums(mask.to(dtype))
        total = self.sums(torch.where(mask, weights, 0.0)).sum(0)
        self.complete: Bool[Tensor, " seq"] = (self.lengths > 0).all(0)
        self.weights: Float[Tensor, " seq"] = total / self.lengths.sum(0).clamp(min=1)

    def sums(self, values: Float[Tensor, " seq"]) -> Float[Tensor, "2 seq"]:
        """Return the sums over each response, chosen then rejected, of values that are masked."""
        sides = (torch.where(self._side == side, values, 0.0) for side in (0, 1))
        zeros = torch.zeros_like(values)
        return torch.stack([zeros.index_add(0, self._row, own) for own in sides])


def logistic_loss(
    pairs: Pairs, margin: Float[Tensor, " seq"], prefers_chosen: Bool[Tensor, " seq"]
) -> LossOutputs:
    """Return the sum over pairs of -w log sigmoid(margin), and the metrics of preference losses."""
    per_pair = -F.logsigmoid(margin)
    loss = masked_sum(per_pair, pairs.complete, pairs.weights)
    with torch.no_grad():
        metrics: dict[str, Tensor] = {
            "loss": token_mean(per_pair, pairs.complete),
            "margin": token_mean(margin, pairs.complete),
            "accuracy": token_mean(prefers_chosen, pairs.complete),
            "pairs": Count(pairs.complete.sum().to(margin.dtype)),
        }
    return LossOutputs(loss=loss, metrics=metrics)
