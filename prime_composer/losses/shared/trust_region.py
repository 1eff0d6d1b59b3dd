"""Importance ratio and trust region of a policy-gradient term, in prime-rl's arithmetic.

Letters: p = exp(trainer_logprobs), mu = exp(inference_logprobs), rho = p/mu, both at the
temperature at which the tokens were sampled. The order of the operations is upstream's
(prime_rl/trainer/rl/loss.py, https://github.com/PrimeIntellect-ai/prime-rl, v0.6.0 to 559b4477), so
that finite inputs give bit-equal losses, gradients and metrics. What main added in the autumn of
2026, a cap of rho and a bound of the metrics, is equal up to rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.reductions import masked_sum


@dataclass(frozen=True, eq=False)
class Ratios:
    """Trainer against sampler at each token of the mask. Elsewhere p = mu = 1."""

    log_ratio: Float[Tensor, " seq"]  # log rho, [seq], with the gradient
    probs_diff: Float[Tensor, " seq"]  # p - mu, [seq], without a gradient


def importance_ratios(inputs: LossInputs) -> Ratios:
    """Compare trainer and sampler. Both log-probs are masked before the exp."""
    trainer = torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0)
    inference = torch.where(inputs.loss_mask, inputs.inference_logprobs.detach(), 0.0)
    with torch.no_grad():
        probs_diff = torch.exp(trainer) - torch.exp(inference)
    return Ratios(log_ratio=trainer - inference, probs_diff=probs_diff)


def capped_ratio(log_ratio: Float[Tensor, " seq"], max_ratio: float) -> Float[Tensor, " seq"]:
    """Return min(rho, max_ratio). A capped token keeps the gradient max_ratio d log rho."""
    excess = (log_ratio.detach() - math.log(max_ratio)).clamp(min=0.0)
    return torch.exp(log_ratio - excess)


def policy_gradient_sum(
    log_ratio: Float[Tensor, " seq"],
    signal: Float[Tensor, " seq"],
    keep: Bool[Tensor, " seq"],
    kl_tau: float,
    inputs: LossInputs,
    max_ratio: float | None = None,
) -> Float[Tensor, ""]:
    """Return sum_mask w (-keep signal rho + kl_tau (log rho)^2), prime-rl's DPPO + KL form.

    The ratio of a dropped token never enters the exp's backward. Upstream multiplies it by 0, which
    is NaN once rho overflows. ``max_ratio`` is a cap of rho.
    """
    kept = torch.where(keep, log_ratio, 0.0)
    ratio = torch.exp(kept) if max_ratio is None else capped_ratio(kept, max_ratio)
    pg_loss = torch.where(keep, signal * ratio, 0.0)
    kl_loss = inputs.loss_mask * log_ratio**2
    return masked_sum(-pg_loss + kl_tau * kl_loss, inputs.loss_mask, inputs.loss_weights)


def drift_metrics(
    log_ratio: Float[Tensor, " seq"],
    dropped: Bool[Tensor, " seq"],
    mask: Bool[Tensor, " seq"],
    bounded: bool = False,
    mean: Callable[[Tensor, Tensor], Tensor] = token_mean,
) -> dict[str, Tensor]:
    """Return the mismatch KL (k3 estimate) of dropped and kept tokens, and the share dropped.

    With ``bounded`` no token counts more than 1e30, as in prime-rl's main. ``masked_mean`` as
    ``mean`` makes the metrics bit-equal to prime-rl's.
    """
    if bounded:
        log_ratio = log_ratio.detach()
        mismatch_kl = torch.expm1(log_ratio.clamp(max=math.log(1e30))) - log_ratio
    else:
        mismatch_kl = torch.exp(log_ratio) - log_ratio - 1
    return {
        "masked_mismatch_kl": mean(mismatch_kl, mask & dropped),
        "unmasked_mismatch_kl": mean(mismatch_kl, mask & ~dropped),
        "is_masked": mean(dropped, mask),
    }


def signed_region(
    signal: Float[Tensor, " seq"],
    probs_diff: Float[Tensor, " seq"],
    delta_low: float,
    delta_high: float,
    mask: Bool[Tensor, " seq"],
) -> tuple[Bool[Tensor, " seq"], Bool[Tensor, " seq"]]:
    """Return the tokens whose probability the step would move further away from the sampler's.

    They are those with signal > 0 and p - mu > delta_high, and those with signal < 0 and
    p - mu < -delta_low, the rule of DPPO (2026), https://arxiv.org/abs/2602.04879.
    """
    high = mask & (signal > 0) & (probs_diff > delta_high)
    return high, mask & (signal < 0) & (probs_diff < -delta_low)
