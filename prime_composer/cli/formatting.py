"""Format numbers the same way in every command, and name the file of a run's recipe."""

RECIPE_FILE = "recipe.json"
"""The resolved recipe in every run directory."""

MISSING = "–"
"""The cell of a value that was not measured."""


def percent(value: float | None) -> str:
    """Format a share as a percentage with one decimal."""
    return MISSING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number with three decimals."""
    return MISSING if value is None else f"{value:.3f}"
