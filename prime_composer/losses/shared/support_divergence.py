"""The sum of one divergence per token, and what a loss with more terms is made of."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.full_vocabulary import WholeVocabulary, on_support
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


def support_divergence(
    inputs: LossInputs,
    config: SupportLossConfig,
    divergence: Callable[..., Tensor],
    /,
    metric: str = "divergence",
    reverse: bool = True,
    **knobs: Any,
) -> LossOutputs:
    """Return sum_mask w D(p, q), on the support or over the whole vocabulary."""
    mask = inputs.loss_mask
    per_token = divergence_per_token(inputs, config, divergence, mask, **knobs)
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            metric: token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
            **comparison_metrics(inputs, mask, reverse),
        }
    return LossOutputs(loss=loss, metrics=metrics)


def comparison_metrics(
    inputs: LossInputs, mask: Bool[Tensor, " seq"], reverse: bool = True
) -> dict[str, Tensor]:
    """Return ``support_metrics``; none for whole vocabularies, which nothing is outside of."""
    support = given(inputs.support)
    if isinstance(support, WholeVocabulary):
        return {}
    return support_metrics(support.masked(mask), mask, reverse)


def divergence_per_token(
    inputs: LossInputs,
    config: SupportLossConfig,
    divergence: Callable[..., Tensor],
    mask: Bool[Tensor, " seq"],
    /,
    **knobs: Any,
) -> Float[Tensor, "seq ..."]:
    """Return D(p, q) per token, and 0 outside ``mask``."""
    support = given(inputs.support).masked(mask).tempered(config.temperature)
    return on_support(support, divergence, config.normalization, **knobs)
