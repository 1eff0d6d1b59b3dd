"""Total variation distance: half the sum of absolute differences.

    L = sum over the mask of  1/2 sum |p - q|

The gradient for log p_j is p_j sign(p_j - q_j) / 2. It does not shrink as p approaches q, so that
the learning rate has to.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: "f-Divergence Minimization for Sequence-Level Knowledge Distillation" (2023),
https://arxiv.org/abs/2307.15190.
"""

from typing import Any, ClassVar, Literal

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import total_variation
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class TotalVariationLossConfig(SupportDivergenceConfig):
    """Knobs of ``total_variation_loss_fn``."""

    type: Literal["total_variation"] = "total_variation"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "full", "k": "full"},
    )


@register(TotalVariationLossConfig)
def total_variation_loss_fn(inputs: LossInputs, config: TotalVariationLossConfig) -> LossOutputs:
    """Return sum_mask w of the total variation distance."""
    return support_divergence(inputs, config, total_variation)
