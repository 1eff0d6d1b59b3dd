"""Policy gradients: of a teacher's log-ratio at the sampled token, or of rewards.

Per token of the mask,

    -keep rho A + kl_tau (log rho)^2,    rho = p(y)/mu(y)

p is the current student (``trainer_logprobs``), mu the sampler, and ``keep`` a trust region. A is
the advantage: of rewards, or the teacher's log-ratio. A sum over future tokens is left out on
purpose, as prime-rl does (discount 0).

``sampled_reverse_kl``, ``default`` and ``ipo`` are upstream's arithmetic bit for bit on finite
inputs: loss, gradient and metrics, with ``loss_weights`` as in v0.7 and later. Dialect main, and
``icepop``, were read in the sources of main of October 2026, and never run.

Stale rollouts: weighted by the importance ratio rho, within the trust region.

References: https://github.com/PrimeIntellect-ai/prime-rl/blob/main/src/prime_rl/trainer/rl/loss.py
(v0.6.0 to 559b4477, and main of October 2026). DPPO (2026), https://arxiv.org/abs/2602.04879.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.config import ChannelName, LossConfig, SupportRequest, SupportSize
from prime_composer.losses.registry import register
from prime_composer.losses.shared.dialect import MAX_RATIO, Dialect, with_defaults_of_main
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.reductions import masked_mean
from prime_composer.losses.shared.trust_region import (
    drift_metrics,
    importance_ratios,
    policy_gradient_sum,
    signed_region,
)
from prime_composer.tables import refuse_above


class SampledReverseKLLossConfig(LossConfig):
    """Reverse KL on the sampled token alone: the on-policy distillation that prime-rl ships.

    The teacher's log-ratio at the sampled token is the reward: A = sg (log q(y) - log p(y)). In
    expectation over y ~ mu, and without the trust region and kl_tau, its gradient is that of the
    full-vocabulary KL(student || teacher). One sample per position makes it noisy, and a few tokens
    carry most of it.

    The trust region of mode ``prime_rl`` reads the sign of the RL advantage (v0.6) or always the
    low side (v0.7 and later), not the sign of A. So it drops tokens that the teacher would pull
    back, and keeps some that drift away. Dialect main is v0.7 with rho capped at 1e4 and
    kl_tau = 0. Mode ``signed`` reads the sign of A, and may bound A first by ``clip``.

    With ``[reference]`` in a recipe, q is not the teacher alone: its log-prob is lambda log q +
    (1 - lambda) log r with a reference model r, so that A = lambda (log q - log r) - (log p - log
    r). That is G-OPD, and with lambda above 1 ExOPD. The sum is formed where the rollouts are
    scored (``teachers.mixture.extrapolate``), and the loss receives it as ``ref_logprobs``.

    Temperature: A compares p and q at 1. rho, the trust region and kl_tau compare p and mu at the
    sampling temperature. prime-rl's trainer has p at that temperature alone, in A too.

    References: prime-rl's ``opd_loss_fn`` (v0.6.0) and ``ref_kl_loss_fn`` (v0.7.0 and later).
    "On-Policy Distillation" (Thinking Machines, 2025),
    https://thinkingmachines.ai/blog/on-policy-distillation/. G-OPD (2026),
    https://arxiv.org/abs/2602.12125.
    """

    type: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"dialect": "v0.6"},
        {"dialect": "main"},
        {"mode": "signed", "delta_low": 0.02, "delta_high": 0.02},
        {"mode": "signed", "clip": 0.5},
        {"stops": {"ids": [3, 5]}},
        {"mode": "signed", "stops": {"ids": [3, 5]}, "k": "full"},
        {"rl_mix": {"form": "add", "kd": 2.0, "loss": {"type": "ipo"}}},
    )
    surrogate: ClassVar[bool] = True
    takes_reference: ClassVar[bool] = True

    mode: Literal["prime_rl", "signed"] = "prime_rl"
    """``prime_rl``: loss, gradient and metrics are bit-equal to upstream's on finite inputs.
    ``signed``: the trust region follows the sign of the distillation signal."""

    dialect: Dialect = "v0.7"
    """Mode prime_rl: v0.6 drops by the sign of the RL advantage, which it then needs. v0.7 and
    later drop on the low side only. main also caps the importance ratio at 1e4."""

    delta_low: float = Field(0.2, ge=0)
    """A token whose probability fell by more than this since sampling is dropped (see mode)."""

    delta_high: float = Field(0.2, ge=0)
    """The same for a probability that rose. Dialects v0.7 and main have no high side."""

    kl_tau: float = Field(1e-3, ge=0)
    """Factor of (log rho)^2, which keeps the policy near its sampler. Mode prime_rl with dialect
    main: 0 where it is not set."""

    clip: PositiveFloat | None = None
    """Mode signed: bound of |A|, in nats."""

    k: SupportSize = 32
    """Teacher tokens per position for ``stops``."""

    @model_validator(mode="before")
    @classmethod
    def _kl_tau_of_main(cls, knobs: Any) -> Any:
        signed = isinstance(knobs, dict) and knobs.get("mode") == "signed"
        return knobs if signed else with_defaults_of_main(knobs, kl_tau=0.0)

    @property
    def capped(self) -> bool:
        return self.mode == "prime_rl" and self.dialect == "main"

    @model_validator(mode="after")
    def _knobs_fit_the_mode(self) -> "SampledReverseKLLossConfig":
        if self.mode == "prime_rl" and self.clip is not None:
            raise ValueError(
                "clip needs mode = 'signed': mode = 'prime_rl' is upstream's arithmetic and "
                "nothing else."
            )
        return self

    @property
    def own_needs(self) -> frozenset[str]:
        """The teacher's log-prob, the advantages of v0.6, and the top K of stops."""
        by_advantage = self.mode == "prime_rl" and self.dialect == "v0.6"
        needs = {"ref_logprobs"}
        needs |= {"advantages"} if by_advantage else set()
        if self.stops:
            needs.add("hidden_states" if self.k == "full" else "support")
        return frozenset(needs)

    @property
    def support(self) -> SupportRequest | None:
        """The teacher's k most probable tokens, for stops."""
        return SupportRequest(self.k) if "support" in self.needs else None


