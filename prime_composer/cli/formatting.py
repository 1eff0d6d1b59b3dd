"""Format numbers the same way in every command."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_composer.problems.metrics import TITLES

MISSING = "–"  # The cell of a value that was not measured


def percent(value: float | None) -> str:
    """Format a share as a percentage with one decimal."""
    return MISSING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number with three decimals."""
    return MISSING if value is None else f"{value:.3f}"


def decimal(value: float | None) -> str:
    """Format a mean of counts with two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def score(name: str, value: float | None) -> str:
    """Format a score of ``TITLES``: accuracy as a percentage, a graded metric times 100."""
    if value is None or name == "accuracy":
        return percent(value)
    return f"{100 * value:.1f}"


def scores_in(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the scores of ``TITLES`` that a run measured."""
    return [name for name in TITLES if any(f"eval/{name}" in record for record in records)]


def kl_title(*records: Mapping[str, Any]) -> str:
    """Return what ``eval/reverse_kl`` of these records is over: all ids, or some and a tail."""
    sizes = {f"{record['eval/kl_ids']:.0f}" for record in records if "eval/kl_ids" in record}
    return f"KL on {'/'.join(sorted(sizes, key=int))} ids + tail" if sizes else "reverse KL"
