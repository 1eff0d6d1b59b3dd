"""Define the tables of what watches a run: evaluation, logging, checkpoints and checks."""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveInt

from prime_composer.recipe.carried import uncarried
from prime_composer.tables import LARGEST_BATCH, MOST_STEPS, Table

ALL_STEPS = uncarried("prime-rl trains all steps of a run")


class EvalConfig(Table):
    """Evaluation on held-out problems: greedy answers, and reverse KL on rollouts at T = 1."""

    every: int = Field(default=20, ge=0, le=MOST_STEPS)
    """Steps between evaluations. 0: only before the first step and after the last."""

    size: int = Field(default=200, ge=1, le=LARGEST_BATCH)
    """Held-out problems for accuracy, the same ones every time."""

    kl_size: int = Field(
        default=64,
        ge=0,
        le=LARGEST_BATCH,
        json_schema_extra=uncarried("prime-rl evaluates accuracy alone", harmless=(0,)),
    )
    """Held-out problems whose rollouts measure the reverse KL. 0: none."""

    kl_support: PositiveInt | Literal["full", "auto"] = Field(
        default="auto", json_schema_extra=uncarried("prime-rl evaluates accuracy alone")
    )
    """Token ids per position of the measured KL. auto: all of a vocabulary up to 8192, else 64 and
    a tail bucket. A served teacher without the plugin gives the loss's k, or 20; ``eval/kl_ids``
    says how many."""

    @property
    def largest(self) -> int:
        """How many held-out problems an evaluation asks at most."""
        return max(self.size, self.kl_size)


class UntilConfig(Table):
    """End before the last step, once a metric of the evaluations is no longer better than before.

    The evaluation before the first step counts, and so does every later one that has the metric as
    a number. A run ends after the first evaluation whose best value is ``plateau`` evaluations old.
    """

    metric: str = Field(json_schema_extra=ALL_STEPS)
    """A score such as ``eval/accuracy``, of which more is better, or ``eval/reverse_kl``,
    ``eval/forward_kl`` or ``eval/truncated``, of which less is; also of one environment,
    ``eval/accuracy/NAME``."""

    plateau: int = Field(ge=1, le=MOST_STEPS, json_schema_extra=ALL_STEPS)
    """Evaluations in a row that are not better than the best one before them."""

    def best(self, evaluations: Mapping[int, Mapping[str, float]]) -> int | None:
        """Return the step of the best value where that is ``plateau`` evaluations old, else None.

        Of equal values the first is the best. NaN is no value.
        """
        less_is_better = self.metric.split("/")[1:2] in (
            ["reverse_kl"],
            ["forward_kl"],
            ["truncated"],
        )
        sign = -1.0 if less_is_better else 1.0
        values = [
            (step, sign * evaluations[step][self.metric])
            for step in sorted(evaluations)
            if not math.isnan(evaluations[step].get(self.metric, math.nan))
        ]
        if not values:
            return None
        place = max(range(len(values)), key=lambda index: (values[index][1], -index))
        return values[place][0] if len(values) - 1 - place >= self.plateau else None

    def describe(self, best: int, evaluations: Mapping[int, Mapping[str, float]]) -> str:
        """Return which evaluation decides, the one after step ``best``."""
        value = evaluations[best][self.metric]
        return (
            f"no {self.metric} was better than {value:.4g}, of step {best}, at {self.plateau} "
            "evaluations"
        )


class WandbConfig(Table):
    """Weights & Biases. Needs ``pip install wandb``."""

    project: str
    """Project."""

    name: str | None = None
    """Run name. Unset: the run directory's name."""


