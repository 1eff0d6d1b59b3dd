"""DistiLLM-2: skewed KL, forward on the teacher's answers and reverse on the student's.

    L = sum over the answers of  c/n sum over its n tokens of  D
    teacher's:  c = 2 - beta,  D = KL(q || skew q + (1 - skew) p)
    student's:  c = beta,      D = KL(p || skew sg p + (1 - skew) q)

A trainer samples pairs of answers to one prompt, one of each kind, and divides by their number.
beta rises linearly, and with it the weight of the student's answers. After ``adapt_skew_after``
steps each answer has a detached skew of its own, which is larger where the two are far apart:

    skew_a = clip(1 - (1 - skew) g/(g_a + 1e-5), 0.01, skew)
    teacher's:  g_a = exp(mean log q(y)) - exp(mean log p(y)),  student's: the negative

with g, the mean of g_a over the answers of a kind in these steps, as the anchor.

Left out: answers that are sampled once, before training. Here both are sampled in each step.

Stale rollouts: compared as the current student has them, without an importance ratio.

References: "DistiLLM-2" (2025), https://arxiv.org/abs/2503.07067, and jongwooko/distillm-2 fe4cf9b.
Its trainer switches the rise of beta and the adaptive skew off, and reads the anchors of the latter
under another name than it stores them. There the adaptive skew has a gradient.
"""

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, given
from prime_composer.divergences import skewed_forward_kl, skewed_reverse_kl, upcast
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import token_mean, top_share
from prime_composer.losses.shared.modifiers import segment_totals
from prime_composer.losses.shared.reductions import masked_sum, summed_over_ranks
from prime_composer.losses.shared.support_divergence import (
    SupportDivergenceConfig,
    comparison_metrics,
    divergence_per_token,
)

SMALLEST_SKEW = 0.01
"""Lower bound of an answer's own skew."""

GAP_SHIFT = 1e-5
"""Added to an answer's gap, the divisor."""


class DistiLLM2LossConfig(SupportDivergenceConfig):
    """Knobs of ``distillm2_loss_fn`` and of its schedule."""

    type: Literal["distillm2"] = "distillm2"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support", "by_teacher", "segment_ids"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"beta_steps": 10},
        {"beta_steps": 10, "skew": 0.3, "normalization": "renorm", "k": 8, "beta_start": 1.2},
        {"beta_steps": 10, "normalization": "full", "k": "full", "adapt_skew_after": 2},
    )
    surrogate: ClassVar[bool] = True
    answer_pairs: ClassVar[bool] = True

    beta_steps: PositiveInt
    """Number of optimizer steps in which beta rises. The authors' is half of the run's."""

    beta_start: float = Field(1.0, ge=0, le=2)
    """Weight of the student's answers at the first step. The teacher's have 2 - beta."""

    beta_end: float = Field(1.5, ge=0, le=2)
    """The same after ``beta_steps``."""

    skew: float = Field(0.1, ge=0, lt=1)
    """Share of the left distribution in the mixture: of q in forward, of p in reverse."""

    adapt_skew_after: PositiveInt | None = None
    """Steps after which each answer has its own skew, between 0.01 and ``skew``. Unset: never."""

    @model_validator(mode="after")
    def _skew_can_fall(self) -> "DistiLLM2LossConfig":
        if self.adapt_skew_after is not None and self.skew <= SMALLEST_SKEW:
            raise ValueError(
                f"adapt_skew_after: an answer's own skew is between {SMALLEST_SKEW} and skew = "
                f"{self.skew}: raise skew, or leave adapt_skew_after out."
            )
        return self

    @property
    def own_needs(self) -> frozenset[str]:
        """What is compared, who wrote what, and log q of the tokens for the adaptive skew."""
        gaps = {"ref_logprobs"} if self.adapt_skew_after is not None else set()
        return super().own_needs | gaps

    @property
    def reads_sampler(self) -> bool:
        """Whether a modifier reads ``inference_logprobs``; the loss itself does not."""
        return "ref_logprobs" in self.modifier_needs

    def make_state(self) -> "DistiLLM2Schedule":
        """Return a schedule at its first step."""
        return DistiLLM2Schedule(self)


