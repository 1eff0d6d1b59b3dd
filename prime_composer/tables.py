"""The base of every table that a user writes, and what a table names as ``"module:function"``.

This file imports no other file of the package.
"""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, field_validator, model_validator


class Table(BaseModel):
    """A table: unknown keys are refused, numbers are finite and no booleans, values never change.

    A string is read as a number where one is expected: prime-rl's command line passes strings. A
    URL is no path.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def refusals(self) -> Iterator[str]:
        """Yield what of its keys does not go together, each with the remedy."""
        yield from ()

    @model_validator(mode="after")
    def _goes_together(self) -> "Table":
        for why in self.refusals():
            raise ValueError(why)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_other_kind(cls, value: Any, info: Any) -> Any:
        annotation: Any = cls.model_fields[info.field_name].annotation
        leaves = _leaves(annotation)
        given = value.values() if isinstance(value, Mapping) else value
        given = given if isinstance(value, Mapping | list | tuple) else [value]
        takes_numbers_alone = {int, float} & leaves and not {bool, Any} & leaves
        if takes_numbers_alone and any(isinstance(one, bool) for one in given):  # read as 1 and 0
            raise ValueError("true and false are no numbers; write a number")
        # A URL may have a password, which is no longer told from the rest of a path.
        if isinstance(value, str) and "://" in value and Path in leaves:
            raise ValueError("a URL is no path; write the path of a file or folder")
        return value


def _leaves(annotation: Any) -> set[Any]:
    parts = get_args(annotation)
    return {annotation} if not parts else {leaf for part in parts for leaf in _leaves(part)}


def reason_of(error: Any) -> str:
    """Return why a value was refused, of one of pydantic's errors."""
    return str(error["msg"].removeprefix("Value error, "))


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is spelled most like another, in any case; None: none is."""
    by_case = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(word[:100].casefold(), by_case, n=1, cutoff=cutoff)
    return by_case[near[0]] if near else None


LARGEST_BATCH = 1_000_000
"""Upper bound of what one step asks for. This one and the next are far beyond any machine."""

LONGEST_CONTEXT = 100_000_000
"""Upper bound of lengths in tokens."""

MOST_STEPS = 100_000_000
"""Upper bound of steps and intervals."""


def refuse_above(table: Table, low: str, high: str, remedy: str) -> None:
    """Refuse a table whose key ``low`` exceeds its key ``high``."""
    lower, upper = getattr(table, low), getattr(table, high)
    if lower > upper:
        raise ValueError(f"{low} = {lower:g} is above {high} = {upper:g}: {remedy}")


def named_module(name: str, what: str, form: str) -> tuple[ModuleType, str]:
    """Import the module of ``"module:function"``, and return it with the name behind the colon.

    A message begins with ``what``, for example "loss type 'a:b'", and has the right ``form``.
    """
    module_name, _, attribute = name.partition(":")
    parts = module_name.split(".")
    if not all(part.isidentifier() for part in (*parts, attribute)):
        raise ValueError(f"{what}: {form}.")
    try:
        return importlib.import_module(module_name), attribute
    except Exception as error:
        remedy = "Correct the module: `import` it in Python to see where."
        if isinstance(error, ModuleNotFoundError) and error.name in (parts[0], module_name):
            remedy = "Put the folder that contains it on PYTHONPATH, or install its package."
        raise ValueError(
            f"{what}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}). {remedy}"
        ) from error