class LoggingConfig(Table):
    """Where metrics are logged, beside ``metrics.jsonl`` in the run directory."""

    tensorboard: bool = Field(
        default=True,
        json_schema_extra=uncarried("prime-rl writes no TensorBoard files", harmless=(False,)),
    )
    """Also write TensorBoard event files."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""


class CheckpointConfig(Table):
    """Checkpoints: model, optimizer, loss state, step. A checkpoint is renamed when complete."""

    every: int = Field(default=20, ge=0, le=MOST_STEPS)
    """Steps between checkpoints. 0: only after the last step."""

    keep: int = Field(default=2, ge=1, le=LARGEST_BATCH)
    """Number of the newest checkpoints to keep. An island keeps at least 2."""

    merge: bool = Field(
        default=False,
        json_schema_extra=uncarried(
            "prime-rl writes the adapter",
            harmless=(False,),
        ),
    )
    """With ``[student.lora]``: a checkpoint is the whole model, with the adapter in its folder
    ``adapter``. Unset: it is the adapter's directory."""


LOGS_ALONE = uncarried("prime-rl logs lengths and entropy")


class CollapseConfig(Table):
    """Limits of how a healthy student's answers end, and what happens beyond one.

    The numbers are metrics of every step, whether they have a limit or not.
    """

    action: Literal["warn", "stop"] = Field(default="warn", json_schema_extra=LOGS_ALONE)
    """``warn`` once, or ``stop`` with a checkpoint. The newest checkpoint from before the first
    step beyond a limit is kept, until ``steps`` steps in a row are within it again."""

    steps: int = Field(default=3, ge=1, le=MOST_STEPS, json_schema_extra=LOGS_ALONE)
    """Steps in a row beyond a limit, or within it again."""

    repeated: float | None = Field(default=0.5, gt=0, lt=1, json_schema_extra=LOGS_ALONE)
    """Largest share of the student's rollouts that end in a repetition (`rollout/repeated`)."""

    truncated: float | None = Field(default=None, gt=0, lt=1, json_schema_extra=LOGS_ALONE)
    """Largest share of the student's rollouts that are cut (`rollout/student_truncated`)."""

    longer: float | None = Field(default=None, gt=1, json_schema_extra=LOGS_ALONE)
    """Largest mean length, as a multiple of the first step's (`rollout/growth`)."""

    shorter: float | None = Field(default=None, gt=0, lt=1, json_schema_extra=LOGS_ALONE)
    """Smallest mean length, as a share of the first step's (`rollout/growth`)."""

    entropy: float | None = Field(default=None, gt=0, json_schema_extra=LOGS_ALONE)
    """Smallest entropy of the sampling policy in nats per token (`rollout/entropy`)."""

    end: float | None = Field(default=None, gt=0, lt=1, json_schema_extra=LOGS_ALONE)
    """Smallest mean probability that the teacher gives the tokens by which the student ends its
    answers (``rollout/end_teacher``)."""


class ChecksConfig(Table):
    """Checks during a run that teachers and sampler still compute what they did at its start."""

    every: int = Field(
        default=10,
        ge=0,
        le=MOST_STEPS,
        json_schema_extra=uncarried(
            "inside prime-rl a teacher is asked again every 256 requests; of the sampler "
            "prime-rl's trainer has a metric, mismatch_kl"
        ),
    )
    """Steps between two checks: each teacher scores its canary again, and with top_p or
    rollout.ahead the sampler is compared with its weights, which otherwise happens in every step.
    Checks are also made before a checkpoint, after the last step and at a signal. 0: only of a
    server that may be another one."""

    tolerance: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=uncarried(
            "inside prime-rl it is 0.5 nat at nine of ten positions", harmless=(None,)
        ),
    )
    """Largest difference in nats between a teacher's log-probs of the canary at the start and
    later. Unset: 1e-4 in float32, 0.05 in float16, 0.5 in bfloat16."""

    mismatch: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=uncarried(
            "prime-rl's trainer has a metric of its own, mismatch_kl", harmless=(None,)
        ),
    )
    """Largest KL between sampler and trainer in nats per token, where a token's log-ratio counts as
    2 nats at most. Unset: 1e-6 if trainer.dtype is float32, 0.05 if it is bfloat16, each divided by
    the square of rollout.temperature."""

    collapse: CollapseConfig = Field(default_factory=CollapseConfig)
    """When the student's answers are no healthy ones any more."""
