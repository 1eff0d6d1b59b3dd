"""The function of losses that are one divergence on the support, and the config of most."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class SupportDivergenceConfig(SupportLossConfig):
    """Knobs of a loss that is one divergence on the support."""

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""


def support_divergence(
    inputs: LossInputs,
    config: SupportLossConfig,
    divergence: Callable[..., Tensor],
    /,
    metric: str = "divergence",
    reverse: bool = True,
    **knobs: Any,
) -> LossOutputs:
    """Return sum_mask w D(p, q) on the support, with the metrics of a support.

    Args:
        inputs: the loss's inputs.
        config: its ``normalization`` is read.
        divergence: D of student's and teacher's log-probs [seq, k], per position.
        metric: name of D's token mean.
        reverse: the direction of the KL in ``support_metrics``.
        knobs: further arguments of the divergence.
    """
    mask = inputs.loss_mask
    support = given(inputs.support).masked(mask)
    per_token = divergence(
        support.student_logprobs,
        support.teacher_logprobs,
        normalization=config.normalization,
        **knobs,
    )
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            metric: token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
            **support_metrics(support, mask, reverse),
        }
    return LossOutputs(loss=loss, metrics=metrics)
