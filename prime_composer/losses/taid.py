"""Distill from an intermediate teacher that moves from the student to the teacher (TAID).

    L = sum over the mask of  -sum p_t log p,    p_t = softmax((1 - t) sg z_s + t z_t)

on the teacher's top-K (``tail``: with one outcome for the rest) or the full vocabulary. The anchor
is the *current* student, detached. Logits are mixed, not probabilities. ``cross_entropy`` is the
value that public code returns. ``kl`` subtracts the entropy of p_t: its gradient is the same, and
it is 0 at p = p_t. The schedule reads whichever of the two the loss returns.

``TAIDScheduler`` raises t at least linearly, and faster while the loss falls:

    change = (previous - loss)/previous,   m <- beta m + (1 - beta) change
    t <- min(t_end, max(t_start + (t_end - t_start) step/total_steps, t + alpha sigmoid(m) (1 - t)))

At the default alpha the second branch wins only in runs of more than about 4,000 steps.

Stale rollouts: compared as the current student has them, without an importance ratio.

References: "TAID: Temporally Adaptive Interpolated Distillation" (2025),
https://arxiv.org/abs/2501.16937, Eq. 3-6, Alg. 1. SakanaAI/TAID a062892,
src/distil_losses/taid.py.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import taid
from prime_composer.losses.config import SupportLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.losses.shared.support_divergence import (
    comparison_metrics,
    divergence_per_token,
)
from prime_composer.tables import refuse_above


class TAIDLossConfig(SupportLossConfig):
    """Knobs of ``taid_loss_fn`` and of its schedule."""

    type: Literal["taid"] = "taid"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"total_steps": 10},
        {"total_steps": 10, "k": "full", "normalization": "full"},
        {"total_steps": 10, "normalization": "renorm", "form": "kl", "k": 8},
    )
    surrogate: ClassVar[bool] = True

    total_steps: PositiveInt
    """Optimizer steps of the run, over which t rises."""

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""

    form: Literal["cross_entropy", "kl"] = "cross_entropy"
    """The value that the loss returns, and that the schedule reads. The gradient is the same."""

    t_start: float = Field(0.4, ge=0, le=1)
    """t at the first step."""

    t_end: float = Field(1.0, ge=0, le=1)
    """t at the end. 1 is the teacher itself."""

    alpha: NonNegativeFloat = 5e-4
    """Step size of the adaptive branch. 0 leaves the linear one."""

    beta: float = Field(0.99, ge=0, lt=1)
    """Momentum of the relative change of the loss."""

    @model_validator(mode="after")
    def _t_rises(self) -> "TAIDLossConfig":
        refuse_above(self, "t_start", "t_end", "t only rises.")
        return self

    def make_state(self) -> "TAIDScheduler":
        return TAIDScheduler(self)


class TAIDScheduler:
    """Schedule of t. It moves once per optimizer step, so that all micro-batches share one t."""

    def __init__(self, config: TAIDLossConfig):
        self._config = config
        self.t = config.t_start
        self.momentum = 0.0
        self.previous_loss: float | None = None
        self.step = 0

    def end_step(self, mean_loss: float) -> None:
        """Move t by the step's loss per token. As in the reference, the first call stores it."""
        config = self._config
        if self.previous_loss is not None:
            change = (self.previous_loss - mean_loss) / (self.previous_loss + 1e-15)
            self.momentum = config.beta * self.momentum + (1 - config.beta) * change
            linear = (
                config.t_start + (config.t_end - config.t_start) * self.step / config.total_steps
            )
            adaptive = self.t + config.alpha / (1 + math.exp(-max(self.momentum, -700.0))) * (
                1 - self.t
            )
            self.t = min(config.t_end, max(linear, adaptive))
        self.previous_loss = mean_loss
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "momentum": self.momentum,
            "previous_loss": self.previous_loss,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t, self.momentum = state["t"], state["momentum"]
        self.previous_loss, self.step = state["previous_loss"], state["step"]


@register(TAIDLossConfig)
def taid_loss_fn(inputs: LossInputs, config: TAIDLossConfig, state: TAIDScheduler) -> LossOutputs:
    """Return sum_mask w (-sum p_t log p), or sum_mask w KL(p_t || p)."""
    mask = inputs.loss_mask
    per_token = divergence_per_token(inputs, config, taid, mask, t=state.t, form=config.form)
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            config.form: token_mean(per_token, mask),
            "t": torch.full_like(loss, state.t).detach(),
            "signal_top1pct": top_share(per_token, mask),
            **comparison_metrics(inputs, mask, reverse=False),
        }
    return LossOutputs(loss=loss, metrics=metrics)
