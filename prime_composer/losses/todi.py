"""Forward KL where the student is too low, reverse KL elsewhere (ToDi).

    L = sum over the mask of  sum_v a_v q_v log q_v/p_v + (1 - a_v) p_v log p_v/q_v
    a_v = sg sigmoid(log q_v/p_v)

The value is forward KL plus reverse KL. The gradient is not, because the weights are held fixed.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: ToDi (2025), https://arxiv.org/abs/2505.16297, and jungseongryong/ToDi 45f1f8b.
"""

from typing import Any, ClassVar, Literal

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import todi
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class ToDiLossConfig(SupportDivergenceConfig):
    """Knobs of ``todi_loss_fn``."""

    type: Literal["todi"] = "todi"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "full", "k": "full"},
        {"clamp": {"limit": 0.2}},
        {"normalization": "full", "k": "full", "clamp": {"limit": 0.2}},
    )
    surrogate: ClassVar[bool] = True


@register(ToDiLossConfig)
def todi_loss_fn(inputs: LossInputs, config: ToDiLossConfig) -> LossOutputs:
    """Return sum_mask w of ToDi's divergence."""
    return support_divergence(inputs, config, todi)
