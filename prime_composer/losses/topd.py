"""TOP-D as published: a proximal teacher, with returns normalized over a group.

The target is alpha q + (1 - alpha) mu, with mu the policy that sampled. Its log-ratio to mu is the
reward of a token, and never below log(1 - alpha). With n trained tokens of a rollout,

    r_k = log(alpha q(y_k)/mu(y_k) + 1 - alpha)
    R_k = r_k + (r_{k+1} + ... + r_n) / (n - k),    R_n = r_n
    A_k = (R_k - mean) / std,    over all tokens of all rollouts of the group
    L = sum over the mask of  -keep A_k rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)

A_k is the token's credit. It is computed once, where the group is at hand (``TopDCredit``), and
comes in ``LossInputs.credit``. The trust region ``keep`` is that of DPPO with the sign of A_k.

``sampled_reverse_kl`` with ``mode = "signed"`` has the floor alone, as ``top_d``: the reward r_k
with p in the place of mu, neither summed over later tokens nor normalized. Its expected gradient is
that of KL(p || target) with the target held fixed, and prime-rl can run it. Here the division by
std makes the size of a step independent of the distance from the teacher: near it, noise is scaled
up.

A token that a modifier removes from the loss still counts in R and in the normalization. Left out:
the paper's inner iterations over a batch. The importance ratio and its trust region play their
part, as in prime-rl's pull request.

Stale rollouts: weighted by the importance ratio rho. The credit compares q with mu, the policy that
sampled, and not with the current student.

References: "Trust Region Policy Distillation" (2026), https://arxiv.org/abs/2607.04751, Eq. 8, and
prime-rl's pull request 2966, af745473a, src/prime_rl/orchestrator/algo/topd.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.protocols import GroupCredit
from prime_composer.losses.shared.signed_rl import SignedRLLossConfig, signed_policy_gradient

SMALLEST_SPREAD = 1e-6
"""Lower bound of the standard deviation. A group without spread has a credit of 0."""


@dataclass(frozen=True)
class TopDCredit:
    """Returns of TOP-D, normalized over a group. ``alpha`` is the teacher's weight."""

    alpha: float

    def __call__(
        self,
        ref_logprobs: Sequence[Tensor],
        inference_logprobs: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return A of each rollout's trained tokens, in the dtype of log mu."""
        returns = [
            self._returns(log_q.double() - log_mu.double())
            for log_q, log_mu in zip(ref_logprobs, inference_logprobs, strict=True)
        ]
        tokens = torch.cat(returns)
        spread = tokens.std() if len(tokens) > 1 else tokens.new_zeros(())
        scale = spread.clamp(min=SMALLEST_SPREAD)
        return [
            ((own - tokens.mean()) / scale).to(log_mu.dtype)
            for own, log_mu in zip(returns, inference_logprobs, strict=True)
        ]

    def _returns(self, log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        floor = torch.full_like(log_ratio, math.log1p(-self.alpha))
        rewards = torch.logaddexp(log_ratio + math.log(self.alpha), floor)
        later = torch.arange(len(rewards) - 1, -1, -1, dtype=rewards.dtype, device=rewards.device)
        sums = rewards.flip(0).cumsum(0).flip(0) - rewards
        return rewards + sums / later.clamp(min=1)


class TopDLossConfig(SignedRLLossConfig):
    """Knobs of ``topd_loss_fn``."""

    type: Literal["topd"] = "topd"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs", "credit"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"alpha": 0.9, "delta_low": 0.02, "delta_high": 0.02, "kl_tau": 0.0},
    )

    alpha: float = Field(0.2, gt=0, lt=1)
    """The teacher's weight in the target."""

    @property
    def own_credit(self) -> GroupCredit:
        """The normalized returns."""
        return TopDCredit(self.alpha)


@register(TopDLossConfig)
def topd_loss_fn(inputs: LossInputs, config: TopDLossConfig) -> LossOutputs:
    """Return sum_mask w (-keep A rho + kl_tau (log rho)^2)."""
    mask = inputs.loss_mask
    credit = torch.where(mask, given(inputs.credit).detach(), 0.0)
    loss, region_metrics = signed_policy_gradient(inputs, config, credit, credit)

    with torch.no_grad():
        gap = torch.where(mask, given(inputs.ref_logprobs) - inputs.own_logprobs, 0.0)
        metrics = {
            **region_metrics,
            "ref_kl": token_mean(gap, mask),
            "credit_abs": token_mean(credit.abs(), mask),
            "signal_top1pct": top_share(credit, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)
