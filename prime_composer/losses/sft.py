"""Cross-entropy on given tokens: fine-tuning, or sequence-level distillation on a teacher's text.

    L = -sum over the mask of w log p(y)

On finite inputs, loss, gradient and metric are bit-equal to upstream's, with ``loss_weights`` as in
v0.7 and later. The loss needs no teacher at training time and no on-policy rollouts.

Stale rollouts: p is the current student's, without an importance ratio.

References: ``sft_loss_fn`` (v0.6.0) and ``ce_loss_fn`` (v0.7.0 to 559b4477),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py.
"Sequence-Level Knowledge Distillation" (2016), https://arxiv.org/abs/1606.07947.
"""

from typing import ClassVar, Literal

import torch

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.config import LossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.reductions import masked_mean


class SFTLossConfig(LossConfig):
    """``sft_loss_fn`` has no knobs of its own."""

    type: Literal["sft"] = "sft"

    on_given_text: ClassVar[bool] = True


@register(SFTLossConfig)
def sft_loss_fn(inputs: LossInputs, config: SFTLossConfig) -> LossOutputs:
    """Return -sum_mask w log p."""
    mask = inputs.loss_mask
    nll = -inputs.own_logprobs
    if inputs.loss_weights is not None:
        nll = nll * torch.where(mask, inputs.loss_weights, 1.0)
    # Upstream's order of summation: the tokens of the mask alone.
    loss = nll[mask].sum()

    with torch.no_grad():
        metrics = {"nll": masked_mean(-inputs.own_logprobs, mask)}
    return LossOutputs(loss=loss, metrics=metrics)
