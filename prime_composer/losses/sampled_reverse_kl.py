"""Reverse KL on the sampled token alone: what prime-rl ships as on-policy distillation.

The teacher's log-ratio at the token that the student sampled is the reward of a policy gradient. Per token of the mask,

    -keep rho sg(A) + kl_tau (log rho)^2,    A = log q(y) - log p(y),    rho = p(y)/mu(y)

with ``keep`` the trust region. In expectation over y ~ mu, and without the trust region and kl_tau, its gradient is that of
the full-vocabulary KL(student || teacher); one sample per position makes it noisy, and a few tokens carry most of it.

The letters: p is the live student (``trainer_logprobs``), mu the sampler, q the teacher. Upstream's sum over future tokens
is left out on purpose there and here: discount 0.

References: prime-rl ``opd_loss_fn`` (v0.6.0) and ``ref_kl_loss_fn`` (v0.7.0 to 559b4477),
https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py; "On-Policy Distillation" (Thinking
Machines, 2025), https://thinkingmachines.ai/blog/on-policy-distillation/.
"""

from typing import Literal

import torch
from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.loss_metrics import top_share
from prime_composer.losses.base import LossConfig
from prime_composer.masked import masked_mean
from prime_composer.trust_region import drift_metrics, importance_ratios, policy_gradient_sum


class SampledReverseKLLossConfig(LossConfig):
    type: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"

    mode: Literal["prime_rl"] = "prime_rl"
    """``prime_rl``: loss, gradient and metric values are bit-equal to upstream's on finite inputs."""

    dialect: Literal["v0_6", "v0_7"] = "v0_7"
    """Mode prime_rl: v0_6 drops by the sign of the RL advantage (which it then needs), v0_7 and later on the low side only."""

    delta_low: float = Field(0.2, ge=0)
    """A token whose probability fell by more than this since it was sampled is dropped (by sign, see mode)."""

    delta_high: float = Field(0.2, ge=0)
    """The same for a probability that rose; dialect v0_7 has no high side."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor of (log rho)^2, which holds the policy near its sampler."""

    @property
    def needs(self) -> frozenset[str]:
        by_advantage = self.mode == "prime_rl" and self.dialect == "v0_6"
        return self.modifier_needs | {"ref_logprobs"} | ({"advantages"} if by_advantage else set())


def sampled_reverse_kl_loss_fn(inputs: LossInputs, config: SampledReverseKLLossConfig) -> LossOutputs:
    """sum_mask w (-keep rho sg(log q - log p) + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    ratios = importance_ratios(inputs)
    log_ratio, probs_diff = ratios.log_ratio, ratios.probs_diff
    with torch.no_grad():
        signal = torch.where(mask, inputs.ref_logprobs - inputs.trainer_logprobs, 0.0)

    too_high, too_low = probs_diff > config.delta_high, probs_diff < -config.delta_low
    if config.dialect == "v0_6":
        positive = mask & (inputs.advantages > 0)
        negative = mask & (inputs.advantages < 0)
        dropped = torch.where(positive, too_high, too_low)
    else:
        dropped = too_low
    keep = mask & ~dropped
    loss = policy_gradient_sum(log_ratio, signal, keep, config.kl_tau, inputs)

    with torch.no_grad():
        metrics = drift_metrics(log_ratio, dropped, mask)
        if config.dialect == "v0_6":
            metrics |= {
                "is_masked_low": masked_mean(negative & too_low, mask),
                "is_masked_high": masked_mean(positive & too_high, mask),
                "masked_advantage_positive": masked_mean(positive, mask & dropped),
                "masked_advantage_negative": masked_mean(negative, mask & dropped),
            }
        metrics |= {
            "teacher_kl" if config.dialect == "v0_6" else "ref_kl": masked_mean(signal, mask),
            "signal_abs": masked_mean(signal.abs(), mask),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics={f"sampled_reverse_kl/{name}": value for name, value in metrics.items()})
