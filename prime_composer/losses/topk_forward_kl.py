"""Forward KL(teacher || student) on the teacher's top-K tokens: the student covers the teacher.

    L = sum over the mask of  forward_kl(p, q; normalization),    S = the teacher's K most probable

with the normalizations of ``prime_composer.divergences``. Its gradient for a logit is p_j - q_j on
S (``tail``). It is bounded for any probability of the token, unlike the reverse KL's.

Left out: importance weighting, as in ``topk_reverse_kl``.

Stale rollouts: compared as the current student has them, without an importance ratio.

Reference: GKD, "On-Policy Distillation of Language Models" (2023),
https://arxiv.org/abs/2306.13649, Eq. 1-2. The paper uses the full vocabulary and takes the mean
over each sequence first. This loss is a sum over tokens.
"""

from typing import Any, ClassVar, Literal

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import forward_kl
from prime_composer.losses.config import KLLossConfig, SupportSize
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import support_divergence


class TopKForwardKLLossConfig(KLLossConfig):
    """Knobs of ``topk_forward_kl_loss_fn``."""

    type: Literal["topk_forward_kl"] = "topk_forward_kl"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "generalized", "k": 8},
        {"k": "full"},
    )

    k: SupportSize = 64
    """Teacher tokens per position. "full" is the whole vocabulary. The default is twice that of the
    other losses. No measurement behind it is recorded; it stays so that recipes keep their results.
    """

    normalization: Literal["full", "tail", "renorm", "generalized", "raw"] = "tail"
    """How the vocabulary outside the support enters the divergence."""


@register(TopKForwardKLLossConfig)
def topk_forward_kl_loss_fn(inputs: LossInputs, config: TopKForwardKLLossConfig) -> LossOutputs:
    """Return sum_mask w KL(q || p)."""
    return support_divergence(
        inputs,
        config,
        forward_kl,
        metric="kl",
        reverse=False,
        allow_biased=config.allow_biased,
    )