@register(SampledReverseKLLossConfig)
def sampled_reverse_kl_loss_fn(
    inputs: LossInputs, config: SampledReverseKLLossConfig
) -> LossOutputs:
    """Return sum_mask w (-keep rho sg(log q - log p) + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    ratios = importance_ratios(inputs)
    log_ratio, probs_diff = ratios.log_ratio, ratios.probs_diff
    with torch.no_grad():
        difference = given(inputs.ref_logprobs) - inputs.own_logprobs
        log_teacher_ratio = torch.where(mask, difference, 0.0)
        signal_of = _signed if config.mode == "signed" else _prime_rl
        signal, dropped, mode_metrics = signal_of(log_teacher_ratio, probs_diff, inputs, config)
    max_ratio = MAX_RATIO if config.capped else None
    loss = policy_gradient_sum(log_ratio, signal, mask & ~dropped, config.kl_tau, inputs, max_ratio)

    with torch.no_grad():
        metrics = {
            **drift_metrics(log_ratio, dropped, mask, config.capped, masked_mean),
            "signal_abs": token_mean(signal.abs(), mask),
            "signal_top1pct": top_share(signal, mask),
            **mode_metrics,
        }
    return LossOutputs(loss=loss, metrics=metrics)


def _prime_rl(
    signal: Float[Tensor, " seq"],
    probs_diff: Float[Tensor, " seq"],
    inputs: LossInputs,
    config: SampledReverseKLLossConfig,
) -> tuple[Float[Tensor, " seq"], Bool[Tensor, " seq"], dict[str, Tensor]]:
    """Return the signal, what upstream's trust region drops, and metrics by upstream's names."""
    mask = inputs.loss_mask
    too_high = mask & (probs_diff > config.delta_high)
    too_low = mask & (probs_diff < -config.delta_low)
    if config.dialect != "v0.6":
        return signal, too_low, {"ref_kl": masked_mean(signal, mask)}
    advantages = given(inputs.advantages)
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    dropped = torch.where(positive, too_high, too_low)
    metrics = {
        "is_masked_low": masked_mean(negative & too_low, mask),
        "is_masked_high": masked_mean(positive & too_high, mask),
        "masked_advantage_positive": masked_mean(positive, dropped),
        "masked_advantage_negative": masked_mean(negative, dropped),
        "teacher_kl": masked_mean(signal, mask),
    }
    return signal, dropped, metrics


def _signed(
    log_teacher_ratio: Float[Tensor, " seq"],
    probs_diff: Float[Tensor, " seq"],
    inputs: LossInputs,
    config: SampledReverseKLLossConfig,
) -> tuple[Float[Tensor, " seq"], Bool[Tensor, " seq"], dict[str, Tensor]]:
    """Return the bounded signal, what the trust region drops by its sign, and metrics."""
    mask, signal = inputs.loss_mask, log_teacher_ratio
    if config.clip is not None:
        signal = signal.clamp(-config.clip, config.clip)
    high, low = signed_region(signal, probs_diff, config.delta_low, config.delta_high, mask)
    metrics = {
        "ref_kl": token_mean(log_teacher_ratio, mask),
        "is_masked_low": token_mean(low, mask),
        "is_masked_high": token_mean(high, mask),
    }
    return signal, high | low, metrics


class RewardLossConfig(LossConfig):
    """Knobs of a policy gradient on rewards alone."""

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    channel: ClassVar[ChannelName] = "rl"

    adv_tau: NonNegativeFloat = 1.0
    """Factor of the advantage."""


class DefaultLossConfig(RewardLossConfig):
    """prime-rl's default RL loss: DPPO's trust region by advantage, plus a squared log-ratio.

        keep = not (A > 0 and p - mu > dppo_mask_high) and not (A <= 0 and p - mu < -dppo_mask_low)

    References: ``default_loss_fn``. Kimi K2.5 (2026), https://arxiv.org/abs/2602.02276.
    """

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


class IPOLossConfig(RewardLossConfig):
    """prime-rl's IPO loss: a symmetric trust region on p - mu, plus a squared log-ratio.

        keep = |p - mu| <= ipo_threshold

    It is not the preference loss of the same name. Left out: main's branch with score centering,
    https://arxiv.org/abs/2609.20807.

    References: ``ipo_loss_fn`` (v0.6.0 to 559b4477) and ``IPOLoss`` (main of October 2026).
    """

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


class IcePopLossConfig(RewardLossConfig):
    """IcePop: importance-weighted RL without tokens whose ratio left a fixed band.

        keep = ratio_low <= rho <= ratio_high

    Left out: the paper has two ratios, one of the two engines at the old weights, which the band
    tests, and PPO's, which is clipped. As in prime-rl, one ratio has both meanings.

    References: "Every Step Evolves" (2025), https://arxiv.org/abs/2510.18855, and prime-rl's
    ``IcePopLoss``.
    """

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
