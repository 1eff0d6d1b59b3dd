"""Adaptive KL (AKL): forward KL by the gap in the teacher's head.

    L = sum over the mask of  w KL(q || p) + (1 - w) KL(p || q)
    w = sg (sum_head |q - p| / sum |q - p|)

The head is the teacher's most probable tokens up to a mass of ``head_mass``, the first one always.
A tail bucket never belongs to it. w is one number per position.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: "Rethinking Kullback-Leibler Divergence in Knowledge Distillation for Large Language
Models" (2024), https://arxiv.org/abs/2404.02657, and wutaiqiang/LLM_KD_AKL ff278be.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import adaptive_kl
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class AdaptiveKLLossConfig(SupportDivergenceConfig):
    """Knobs of ``adaptive_kl_loss_fn``."""

    type: Literal["adaptive_kl"] = "adaptive_kl"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"head_mass": 0.8, "normalization": "renorm", "k": 8},
        {"head_mass": 0.6, "normalization": "full", "k": "full"},
    )
    surrogate: ClassVar[bool] = True

    head_mass: float = Field(0.5, gt=0, lt=1)
    """Cumulated mass of the teacher up to which a token belongs to the head."""


@register(AdaptiveKLLossConfig)
def adaptive_kl_loss_fn(inputs: LossInputs, config: AdaptiveKLLossConfig) -> LossOutputs:
    """Return sum_mask w of the adaptive KL."""
    return support_divergence(inputs, config, adaptive_kl, head_mass=config.head_mass)
