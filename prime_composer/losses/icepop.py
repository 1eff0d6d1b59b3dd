"""IcePop: importance-weighted RL without tokens whose ratio left a fixed band.

Per token of the mask, with advantage A,

    -keep adv_tau A rho,    rho = p(y)/mu(y),    keep = ratio_low <= rho <= ratio_high

Left out: the paper has two ratios, one of the two engines at the old weights, which the band tests,
and PPO's, which is clipped. As in prime-rl, one ratio has both meanings. Equality with prime-rl's
class is read from its source, and was not run.

Stale rollouts: weighted by the importance ratio rho, within the band.

References: "Every Step Evolves" (2025), https://arxiv.org/abs/2510.18855, and prime-rl's
``IcePopLoss`` (main of October 2026),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat, model_validator

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import top_share
from prime_composer.losses.shared.trust_region import (
    RewardLossConfig,
    drift_metrics,
    importance_ratios,
    policy_gradient_sum,
)
from prime_composer.tables import refuse_above


class IcePopLossConfig(RewardLossConfig):
    """Knobs of ``icepop_loss_fn``, by upstream's names."""

    type: Literal["icepop"] = "icepop"

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"ratio_low": 0.5, "ratio_high": 2.0})

    ratio_low: PositiveFloat = 0.2
    """A token is dropped below this ratio of trainer to sampler."""

    ratio_high: PositiveFloat = 5.0
    """A token is dropped above this ratio."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "IcePopLossConfig":
        refuse_above(self, "ratio_low", "ratio_high", "no token would be kept. Exchange them.")
        return self


@register(IcePopLossConfig)
def icepop_loss_fn(inputs: LossInputs, config: IcePopLossConfig) -> LossOutputs:
    """Return sum_mask w (-keep adv_tau A rho)."""
    mask = inputs.loss_mask
    log_ratio = importance_ratios(inputs).log_ratio
    signal = config.adv_tau * torch.where(mask, given(inputs.advantages), 0.0)
    with torch.no_grad():
        below, above = math.log(config.ratio_low), math.log(config.ratio_high)
        dropped = mask & ((log_ratio < below) | (log_ratio > above))
    loss = policy_gradient_sum(log_ratio, signal, mask & ~dropped, 0.0, inputs)

    with torch.no_grad():
        metrics = {
            **drift_metrics(log_ratio, dropped, mask, bounded=True),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
