"""Watch what steps and evaluations measure: a student that collapses, a teacher of no use."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_composer.problems.metrics import TITLES
from prime_composer.recipe.watchers import CollapseConfig

LARGEST_SHARE = 0.05  # Of the student's tokens from which on a word is due

REMEDIES = {
    "xtok/noncanonical": (
        "of the student's tokens are none that its own tokenizer writes there, so that the teacher "
        "gives them a floor; lower rollout.temperature"
    ),
    "xtok/unscored": (
        "of the student's tokens have no score of the teacher, and do not train; compare both "
        "prompts, which each model's own chat template writes, and lower rollout.temperature"
    ),
}
"""What a teacher with a tokenizer of its own measures of a step, and what to do about it."""

GROWTH = "rollout/growth"  # Mean length of the student's rollouts, in those of the first step


@dataclass(frozen=True)
class Sign:
    """What a limit of ``[checks.collapse]`` is about: the largest or smallest value of a metric."""

    metric: str
    largest: bool
    words: str
    remedy: str


SIGNS = {
    "repeated": Sign(
        "rollout/repeated",
        True,
        "{:.1%} of the rollouts end in a repetition",
        "if rollout/end_teacher is near 0, name the ends of both models in [loss.stops]; otherwise "
        "lower trainer.lr",
    ),
    "truncated": Sign(
        "rollout/student_truncated",
        True,
        "{:.1%} of the student's rollouts are cut",
        "raise rollout.max_tokens, or lower trainer.lr if answers were shorter before",
    ),
    "longer": Sign(
        GROWTH,
        True,
        "the rollouts are {:.3g} times as long as in the first step",
        "lower trainer.lr, and see whether rollout/end_teacher is near 0",
    ),
    "shorter": Sign(
        GROWTH,
        False,
        "the rollouts are {:.3g} times as long as in the first step",
        "lower trainer.lr, or compare by what token student and teacher end an answer",
    ),
    "entropy": Sign(
        "rollout/entropy",
        False,
        "the student's entropy is {:.3g} nats per token",
        "use a loss that covers the teacher, such as topk_forward_kl or generalized_jsd, or lower "
        "trainer.lr",
    ),
    "end": Sign(
        "rollout/end_teacher",
        False,
        "the teacher gives the tokens that end the student's answers a probability of {:.2g}",
        "one of the models ends its answers by another token: name the ends of both in "
        "[loss.stops], or train the student on answers in the teacher's format first",
    ),
}
"""Each limit of ``[checks.collapse]``."""


class Collapsed(ValueError):
    """The student's answers were beyond a limit of ``[checks.collapse]``."""


@dataclass
class CollapseCheck:
    """Whether the student's answers are beyond a limit, and since when."""

    config: CollapseConfig
    knows_start: bool = False  # the first step was taken
    # mean length of the run's first rollouts; None where it is not known
    first_length: float | None = None
    # limit -> first step beyond it, until ``steps`` in a row are within it again
    since: dict[str, int] = field(default_factory=dict)
    # limit -> steps in a row that are beyond it
    beyond: Counter[str] = field(default_factory=Counter)
    # limit -> steps in a row that are within it
    within: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_records(
        cls, config: CollapseConfig, records: Iterable[Mapping[str, Any]]
    ) -> "CollapseCheck":
        """Return the check of a run that has logged these steps."""
        check = cls(config)
        for record in records:
            if record["step"] > 0:
                check.add(record["step"], record)
        return check

    def add(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Take a step's metrics, and return those that need the first step's."""
        length = metrics.get("rollout/student_tokens")
        self.knows_start |= step == 1
        if self.knows_start and self.first_length is None:
            self.first_length = length
        grown: dict[str, float] = {}
        if length is not None and self.first_length:
            grown[GROWTH] = length / self.first_length
        for name, sign in SIGNS.items():
            limit, value = getattr(self.config, name), (grown | dict(metrics)).get(sign.metric)
            if limit is None or value is None:
                continue
            if value > limit if sign.largest else value < limit:
                self.since.setdefault(name, step)
                self.beyond[name], self.within[name] = self.beyond[name] + 1, 0
            else:
                self.beyond[name], self.within[name] = 0, self.within[name] + 1
                if self.within[name] >= self.config.steps:
                    self.since.pop(name, None)
        return grown

    @property
    def healthy(self) -> int | None:
        """The last step before the first one that is beyond a limit; None where all are within."""
        return min(self.since.values()) - 1 if self.since else None

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """Return a sentence for each limit that has been passed for long enough, once each."""
        return [
            f"{sign.words.format(metrics[sign.metric])}, beyond checks.collapse.{name} = "
            f"{getattr(self.config, name):g} (steps in a row: {self.beyond[name]}; first in step "
            f"{self.since[name]}); {sign.remedy}"
            for name, sign in SIGNS.items()
            if sign.metric in metrics
            and (
                self.beyond[name] == self.config.steps
                or (self.config.action == "stop" and self.beyond[name] > self.config.steps)
            )
        ]


def teachers_without_success(measured: Mapping[str, float]) -> list[str]:
    """Return a warning for each teacher whose greedy answers are all wrong.

    The usual reason: its answers are in a form that the metric does not read, or are cut.
    """
    scores = {name: name.split("/") for name in measured if name.startswith("teacher/")}
    return [
        f"{' '.join(['the teacher', *parts[1:-1]])} has 0.0% accuracy on the held-out problems: "
        "rollout.max_tokens may cut its answers, or [data] metric and prompt_template do not suit "
        "it"
        for name, parts in scores.items()
        # The last part may be an environment's name, behind that of another score.
        if parts[-1] == "accuracy" and {*parts[1:-1]}.isdisjoint(TITLES) and measured[name] == 0
    ]


def tokens_of_no_use(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a warning for each metric by which many tokens of a step say little to the student."""
    return {
        name: f"{metrics[name]:.1%} {remedy} ({name})"
        for metric, remedy in REMEDIES.items()
        for name in metrics
        if name.endswith(metric) and metrics[name] > LARGEST_SHARE
    }
