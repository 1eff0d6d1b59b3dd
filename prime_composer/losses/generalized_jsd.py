"""Generalised Jensen-Shannon divergence between student and teacher: between covering and seeking.

    L = sum over the mask of  beta KL(q || m) + (1 - beta) KL(p || m),    m = beta q + (1 - beta) p

``beta`` is the teacher's weight in the mixture: 0 is forward KL and 1 is reverse KL by convention, and the scale jumps at both
ends (see ``divergences.generalized_jsd``). Bounded, unlike either KL.

Left out: GKD's lambda, the share of sequences that the student generated itself, is a matter of the data; the engine draws it
per sequence before it samples, where the paper's Alg. 1 draws once per step. The paper's mean over each sequence (Eq. 2):
every token of the batch counts alike here. Temperatures: log-probs are of T = 1.

References: GKD, "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649, Eq. 1-2, Alg. 1.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import generalized_jsd
from prime_composer.losses.base import LossConfig, SupportSize, check_normalization
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class GeneralizedJSDLossConfig(LossConfig):
    type: Literal["generalized_jsd"] = "generalized_jsd"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support"})

    beta: float = Field(0.5, ge=0, le=1)
    """The teacher's weight in the mixture: 0 forward KL, 1 reverse KL."""

    k: SupportSize = 32
    """Teacher tokens per position; "full" is the whole vocabulary."""

    normalization: Literal["full", "tail", "renorm", "generalized"] = "tail"
    """What stands for the vocabulary outside the support."""

    @model_validator(mode="after")
    def _defined(self) -> "GeneralizedJSDLossConfig":
        check_normalization(self.k, self.normalization)
        return self


def generalized_jsd_loss_fn(inputs: LossInputs, config: GeneralizedJSDLossConfig) -> LossOutputs:
    """sum_mask w JSD_beta(p, q) on the support."""
    mask = inputs.loss_mask
    support = inputs.support.masked(mask)
    per_token = generalized_jsd(
        support.student_logprobs, support.teacher_logprobs, config.beta, config.normalization
    )
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            "jsd": token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
            **support_metrics(support, mask),
        }
    return LossOutputs(
        loss=loss, metrics={f"generalized_jsd/{name}": value for name, value in metrics.items()}
    )
