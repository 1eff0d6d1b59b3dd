"""Self-distillation (SDPO, OPSD, SDFT): the teacher is the policy itself, conditioned on a hint.

The hint is privileged information: a reference solution, a verifier's feedback, or a correct
rollout of the same group. The hint-conditioned policy scores the tokens that the policy sampled
without the hint (``ref_logprobs`` and ``support``):

    L = sum over the mask of  min(sg rho, max_ratio) D(p, q),    rho = p(y)/mu(y)

D is ``reverse_kl``, ``forward_kl`` or ``generalized_jsd`` on K tokens, chosen by the teacher or, as
in SDPO, by the student. Or it is ``sampled_reverse_kl``, sg(log p - log q) log p at the sampled
token. For ``chosen_by = "student"`` the loss asks for the whole vocabulary and selects the
student's K of it. A trainer whose teacher scores given ids provides those K alone.

Stale rollouts: D is of the current student, and weighted by the importance ratio rho up to
``max_ratio``. D is at temperature 1 (or that of the loss), rho at the sampling temperature.

References: SDPO (2026), https://arxiv.org/abs/2601.20802, and lasgroup/SDPO 0e6d510,
verl/trainer/ppo/core_algos.py. OPSD (2026), https://arxiv.org/abs/2601.18734. SDFT (2026),
https://arxiv.org/abs/2601.19897 (skips the first tokens).
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences import forward_kl, generalized_jsd, reverse_kl, upcast
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.modifiers import position_in_segment
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.losses.shared.support_divergence import (
    comparison_metrics,
    divergence_per_token,
)
from prime_composer.losses.shared.trust_region import importance_ratios

DIVERGENCES = {f.__name__: f for f in (generalized_jsd, reverse_kl, forward_kl)}


class SelfDistillationLossConfig(SupportLossConfig):
    """Knobs of ``self_distillation_loss_fn``."""

    type: Literal["self_distillation"] = "self_distillation"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"chosen_by": "student", "k": 8, "divergence": "reverse_kl"},
        {"divergence": "sampled_reverse_kl", "skip_first": 1, "max_ratio": "off"},
        {"divergence": "forward_kl", "normalization": "renorm", "skip_first": 2},
        {"k": "full", "normalization": "full", "skip_first": 1},
    )
    surrogate: ClassVar[bool] = True

    divergence: Literal["reverse_kl", "forward_kl", "generalized_jsd", "sampled_reverse_kl"] = (
        "generalized_jsd"
    )
    """D, the student against the hint-conditioned policy."""

    beta: float = Field(0.5, ge=0, le=1)
    """``generalized_jsd``: the teacher's weight in the mixture."""

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""

    max_ratio: PositiveFloat | Literal["off"] = 2.0
    """Bound of the detached factor rho, which corrects for a stale rollout. "off" omits it."""

    skip_first: NonNegativeInt = 0
    """Number of trained tokens at the start of each response that are left out (SDFT: 3)."""

    @property
    def own_needs(self) -> frozenset[str]:
        """The sampled token's log-prob for ``sampled_reverse_kl``, the support for all else."""
        if self.divergence != "sampled_reverse_kl":
            return frozenset({self.comparison_need})
        return frozenset({"ref_logprobs", *([self.comparison_need] if self.stops else [])})

    @property
    def reads_sampler(self) -> bool:
        """Whether ``inference_logprobs`` matter: rho reads them."""
        return super().reads_sampler or self.max_ratio != "off"


@register(SelfDistillationLossConfig)
def self_distillation_loss_fn(
    inputs: LossInputs, config: SelfDistillationLossConfig
) -> LossOutputs:
    """Return sum_mask w min(sg rho, max_ratio) D(p, q)."""
    mask = inputs.loss_mask
    if config.skip_first:
        mask = mask & (position_in_segment(mask, inputs.segment_ids) >= config.skip_first)
    metrics: dict[str, Tensor] = {}
    if config.divergence == "sampled_reverse_kl":
        difference = upcast(inputs.own_logprobs) - upcast(given(inputs.ref_logprobs))
        signal = torch.where(mask, difference, 0.0).detach()
        per_token = signal * torch.where(mask, upcast(inputs.trainer_logprobs), 0.0)
    else:
        divergence, knobs = DIVERGENCES[config.divergence], dict[str, float]()
        if config.divergence == "generalized_jsd":
            knobs["beta"] = config.beta
        per_token = divergence_per_token(inputs, config, divergence, mask, **knobs)
        with torch.no_grad():
            reverse = config.divergence != "forward_kl"
            metrics = comparison_metrics(inputs, mask, reverse)
        signal = per_token
    if config.max_ratio == "off":
        ratio, bound = torch.ones_like(per_token), torch.inf
        weighted = per_token
    else:
        with torch.no_grad():
            # Masked again: a first token that is left out must not overflow either.
            log_ratio = torch.where(mask, importance_ratios(inputs).log_ratio, 0.0)
            ratio = torch.exp(log_ratio.clamp(-20, 20))
            bound = config.max_ratio
        weighted = ratio.clamp(max=bound) * per_token
    loss = masked_sum(weighted, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics |= {
            "divergence": token_mean(signal, mask),
            "ratio": token_mean(ratio, mask),
            "ratio_at_bound": token_mean(ratio >= bound, mask),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
