"""Alpha-beta divergence (ABKD): between forward and reverse KL.

    L = sum over the mask of  alpha_beta_divergence(p, q; alpha, beta),    S = the teacher's top K

``alpha`` is the exponent of the teacher's probabilities, ``beta`` that of the student's. (1, 0) is
forward KL, (0, 1) is reverse KL. A small beta pulls harder at tokens that the student finds
improbable, and a small alpha spreads the pull beyond the teacher's first tokens. The scale changes
with both, so that a learning rate for one pair does not fit another.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: ABKD (2025), https://arxiv.org/abs/2505.04560, and ghwang-s/abkd df81318, whose
script for GPT-2 has these defaults. It differs at the limits, see
``divergences.alpha_beta_divergence``.
"""

from typing import Any, ClassVar, Literal

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import alpha_beta_divergence
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class AlphaBetaLossConfig(SupportDivergenceConfig):
    """Knobs of ``alpha_beta_loss_fn``."""

    type: Literal["alpha_beta"] = "alpha_beta"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"alpha": 1.0, "beta": -0.5, "normalization": "renorm", "k": 8},
        {"alpha": 0.4, "beta": 0.0, "normalization": "full", "k": "full"},
    )

    alpha: float = 0.2
    """Exponent of the teacher's probabilities."""

    beta: float = 0.7
    """Exponent of the student's probabilities."""


@register(AlphaBetaLossConfig)
def alpha_beta_loss_fn(inputs: LossInputs, config: AlphaBetaLossConfig) -> LossOutputs:
    """Return sum_mask w D(p, q) for the alpha-beta divergence."""
    return support_divergence(
        inputs, config, alpha_beta_divergence, alpha=config.alpha, beta=config.beta
    )
