"""Skewed KL (DistiLLM): to a mixture of student and teacher, bounded.

    forward:  L = sum over the mask of  KL(q || skew q + (1 - skew) p)
    reverse:  L = sum over the mask of  KL(p || skew p + (1 - skew) q)

skew = 0 is the plain KL. The loss is at most -log skew per token, and its gradient falls as
(1 - skew)^2, so that a larger skew wants a larger learning rate.

Left out: DistiLLM's adaptive share of the student's own rollouts, which is a property of the data.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: DistiLLM (2024), https://arxiv.org/abs/2402.03898, and jongwooko/distillm d47e77f, whose
default is 0.1.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import skewed_forward_kl, skewed_reverse_kl
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class SkewedKLLossConfig(SupportDivergenceConfig):
    """Knobs of ``skewed_kl_loss_fn``."""

    type: Literal["skewed_kl"] = "skewed_kl"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"direction": "reverse", "skew": 0.3, "normalization": "renorm", "k": 8},
        {"skew": 0.9, "normalization": "full", "k": "full"},
    )

    direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(q || mixture). reverse: KL(p || mixture)."""

    skew: float = Field(0.1, ge=0, lt=1)
    """Share of the left distribution in the mixture: of q in forward, of p in reverse."""


@register(SkewedKLLossConfig)
def skewed_kl_loss_fn(inputs: LossInputs, config: SkewedKLLossConfig) -> LossOutputs:
    """Return sum_mask w of the skewed KL in its direction."""
    divergence = skewed_forward_kl if config.direction == "forward" else skewed_reverse_kl
    return support_divergence(inputs, config, divergence, skew=config.skew)
