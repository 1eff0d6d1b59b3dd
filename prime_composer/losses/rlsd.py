"""RL credit by a teacher (RLSD): the policy with a hint shares it among the tokens of a rollout.

The advantage A of a rollout multiplies each of its tokens by a weight

    w = clip(exp(sign(A) (log q(y) - log p(y))), 1 - clip, 1 + clip)

A token that the teacher supports more than the student gets more of a reward, and less of a blame.
The weight is positive, so that the reward alone decides the direction, and it is detached. Then

    L = sum over the mask of  -keep A ((1 - mix) + mix w) rho + kl_tau (log rho)^2

which is the loss ``default`` where mix = 0 or p = q. The teacher of the paper is the policy with
the reference solution in its prompt ([teacher.policy] hint = "reference"); any other one works.

Differences from the authors' code, which adds PPO's clipped ratio: the trust region is prime-rl's,
and the gradient is the same at rho = 1. Left out: the warm-up of ``mix``, and its restriction to
wrong rollouts or to the tokens of a thought.

Stale rollouts: weighted by the importance ratio rho. The credit w is of the current student.

References: "Self-Distilled RLVR" (2026), https://arxiv.org/abs/2604.03128, and iie-ycx/RLSD
93e46f7, verl/workers/actor/dp_opsd_actor.py, ``_build_stgca_advantages``.
"""

from typing import Any, ClassVar, Literal

import torch

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.registry import register
from prime_composer.losses.shared.reweighting import (
    MixSchedule,
    ReweightedRLLossConfig,
    reweighted_rl,
)


class RLSDLossConfig(ReweightedRLLossConfig):
    """Knobs of ``rlsd_loss_fn``."""

    type: Literal["rlsd"] = "rlsd"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"mix": 1.0, "clip": 0.5, "normalize": "mean_one"},
        {"decay_steps": 10, "delta_low": 0.02, "delta_high": 0.02},
    )


@register(RLSDLossConfig)
def rlsd_loss_fn(
    inputs: LossInputs, config: RLSDLossConfig, state: MixSchedule | None = None
) -> LossOutputs:
    """Return the reweighted RL loss with log w = sign(A) (log q - log p)."""
    return reweighted_rl(inputs, config, state, lambda a, gap: torch.sign(a) * gap)
