"""Reverse KL(student || teacher) on the teacher's top-K tokens: a whole distribution per position instead of one sample.

    L = sum over the mask of  reverse_kl(p, q; normalization),    S = the teacher's K most probable tokens

with the normalisations of ``prime_composer.divergences``. ``tail`` adds everything outside S as one outcome and is a lower
bound of the full KL; ``renorm`` compares p and q within S only, and nothing then holds the student's mass on S.

Left out: importance weighting (the divergence is exact at each visited position; which positions are visited is the
sampler's choice) and the sampled token outside S (``head_tail_reverse_kl`` has it).

References: "Revisiting On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, Eq. 6-8 (renorm, K = 32); tail
bucket: TA-OPD (2026), https://arxiv.org/abs/2608.14728; generalized: MOPD (2026), https://arxiv.org/abs/2606.30406, Eq. 5.
"""

from typing import ClassVar, Literal

import torch
from pydantic import model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import Normalization, reverse_kl
from prime_composer.losses.base import LossConfig, SupportSize, check_normalization
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class TopKReverseKLLossConfig(LossConfig):
    type: Literal["topk_reverse_kl"] = "topk_reverse_kl"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support"})

    k: SupportSize = 32
    """Teacher tokens per position; "full" is the whole vocabulary."""

    normalization: Normalization = "tail"
    """What stands for the vocabulary outside the support."""

    allow_biased: bool = False
    """Permits normalization "raw", whose gradient does not vanish at p = q."""

    @model_validator(mode="after")
    def _defined(self) -> "TopKReverseKLLossConfig":
        check_normalization(self.k, self.normalization, self.allow_biased)
        return self


def topk_reverse_kl_loss_fn(inputs: LossInputs, config: TopKReverseKLLossConfig) -> LossOutputs:
    """sum_mask w KL(p || q) on the support."""
    mask = inputs.loss_mask
    support = inputs.support.masked(mask)
    per_token = reverse_kl(
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
            **support_metrics(support, mask),
        }
    return LossOutputs(
        loss=loss, metrics={f"topk_reverse_kl/{name}": value for name, value in metrics.items()}
    )
