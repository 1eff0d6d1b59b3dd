"""RL credit by a reversed teacher (RLRT): more where a correct rollout left its path.

The teacher's signal is read in reverse, and on correct rollouts alone. Per token,

    w = clip(exp(log p(y) - log q(y)), 1 - clip, 1 + clip)  where A > 0,    1 elsewhere
    L = sum over the mask of  -keep A ((1 - mix) + mix w) rho + kl_tau (log rho)^2

with A the group-relative advantage. With rewards of 0 and 1, a rollout with A > 0 is a correct one
of a group that also has a wrong one. A group of correct rollouts has A = 0 and trains nothing. So
a token that the student chose against the teacher, in a rollout that succeeded, is reinforced. The
weight is that of ``rlsd`` with the opposite sign of the gap.

The paper's clip range and the share of the weight in the advantage could not be found: the defaults
of ``clip`` are those of ``rlsd``, and ``mix`` is 1. The paper's teacher reads a correct rollout of
the same group. ``hint = "sibling"`` would leave out rollouts without one, and the recipe refuses it
together with advantages: use ``hint = "reference"``.

Stale rollouts: weighted by the importance ratio rho. The credit w is of the current student.

Reference: "Rebellious Student" (2026), https://arxiv.org/abs/2605.10781.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.registry import register
from prime_composer.losses.shared.reweighting import (
    MixSchedule,
    ReweightedRLLossConfig,
    reweighted_rl,
)


class RLRTLossConfig(ReweightedRLLossConfig):
    """Knobs of ``rlrt_loss_fn``."""

    type: Literal["rlrt"] = "rlrt"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"mix": 0.5, "clip": 0.5, "normalize": "mean_one"},
    )

    mix: float = Field(1.0, ge=0, le=1)
    """Share of the reweighted advantage. 0 is plain RL."""


@register(RLRTLossConfig)
def rlrt_loss_fn(
    inputs: LossInputs, config: RLRTLossConfig, state: MixSchedule | None = None
) -> LossOutputs:
    """Return the reweighted RL loss with log w = log p - log q where A > 0, and 0 elsewhere."""
    return reweighted_rl(inputs, config, state, lambda a, gap: torch.where(a > 0, -gap, 0.0 * gap))
