"""A policy gradient within the trust region by sign: its knobs and its sum.

Per token of the mask, with a signal S and the sign of a quantity A,

    -keep S rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)
    keep = not (A > 0 and p - mu > delta_high) and not (A < 0 and p - mu < -delta_low)
"""

from jaxtyping import Float
from pydantic import NonNegativeFloat
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.losses.config import LossConfig
from prime_composer.losses.shared.trust_region import (
    drift_metrics,
    importance_ratios,
    policy_gradient_sum,
    signed_region,
)


class SignedRLLossConfig(LossConfig):
    """Knobs of a policy gradient within the trust region by sign."""

    delta_low: NonNegativeFloat = 0.2
    """A token with A < 0 is dropped once its probability fell by more than this since sampling."""

    delta_high: NonNegativeFloat = 0.2
    """A token with A > 0 is dropped once its probability rose by more than this."""

    kl_tau: NonNegativeFloat = 1e-3
    """Factor of (log rho)^2, which keeps the policy near its sampler."""


def signed_policy_gradient(
    inputs: LossInputs,
    config: SignedRLLossConfig,
    signs: Float[Tensor, " seq"],
    signal: Float[Tensor, " seq"],
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return the loss of a signal S by the signs of A, and the metrics of its trust region."""
    mask, ratios = inputs.loss_mask, importance_ratios(inputs)
    region = signed_region(signs, ratios.probs_diff, config.delta_low, config.delta_high, mask)
    keep = mask & ~region.dropped
    loss = policy_gradient_sum(ratios.log_ratio, signal, keep, config.kl_tau, inputs)
    return loss, drift_metrics(ratios.log_ratio.detach(), region.dropped, mask)
