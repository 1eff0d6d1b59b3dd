"""Forward KL(teacher || student) on the teacher's top-K tokens: the student covers what the teacher would say.

    L = sum over the mask of  forward_kl(p, q; normalization),    S = the teacher's K most probable tokens

with the normalisations of ``prime_composer.divergences``. Its gradient for a logit is p_j - q_j on S (``tail``): bounded,
however improbable the token is for either of them, where the reverse KL's is not.

Left out: importance weighting, as in ``topk_reverse_kl``.

Reference: GKD, "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649, Eq. 1-2, on the full
vocabulary and as a mean over each sequence first; here it is a sum over tokens.
"""

from typing import ClassVar, Literal

import torch
from pydantic import model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import forward_kl
from prime_composer.losses.base import LossConfig, SupportSize, check_normalization
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class TopKForwardKLLossConfig(LossConfig):
    type: Literal["topk_forward_kl"] = "topk_forward_kl"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support"})

    k: SupportSize = 64
    """Teacher tokens per position; "full" is the whole vocabulary."""

    normalization: Literal["full", "tail", "renorm", "generalized", "raw"] = "tail"
    """What stands for the vocabulary outside the support."""

    allow_biased: bool = False
    """Permits normalization "raw", whose gradient does not vanish at p = q."""

    @model_validator(mode="after")
    def _defined(self) -> "TopKForwardKLLossConfig":
        check_normalization(self.k, self.normalization, self.allow_biased)
        return self


def topk_forward_kl_loss_fn(inputs: LossInputs, config: TopKForwardKLLossConfig) -> LossOutputs:
    """sum_mask w KL(q || p) on the support."""
    mask = inputs.loss_mask
    support = inputs.support.masked(mask)
    per_token = forward_kl(
        support.student_logprobs,
        support.teacher_logprobs,
        config.normalization,
        allow_biased=config.allow_biased,
    )
    loss = masked_sum(per_token, mask, inputs.loss_weights)
    with torch.no_grad():
        metrics = {
            "kl": token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
            **support_metrics(support, mask, reverse=False),
        }
    return LossOutputs(
        loss=loss, metrics={f"topk_forward_kl/{name}": value for name, value in metrics.items()}
    )
