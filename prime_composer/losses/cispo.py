"""CISPO: policy gradient with a clipped importance weight, so that no token is dropped.

Per token of the mask, with advantage A,

    -sg(clip(rho, ratio_low, ratio_high)) adv_tau A log p(y),    rho = p(y)/mu(y)

The weight is detached. The gradient is -clip(rho) adv_tau A grad log p at every token, where PPO
has none at clipped ones. ratio_low = 0 clips on the high side alone, as the paper does.

Left out: the paper's mask of tokens, which brings PPO's rule back. Equality with prime-rl's class
is read from its source, and was not run.

Stale rollouts: weighted by the importance ratio rho, clipped and detached.

References: "MiniMax-M1" (2025), https://arxiv.org/abs/2506.13585, and prime-rl's ``CISPOLoss``
(main of October 2026),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.trust_region import (
    RewardLossConfig,
    importance_ratios,
    weighted_sum,
)


class CISPOLossConfig(RewardLossConfig):
    """Knobs of ``cispo_loss_fn``, by upstream's names."""

    type: Literal["cispo"] = "cispo"

    surrogate: ClassVar[bool] = True
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"ratio_low": 0.9, "ratio_high": 1.1})

    ratio_low: float = Field(0.0, ge=0, le=1)
    """The weight is at least this. 0 does not clip."""

    ratio_high: float = Field(5.0, ge=1)
    """The weight is at most this."""


@register(CISPOLossConfig)
def cispo_loss_fn(inputs: LossInputs, config: CISPOLossConfig) -> LossOutputs:
    """Return sum_mask w (-sg(clip(rho)) adv_tau A log p)."""
    mask = inputs.loss_mask
    logprobs = torch.where(mask, inputs.trainer_logprobs, 0.0)
    with torch.no_grad():
        log_ratio = importance_ratios(inputs).log_ratio
        low = math.log(config.ratio_low) if config.ratio_low else -math.inf
        clipped = log_ratio.clamp(low, math.log(config.ratio_high))
        signal = clipped.exp() * config.adv_tau * torch.where(mask, given(inputs.advantages), 0.0)
        metrics = {
            "is_clipped": token_mean(log_ratio != clipped, mask),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=weighted_sum(-signal * logprobs, inputs), metrics=metrics)
