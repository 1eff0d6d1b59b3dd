"""prime-rl's default RL loss: DPPO's trust region by advantage, plus a squared log-ratio.

Per token of the mask, with advantage A,

    -keep adv_tau A rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)
    keep = not (A > 0 and p - mu > dppo_mask_high) and not (A <= 0 and p - mu < -dppo_mask_low)

On finite inputs, loss, gradient and metrics are bit-equal to upstream's, with ``loss_weights`` as
in v0.7 and later.

Stale rollouts: weighted by the importance ratio rho, within the trust region.

References: ``default_loss_fn``,
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py
(v0.6.0 to 559b4477). DPPO (2026), https://arxiv.org/abs/2602.04879. Kimi K2.5 (2026),
https://arxiv.org/abs/2602.02276.
"""

from typing import Literal

import torch
from pydantic import NonNegativeFloat

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import top_share
from prime_composer.losses.shared.reductions import masked_mean
from prime_composer.losses.shared.trust_region import (
    RewardLossConfig,
    drift_metrics,
    importance_ratios,
    policy_gradient_sum,
)


class DefaultLossConfig(RewardLossConfig):
    """Knobs of ``default_loss_fn``, by upstream's names."""

    type: Literal["default"] = "default"

    dppo_mask_low: NonNegativeFloat = 0.2
    """A token of advantage <= 0 is dropped once its probability fell by more than this."""

    dppo_mask_high: NonNegativeFloat = 0.2
    """A token of advantage > 0 is dropped once its probability rose by more than this."""

    kl_tau: NonNegativeFloat = 1e-3
    """Factor of (log rho)^2."""


@register(DefaultLossConfig)
def default_loss_fn(inputs: LossInputs, config: DefaultLossConfig) -> LossOutputs:
    """Return sum_mask w (-keep adv_tau A rho + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    ratios = importance_ratios(inputs)
    advantages = torch.where(mask, given(inputs.advantages), 0.0)
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    too_high = ratios.probs_diff > config.dppo_mask_high
    too_low = ratios.probs_diff < -config.dppo_mask_low
    dropped = torch.where(positive, too_high, too_low)
    loss = policy_gradient_sum(
        ratios.log_ratio, config.adv_tau * advantages, mask & ~dropped, config.kl_tau, inputs
    )

    with torch.no_grad():
        metrics = {
            **drift_metrics(ratios.log_ratio, dropped, mask, mean=masked_mean),
            "is_masked_low": masked_mean(negative & too_low, mask),
            "is_masked_high": masked_mean(positive & too_high, mask),
            "masked_advantage_positive": masked_mean(positive, mask & dropped),
            "masked_advantage_negative": masked_mean(negative, mask & dropped),
            "signal_top1pct": top_share(advantages, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
