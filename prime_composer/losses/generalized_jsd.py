"""Generalized Jensen-Shannon divergence between student and teacher: between covering and seeking.

    L = sum over the mask of  beta KL(q || m) + (1 - beta) KL(p || m),    m = beta q + (1 - beta) p

``beta`` is the teacher's weight in the mixture. By convention 0 is forward KL and 1 is reverse KL,
and the scale jumps at both ends (see ``divergences.generalized_jsd``). The divergence is bounded,
unlike either KL.

Left out: GKD's lambda, which the engine draws per sequence before sampling, and the paper's mean
over each sequence (Eq. 2), because every token of the batch counts alike here.

Stale rollouts: compared as the current student has them, without an importance ratio.

References: GKD, "On-Policy Distillation of Language Models" (2023),
https://arxiv.org/abs/2306.13649, Eq. 1-2, Alg. 1.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import generalized_jsd
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import support_divergence


class GeneralizedJSDLossConfig(SupportLossConfig):
    """Knobs of ``generalized_jsd_loss_fn``."""

    type: Literal["generalized_jsd"] = "generalized_jsd"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"beta": 0.2, "normalization": "renorm", "k": 8},
        {"beta": 0.9, "normalization": "generalized", "k": 8},
        {"beta": 0.3, "normalization": "full", "k": "full"},
    )

    beta: float = Field(0.5, ge=0, le=1)
    """The teacher's weight in the mixture: 0 is forward KL, 1 is reverse KL."""

    normalization: Literal["full", "tail", "renorm", "generalized"] = "tail"
    """How the vocabulary outside the support enters the divergence."""


@register(GeneralizedJSDLossConfig)
def generalized_jsd_loss_fn(inputs: LossInputs, config: GeneralizedJSDLossConfig) -> LossOutputs:
    """Return sum_mask w JSD_beta(p, q)."""
    return support_divergence(inputs, config, generalized_jsd, metric="jsd", beta=config.beta)
