"""RL credit by contrasted hints (RLCSD): a right one against wrong rollouts of the group.

A hint changes how the teacher writes, whether it is right or not. The contrast of the teacher with
a right hint, q, and with K wrong ones, q_1 ... q_K, leaves what the right one adds. Per token of
the mask, with A the group-relative advantage of its rollout,

    e = log q(y) - log((1/K) sum_k q_k(y))
    s = clamp(scale tanh(e / temperature), -clip, clip),    0 where |s| <= threshold
    A' = max(A + s, 0) where A > 0,    min(A + s, 0) where A < 0,    0 where A = 0
    L = sum over the mask of  -keep A' rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)

So the reward decides the direction: s can cancel an advantage, and never turns it. With the
authors' temperature of 0.02, s is little more than the sign of e.

The right hint is the reference solution, and the wrong ones are wrong rollouts of the same group
other than the one that is scored (``[teacher.policy]``, K + 1 scorings of a rollout).

Differences from the authors' code: its loss is the mean over the tokens without s plus a weight
times the mean over those with it. Here it is one sum over all tokens, as in every loss. PPO's
clipped ratio is prime-rl's trust region, with the same gradient at rho = 1. The authors' beta and
lambda enter as their product, ``scale``. A rollout without a wrong one beside it, which they leave
out, trains as under plain RL (e = 0). The wrong hints are the first of the group, not random ones.

Stale rollouts: weighted by the importance ratio rho, within the trust region.

References: "RLCSD" (2026), https://arxiv.org/abs/2606.11709, and THU-BPM/RLCSD 7eeff3c,
third_party/verl/verl/trainer/ppo/core_algos.py, ``compute_policy_loss_rlcsd``.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences.base import upcast
from prime_composer.losses.config import ChannelName
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.signed_rl import SignedRLLossConfig, signed_policy_gradient


class RLCSDLossConfig(SignedRLLossConfig):
    """Knobs of ``rlcsd_loss_fn``."""

    type: Literal["rlcsd"] = "rlcsd"

    needs_inputs: ClassVar[frozenset[str]] = frozenset(
        {"advantages", "ref_logprobs", "contrast_logprobs"}
    )
    channel: ClassVar[ChannelName] = "rl"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"temperature": 0.5, "scale": 0.9, "clip": 0.35, "threshold": 0.1},
    )

    temperature: PositiveFloat = 0.02
    """Contrast, in nats, at which s begins to saturate."""

    scale: PositiveFloat = 0.5
    """Largest |s|, in units of the advantage."""

    clip: PositiveFloat = 2.0
    """Bound of |s|. It only matters below ``scale``."""

    threshold: NonNegativeFloat = 0.02
    """A token with a smaller |s| keeps its advantage."""


@register(RLCSDLossConfig)
def rlcsd_loss_fn(inputs: LossInputs, config: RLCSDLossConfig) -> LossOutputs:
    """Return sum_mask w (-keep A' rho + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    with torch.no_grad():
        advantages = torch.where(mask, given(inputs.advantages), 0.0)
        contrast = torch.where(
            mask, upcast(given(inputs.ref_logprobs)) - upcast(given(inputs.contrast_logprobs)), 0.0
        )
        shift = config.scale * torch.tanh(contrast / config.temperature)
        shift = shift.clamp(-config.clip, config.clip)
        # Negated, so that a missing log-prob (NaN) is not taken for a small shift.
        shifted = ~(shift.abs() <= config.threshold)
        signal = advantages + torch.where(shifted, shift, 0.0)
        signal = torch.where(advantages > 0, signal.clamp(min=0.0), signal.clamp(max=0.0))
        signal = torch.where(advantages == 0, 0.0 * signal, signal)
    loss, region_metrics = signed_policy_gradient(inputs, config, advantages, signal)

    with torch.no_grad():
        metrics = {
            **region_metrics,
            "contrast_abs": token_mean(contrast.abs(), mask),
            "shifted": token_mean(shifted, mask),
            "cancelled": token_mean((signal == 0) & (advantages != 0), mask),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
