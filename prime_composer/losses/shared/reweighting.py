"""RL with advantages that a teacher reweights token by token: the config and the function.

Per token of the mask, with the group-relative advantage A of its rollout and a weight w > 0,

    -keep A ((1 - mix) + mix w) rho + kl_tau (log rho)^2,    rho = p(y)/mu(y)

The reward alone decides the sign, the teacher how a rollout's credit is shared among its tokens.
The trust region ``keep`` is that of ``shared.signed_rl`` with the sign of A.
"""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences.base import upcast
from prime_composer.losses.config import ChannelName
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.modifiers import segment_totals
from prime_composer.losses.shared.protocols import LossState
from prime_composer.losses.shared.signed_rl import SignedRLLossConfig, signed_policy_gradient

LARGEST_GAP = 80.0
"""Bound of |log q - log p| before the exp, in nats. The clip range is far within it."""


class ReweightedRLLossConfig(SignedRLLossConfig):
    """Knobs of an RL loss whose advantages a teacher reweights."""

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"advantages", "ref_logprobs"})
    channel: ClassVar[ChannelName] = "rl"
    surrogate: ClassVar[bool] = True

    clip: float = Field(0.2, gt=0, lt=1)
    """A weight stays between 1 - clip and 1 + clip."""

    mix: float = Field(0.5, ge=0, le=1)
    """Share of the reweighted advantage. 0 is plain RL."""

    decay_steps: PositiveInt | None = None
    """Optimizer steps over which ``mix`` falls linearly to 0. Unset: it stays."""

    normalize: Literal["none", "mean_one"] = "none"
    """``mean_one``: divide the clipped weights by their mean over the response, so that its total
    credit is that of plain RL."""

    def make_state(self) -> LossState | None:
        """Return the schedule of ``mix``, or None where it stays."""
        return None if self.decay_steps is None else MixSchedule(self.mix, self.decay_steps)


class MixSchedule:
    """Linear fall of ``mix`` to 0, one step per optimizer step."""

    def __init__(self, start: float, steps: int):
        self._start, self._steps = start, steps
        self.step = 0

    @property
    def mix(self) -> float:
        """The share in the step to come."""
        return self._start * max(1 - self.step / self._steps, 0.0)

    def end_step(self, mean_loss: float) -> None:
        """Count a step. Its loss does not matter."""
        self.step += 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number of steps."""
        self.step = int(state["step"])


def reweighted_rl(
    inputs: LossInputs,
    config: ReweightedRLLossConfig,
    state: MixSchedule | None,
    log_weights: Callable[[Tensor, Tensor], Tensor],
) -> LossOutputs:
    """Return sum_mask w_loss (-keep A ((1 - mix) + mix w) rho + kl_tau (log rho)^2).

    ``log_weights`` returns log w of advantages and of gaps log q - log p.
    """
    mask = inputs.loss_mask
    mix = config.mix if state is None else state.mix
    with torch.no_grad():
        advantages = torch.where(mask, given(inputs.advantages), 0.0)
        gap = torch.where(
            mask, upcast(given(inputs.ref_logprobs)) - upcast(inputs.own_logprobs), 0.0
        )
        evidence = torch.exp(log_weights(advantages, gap.clamp(-LARGEST_GAP, LARGEST_GAP)))
        weights = evidence.clamp(1 - config.clip, 1 + config.clip)
        at_clip = (evidence - 1).abs() > config.clip
        if config.normalize == "mean_one":
            weights = weights / response_means(weights, mask, inputs.segment_ids)
        signal = advantages * ((1 - mix) + mix * weights)
    loss, region_metrics = signed_policy_gradient(inputs, config, advantages, signal)

    with torch.no_grad():
        metrics = {
            **region_metrics,
            "gap": token_mean(gap, mask),
            "weight": token_mean(weights, mask),
            "at_clip": token_mean(at_clip, mask),
            "mix": torch.full_like(loss.detach(), mix),
            "signal_top1pct": top_share(signal, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)


def response_means(
    values: Float[Tensor, " seq"],
    mask: Bool[Tensor, " seq"],
    segment_ids: Int[Tensor, " seq"] | None,
) -> Float[Tensor, " seq"]:
    """Return for each token the mean of ``values`` over the mask of its sequence."""
    totals = segment_totals(torch.where(mask, values, 0.0).double(), segment_ids)
    counts = segment_totals(mask.double(), segment_ids).clamp(min=1)
    # A sequence without a token of the mask has no mean, and its tokens do not count.
    means = torch.where(mask, totals / counts, 1.0)
    return means.to(values.dtype)
