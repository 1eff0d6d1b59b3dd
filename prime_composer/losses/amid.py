"""KL to or from an assistant distribution between both (AMiD).

    L = sum over the mask of  KL(q || r), KL(p || r), KL(r || q) or KL(r || p)
    r ∝ (skew q^g + (1 - skew) p^g)^(1/g),    g = (1 - alpha)/2,    alpha = 1: q^skew p^(1 - skew)

The gradient flows through r. alpha = -1 mixes probabilities, and "q||r" is then ``skewed_kl``
forward with the same skew. alpha = 1 mixes log-probs, as TAID does. A larger alpha moves r towards
the tokens that both find probable.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: AMiD (2025), https://arxiv.org/abs/2510.15982, and aailab-kaist/AMiD a963105. Its "pr" is
"q||r" here, because its p is the teacher. The defaults are that code's.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import AMiDDivergence, amid, refuse_amid
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    support_divergence,
)


class AMiDLossConfig(SupportDivergenceConfig):
    """Knobs of ``amid_loss_fn``."""

    type: Literal["amid"] = "amid"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"alpha": 1.0, "skew": 0.3, "divergence": "r||p", "normalization": "renorm", "k": 8},
        {"alpha": -3.0, "divergence": "r||q", "normalization": "full", "k": "full"},
    )

    alpha: float = Field(0.5, le=1)
    """Shape of the mixture: -1 mixes probabilities, 1 mixes log-probs."""

    skew: float = Field(0.5, ge=0, le=1)
    """The teacher's share in r."""

    divergence: AMiDDivergence = "q||r"
    """Which KL is minimized: q is the teacher, p the student, r the assistant."""

    @model_validator(mode="after")
    def _teaches_something(self) -> "AMiDLossConfig":
        refuse_amid(self.alpha, self.skew, self.divergence)
        return self


@register(AMiDLossConfig)
def amid_loss_fn(inputs: LossInputs, config: AMiDLossConfig) -> LossOutputs:
    """Return sum_mask w of the KL between student or teacher and the assistant."""
    return support_divergence(
        inputs,
        config,
        amid,
        alpha=config.alpha,
        skew=config.skew,
        divergence=config.divergence,
    )
