"""DPO on (chosen, rejected) pairs, with a frozen reference policy: a loss of the replay channel.

Per pair, with the log-probs summed over each response's tokens,

    -log sigmoid(beta [(log p - log r)(chosen) - (log p - log r)(rejected)])

r is the reference policy, and ``ref_logprobs`` of the pairs' inputs are log r. Segment 2i of the
pack is the chosen response of pair i, and 2i + 1 the rejected one. A pair with one side entirely
outside the mask trains nothing.

The loss is a SUM over *pairs*. Where the trainer divides by tokens, ``loss_weights`` of
tokens/pairs make that the mean over pairs. A pair's weight is the mean weight of its tokens.

Stale rollouts: p is the current student's, without an importance ratio. Pairs are of any policy.

Reference: "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290, Eq. 7.
"""

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences import upcast
from prime_composer.losses.config import ChannelName, LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.pairs import logistic_loss, pairs_of


class DPOLossConfig(LossConfig):
    """Knobs of ``dpo_loss_fn``."""

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
    pairs = pairs_of(inputs, policy.dtype)
    chosen, rejected = pairs.sums(policy - reference)
    margin = config.beta * (chosen - rejected)
    return logistic_loss(pairs, margin, margin > 0)
