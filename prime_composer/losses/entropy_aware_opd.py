"""Entropy-aware distillation: reverse KL, plus forward KL where the teacher's entropy is high.

    L = sum over the mask of  R + alpha 1[H(q) > tau] KL(q || p; normalization)

R is the clipped sampled-token reverse KL (``reverse = "sampled"``) or the reverse KL on the same
support (``"topk"``). H(q) is measured on the support's outcomes. On K < V with ``tail`` the rest
counts as one outcome, so that H(q) is a lower bound of the entropy of a single teacher. It is none
of a mixture's, whose head is a bound itself. Choose tau by the metric ``entropy``, which reports
this number: the paper's tau, alpha and K could not be found.

Stale rollouts: p is the current student's. With ``reverse = "sampled"``, R is weighted by the
importance ratio p/mu within the trust region, and nothing else is.

Reference: "Entropy-Aware On-Policy Distillation" (2026), https://arxiv.org/abs/2603.07079.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences import kls_and_entropy
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.losses.shared.support_divergence import (
    comparison_metrics,
    divergence_per_token,
)
from prime_composer.losses.shared.trust_region import (
    importance_ratios,
    policy_gradient_sum,
    signed_region,
)


class EntropyAwareOPDLossConfig(SupportLossConfig):
    """Knobs of ``entropy_aware_opd_loss_fn``."""

    type: Literal["entropy_aware_opd"] = "entropy_aware_opd"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"tau": 1.5, "alpha": 0.5},
        {"tau": 1.5, "alpha": 0.5, "reverse": "topk", "k": 8},
        {"tau": 1.5, "alpha": 0.5, "k": "full"},
        {"tau": 1.5, "alpha": 0.5, "reverse": "topk", "k": "full", "temperature": 2.0},
    )
    surrogate: ClassVar[bool] = True

    tau: NonNegativeFloat
    """The teacher's entropy, in nats, above which the forward KL is added."""

    alpha: NonNegativeFloat
    """Factor of the forward KL there."""

    reverse: Literal["sampled", "topk"] = "sampled"
    """The reverse KL: the sampled token's, within a trust region, or the support's."""

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""

    delta_low: NonNegativeFloat = 0.2
    """``sampled``: a token with A < 0 is dropped once its probability fell by more than this."""

    delta_high: NonNegativeFloat = 0.2
    """``sampled``: a token with A > 0 is dropped once its probability rose by more than this."""

    @property
    def own_needs(self) -> frozenset[str]:
        """The comparison, and the sampled token's log-prob for the sampled reverse KL."""
        return super().own_needs | ({"ref_logprobs"} if self.reverse == "sampled" else set())


@register(EntropyAwareOPDLossConfig)
def entropy_aware_opd_loss_fn(inputs: LossInputs, config: EntropyAwareOPDLossConfig) -> LossOutputs:
    """Return sum_mask w (R + alpha 1[H(q) > tau] KL(q || p))."""
    mask = inputs.loss_mask
    on_all_tokens = config.reverse == "topk"
    forward, teacher_entropy, *reverses = divergence_per_token(
        inputs, config, kls_and_entropy, mask, with_reverse=on_all_tokens
    ).unbind(-1)
    teacher_entropy = teacher_entropy.detach()
    # Negated, so that a missing log-prob (NaN) counts as unsure and makes the sum NaN.
    unsure = mask & ~(teacher_entropy <= config.tau)
    forward_sum = config.alpha * masked_sum(forward, unsure, inputs.loss_weights)
    if on_all_tokens:
        (reverse,) = reverses
        loss = masked_sum(reverse, mask, inputs.loss_weights) + forward_sum
        dropped = torch.zeros_like(mask)
    else:
        ratios = importance_ratios(inputs)
        with torch.no_grad():
            log_teacher_ratio = given(inputs.ref_logprobs) - inputs.own_logprobs
            signal = torch.where(mask, log_teacher_ratio, 0.0)
            high, low = signed_region(
                signal, ratios.probs_diff, config.delta_low, config.delta_high, mask
            )
            dropped = high | low
            reverse = -signal
        loss = (
            policy_gradient_sum(ratios.log_ratio, signal, mask & ~dropped, 0.0, inputs)
            + forward_sum
        )

    with torch.no_grad():
        metrics = {
            "reverse_kl": token_mean(reverse, mask),
            "forward_kl": token_mean(forward, mask),
            "entropy": token_mean(teacher_entropy, mask),
            "unsure": token_mean(unsure, mask),
            "is_masked": token_mean(dropped, mask),
            "signal_top1pct": top_share(reverse, mask),
            **comparison_metrics(inputs, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
