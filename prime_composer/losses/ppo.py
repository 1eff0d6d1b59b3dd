"""PPO: the clipped surrogate of each token, against the policy that sampled.

Per token of the mask, with advantage A,

    -min(adv_tau A rho, adv_tau A clip(rho, ratio_low, ratio_high)),    rho = p(y)/mu(y)

The gradient is -adv_tau A rho grad log p, and 0 where the step would move a ratio further out of
the band: A > 0 and rho > ratio_high, or A < 0 and rho < ratio_low. On the other side rho is
unbounded. There it counts at most max_importance_ratio, with that gradient.

Left out: a value function, an entropy bonus, and PPO's ratio to the policy at the start of a step:
the sampler is the old policy. Equality with prime-rl's class is read from its source, and was not
run.

Stale rollouts: weighted by the importance ratio rho, clipped.

References: "Proximal Policy Optimization Algorithms" (2017), https://arxiv.org/abs/1707.06347, Eq.
7, and prime-rl's ``PPOLoss`` (main of October 2026),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.dialect import MAX_RATIO
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.trust_region import (
    RewardLossConfig,
    capped_ratio,
    importance_ratios,
    weighted_sum,
)
from prime_composer.tables import refuse_above


class PPOLossConfig(RewardLossConfig):
    """Knobs of ``ppo_loss_fn``, by upstream's names."""

    type: Literal["ppo"] = "ppo"

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"ratio_low": 0.5, "ratio_high": 2.0})

    ratio_low: float = Field(0.8, gt=0, le=1)
    """A token with A < 0 has no gradient below this ratio of trainer to sampler."""

    ratio_high: float = Field(1.2, ge=1)
    """A token with A > 0 has no gradient above this ratio."""

    max_importance_ratio: float = Field(MAX_RATIO, ge=1)
    """Cap of the ratio where A < 0; a capped token keeps its gradient."""

    @model_validator(mode="after")
    def _cap_is_outside_the_band(self) -> "PPOLossConfig":
        refuse_above(self, "ratio_high", "max_importance_ratio", "lower it, or raise the cap.")
        return self


@register(PPOLossConfig)
def ppo_loss_fn(inputs: LossInputs, config: PPOLossConfig) -> LossOutputs:
    """Return sum_mask w (-min(adv_tau A rho, adv_tau A clip(rho)))."""
    mask = inputs.loss_mask
    log_ratio = importance_ratios(inputs).log_ratio
    signal = config.adv_tau * torch.where(mask, given(inputs.advantages), 0.0)
    ratio = capped_ratio(log_ratio, config.max_importance_ratio)
    clipped = ratio.clamp(config.ratio_low, config.ratio_high)
    loss = weighted_sum(-torch.minimum(signal * ratio, signal * clipped), inputs)

    with torch.no_grad():
        too_high = (signal > 0) & (log_ratio > math.log(config.ratio_high))
        too_low = (signal < 0) & (log_ratio < math.log(config.ratio_low))
        metrics = {
            "is_clipped": token_mean(too_high | too_low, mask),
            "ratio_capped": token_mean(log_ratio > math.log(config.max_importance_ratio), mask),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