class DistiLLM2Schedule:
    """Schedule of beta, and the anchors of the adaptive skew.

    Attributes:
        step: finished optimizer steps.
    """

    def __init__(self, config: DistiLLM2LossConfig):
        self._config = config
        self.step = 0
        self._totals = [0.0] * 4  # gaps of the teacher's and of the student's answers, and answers
        self._step_totals: Tensor | None = None

    @property
    def beta(self) -> float:
        """Weight of the student's answers in this step."""
        config = self._config
        share = min(1.0, self.step / config.beta_steps)
        return config.beta_start + (config.beta_end - config.beta_start) * share

    @property
    def measures(self) -> bool:
        """Whether the gaps of this step's answers count for the anchors."""
        after = self._config.adapt_skew_after
        return after is not None and self.step < after

    @property
    def anchors(self) -> tuple[float, float] | None:
        """Mean gap of the teacher's and of the student's answers; None where skew is a constant."""
        if self._config.adapt_skew_after is None or self.measures:
            return None
        teacher, student, teachers, students = self._totals
        return teacher / max(teachers, 1.0), student / max(students, 1.0)

    def add(self, totals: Float[Tensor, "4"]) -> None:
        """Add one micro-batch: sums of gaps, the teacher's and the student's, and their numbers."""
        totals = totals.detach().double()
        self._step_totals = totals if self._step_totals is None else self._step_totals + totals

    def end_step(self, mean_loss: float) -> None:
        """Move beta on, and close the step's gaps. Every rank has to call it."""
        if self.measures:
            totals = self._step_totals
            totals = torch.zeros(4, dtype=torch.double) if totals is None else totals
            step_totals = summed_over_ranks(totals).tolist()
            self._totals = [a + b for a, b in zip(self._totals, step_totals, strict=True)]
        self._step_totals = None
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule as JSON values."""
        return {"step": self.step, "gaps": list(self._totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.step, self._totals = state["step"], list(state["gaps"])


@register(DistiLLM2LossConfig)
def distillm2_loss_fn(
    inputs: LossInputs, config: DistiLLM2LossConfig, state: DistiLLM2Schedule
) -> LossOutputs:
    """Return the sum over the answers of c/n times the sum of w D over its n tokens."""
    mask, by_teacher = inputs.loss_mask, given(inputs.by_teacher)
    of_teacher, of_student = mask & by_teacher, mask & ~by_teacher
    gaps = None if config.adapt_skew_after is None else answer_gaps(inputs)
    skew: float | Tensor = config.skew
    if gaps is not None and state.anchors is not None:
        skew = own_skew(gaps, by_teacher, state.anchors, config.skew)
    forward = divergence_per_token(inputs, config, skewed_forward_kl, of_teacher, skew=skew)
    reverse = divergence_per_token(
        inputs, config, skewed_reverse_kl, of_student, skew=skew, hold_mixture=True
    )
    lengths = segment_totals(mask.to(forward.dtype), inputs.segment_ids).clamp(min=1)
    beta = state.beta
    answer_means = torch.where(by_teacher, (2 - beta) * forward, beta * reverse) / lengths
    loss = masked_sum(answer_means, mask, inputs.loss_weights)
    if gaps is not None and state.measures and loss.requires_grad:  # an evaluation is no step
        values = [x / lengths for x in (gaps, torch.ones_like(gaps))]
        state.add(
            torch.stack([masked_sum(x, side) for x in values for side in (of_teacher, of_student)])
        )

    with torch.no_grad():
        metrics = {
            "forward": token_mean(forward, mask),
            "reverse": token_mean(reverse, mask),
            "teacher_share": token_mean(by_teacher, mask),
            "skew": token_mean(torch.ones_like(forward) * skew, mask),
            "beta": loss.new_full((), beta),
            "signal_top1pct": top_share(forward + reverse, mask),
            **comparison_metrics(inputs, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)


@torch.no_grad()
def answer_gaps(inputs: LossInputs) -> Float[Tensor, " seq"]:
    """Return g_a of each token's answer: how much more probable its own writer finds its tokens."""
    mask = inputs.loss_mask
    probabilities = []
    for logprobs in (given(inputs.ref_logprobs), inputs.own_logprobs):
        values = torch.where(mask, upcast(logprobs), 0.0)
        lengths = segment_totals(mask.to(values.dtype), inputs.segment_ids).clamp(min=1)
        probabilities.append(torch.exp(segment_totals(values, inputs.segment_ids) / lengths))
    gap = probabilities[0] - probabilities[1]
    return torch.where(given(inputs.by_teacher), gap, -gap)


def own_skew(
    gaps: Float[Tensor, " seq"],
    by_teacher: Bool[Tensor, " seq"],
    anchors: tuple[float, float],
    skew: float,
) -> Float[Tensor, " seq"]:
    """Return the skew of each token's answer, from its gap g_a and the anchor g of its kind."""
    of_teacher, of_student = (torch.full_like(gaps, anchor) for anchor in anchors)
    anchor = torch.where(by_teacher, of_teacher, of_student)
    return (1 - (1 - skew) * anchor / (gaps + GAP_SHIFT)).clamp(SMALLEST_SKEW, skew)
