"""What runs measure, and how reports, studies and the lines of a run show it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from prime_composer.problems.metrics import TITLES

MISSING = "–"  # The cell of a value that was not measured

Formatter = Callable[[float | None], str]


def percent(value: float | None) -> str:
    """Format a share as a percentage with one decimal."""
    return MISSING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number with three decimals."""
    return MISSING if value is None else f"{value:.3f}"


def decimal(value: float | None) -> str:
    """Format a mean of counts, or seconds, with two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def score_text(name: str, value: float | None) -> str:
    """Format a score of ``TITLES``: accuracy as a percentage, a graded metric times 100."""
    if value is None or name == "accuracy":
        return percent(value)
    return f"{100 * value:.1f}"


class Quantity(NamedTuple):
    """What is measured."""

    metric: str  # name in metrics.jsonl, or after the prefix of the run's loss
    title: str  # in a table
    text: Formatter
    panel: str | None = None  # title of its panel in a figure; None has no panel
    unit: str = "nats per token"  # label of the panel's axis

    @property
    def name(self) -> str:
        """The title without its unit."""
        return self.title.partition(",")[0]


SCORES = {
    name: Quantity(
        f"eval/{name}", title, partial(score_text, name), f"held-out {title}, greedy", "share"
    )
    for name, title in TITLES.items()
}
"""Scores of held-out answers; a run has one, or one per kind of its environments."""

COUNTS = {
    "turns": Quantity("eval/turns", "turns per rollout", decimal),
    "tool_calls": Quantity("eval/tool_calls", "tool calls per rollout", decimal),
}
"""What is counted in environments by id."""

REVERSE_KL = Quantity(
    "eval/reverse_kl", "reverse KL, nats/token", number, "reverse KL to the teacher, held out"
)

OVERLAP = Quantity("eval/overlap", "overlap of both top K", percent)

QUANTITIES = SCORES | {
    "reverse_kl": REVERSE_KL,
    "forward_kl": Quantity("eval/forward_kl", "forward KL", number),
    "entropy": Quantity("eval/entropy", "entropy", number),
    "teacher_entropy": Quantity("eval/teacher_entropy", "teacher's entropy", number),
    "overlap": OVERLAP,
    "top1pct": Quantity(
        "signal_top1pct",
        "top 1% of tokens hold",
        percent,
        "share of the loss's signal in its top 1% of tokens",
        "share",
    ),
    "step_seconds": Quantity("time/step", "s/step", decimal),
}
"""Name in a study's ``results.json`` -> what it is. Scores have others, see ``quantity_of``."""


def quantity_of(name: str) -> Quantity:
    """Return one of ``QUANTITIES``; ``accuracy/NAME`` is an environment's, without a panel."""
    name, _, environment = name.partition("/")
    quantity = QUANTITIES[name]
    if not environment:
        return quantity
    metric = f"{quantity.metric}/{environment}"
    return quantity._replace(metric=metric, title=environment, panel=None)


def scores_in(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the scores of ``TITLES`` that a run measured."""
    return [name for name in TITLES if any(f"eval/{name}" in record for record in records)]


def kl_title(*records: Mapping[str, Any]) -> str:
    """Return what ``eval/reverse_kl`` of these records is over: all ids, or some and a tail."""
    sizes = {f"{record['eval/kl_ids']:.0f}" for record in records if "eval/kl_ids" in record}
    return f"KL on {'/'.join(sorted(sizes, key=int))} ids + tail" if sizes else "reverse KL"
