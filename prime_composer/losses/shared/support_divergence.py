"""The function of losses that are one divergence per token, and the config of most."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, Support, given
from prime_composer.divergences.base import renormalized, upcast
from prime_composer.losses.config import SupportLossConfig, TopKLossConfig
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.losses.shared.whole_vocabulary import separable, whole_vocabulary
from prime_composer.two_heads import TwoHeads


class SupportDivergenceConfig(SupportLossConfig):
    """Knobs of a loss that is one divergence per token."""

    whole_by_heads: ClassVar[bool] = True

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""


def support_divergence(
    inputs: LossInputs,
    config: SupportLossConfig,
    divergence: Callable[..., Tensor],
    /,
    whole: Callable[[TwoHeads], Tensor] | None = None,
    metric: str = "divergence",
    reverse: bool = True,
    **knobs: Any,
) -> LossOutputs:
    """Return sum_mask w D(p, q), on the support or over the whole vocabulary.

    Args:
        inputs: the loss's inputs.
        config: its ``normalization`` and ``temperature`` are read.
        divergence: D of student's and teacher's log-probs [seq, k], per position.
        whole: D over two heads. None for one that is a sum of one term per token.
        metric: name of D's token mean.
        reverse: the direction of the KL in ``support_metrics``.
        knobs: further arguments of the divergence.
    """
    mask = inputs.loss_mask
    per_token = divergence_per_token(inputs, config, divergence, mask, whole=whole, **knobs)
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            metric: token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
            **comparison_metrics(inputs, config, mask, reverse),
        }
    return LossOutputs(loss=loss, metrics=metrics)


def comparison_metrics(
    inputs: LossInputs, config: TopKLossConfig, mask: Bool[Tensor, " seq"], reverse: bool = True
) -> dict[str, Tensor]:
    """Return ``support_metrics``; none for whole vocabularies, which nothing is outside of."""
    if config.comparison_need == "hidden_states":
        return {}
    return support_metrics(given(inputs.support).masked(mask), mask, reverse)


def divergence_per_token(
    inputs: LossInputs,
    config: SupportLossConfig,
    divergence: Callable[..., Tensor],
    mask: Bool[Tensor, " seq"],
    /,
    whole: Callable[[TwoHeads], Tensor] | None = None,
    **knobs: Any,
) -> Float[Tensor, " seq"]:
    """Return D(p, q) per token, and 0 outside ``mask``.

    Args:
        inputs: the loss's inputs.
        config: its ``normalization`` and ``temperature`` are read.
        divergence: D of student's and teacher's log-probs [seq, k], per position.
        mask: True at the tokens that are compared.
        whole: D over two heads. None for one that is a sum of one term per token.
        knobs: further arguments of the divergence.
    """
    if config.comparison_need == "hidden_states":
        heads = whole_vocabulary(inputs, config, mask)
        return separable(heads, divergence, **knobs) if whole is None else whole(heads)
    support = given(inputs.support).masked(mask)
    return divergence(*tempered(support, config), normalization=config.normalization, **knobs)


def tempered(support: Support, config: SupportLossConfig) -> tuple[Tensor, Tensor]:
    """Return the log-probs of student and teacher on the support, at the config's temperature.

    At another one than 1 they are those within the support, which is renorm's or the vocabulary.
    """
    p, q = support.student_logprobs, support.teacher_logprobs
    if config.temperature == 1:
        return p, q
    return renormalized(upcast(p) / config.temperature), renormalized(
        upcast(q) / config.temperature
    )
