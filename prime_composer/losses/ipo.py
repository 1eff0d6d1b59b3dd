"""prime-rl's IPO loss: a symmetric trust region on p - mu, plus a squared log-ratio.

Per token of the mask, with advantage A,

    -keep adv_tau A rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)
    keep = |p - mu| <= ipo_threshold

On finite inputs, loss, gradient and metrics are bit-equal to upstream's, with ``loss_weights`` as
in v0.7 and later. Dialect main, read and not run, has other defaults: ipo_threshold = 0.3,
kl_tau = 0, and rho capped at 1e4. It is not the preference loss of the same name.

Left out: main's branch with score centering, https://arxiv.org/abs/2609.20807.

Stale rollouts: weighted by the importance ratio rho, within the trust region.

References: ``ipo_loss_fn`` (v0.6.0 to 559b4477) and ``IPOLoss`` (main of October 2026),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, model_validator

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.dialect import MAX_RATIO, Dialect, with_defaults_of_main
from prime_composer.losses.shared.metrics import top_share
from prime_composer.losses.shared.reductions import masked_mean
from prime_composer.losses.shared.trust_region import (
    RewardLossConfig,
    drift_metrics,
    importance_ratios,
    policy_gradient_sum,
)


class IPOLossConfig(RewardLossConfig):
    """Knobs of ``ipo_loss_fn``, by upstream's names."""

    type: Literal["ipo"] = "ipo"

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"dialect": "main"})

    dialect: Dialect = "v0.7"
    """Whose defaults. v0.6 and v0.7 have the same."""

    ipo_threshold: NonNegativeFloat = 0.1
    """A token is dropped once its probability moved by more than this. Dialect main: 0.3."""

    kl_tau: NonNegativeFloat = 1e-3
    """Factor of (log rho)^2. Dialect main: 0."""

    max_importance_ratio: float | None = Field(None, ge=1)
    """Cap of rho; a capped token keeps its gradient. Unset: none. Dialect main: 1e4."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_main(cls, knobs: Any) -> Any:
        return with_defaults_of_main(
            knobs, ipo_threshold=0.3, kl_tau=0.0, max_importance_ratio=MAX_RATIO
        )


@register(IPOLossConfig)
def ipo_loss_fn(inputs: LossInputs, config: IPOLossConfig) -> LossOutputs:
    """Return sum_mask w (-keep adv_tau A rho + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    ratios = importance_ratios(inputs)
    advantages = torch.where(mask, given(inputs.advantages), 0.0)
    dropped = ratios.probs_diff.abs() > config.ipo_threshold
    loss = policy_gradient_sum(
        ratios.log_ratio,
        config.adv_tau * advantages,
        mask & ~dropped,
        config.kl_tau,
        inputs,
        config.max_importance_ratio,
    )

    bounded = config.dialect == "main"
    with torch.no_grad():
        metrics = {
            **drift_metrics(ratios.log_ratio, dropped, mask, bounded, masked_mean),
            "signal_top1pct": top_share(advantages, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
