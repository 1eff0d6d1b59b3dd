"""Read a recipe file, apply overrides, and explain what is wrong with it."""

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prime_composer.losses import LossConfig, loss_type
from prime_composer.recipe.carried import models_in
from prime_composer.recipe.schema import Recipe, RecipeError, Section

S = TypeVar("S", bound=Section)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: a TOML file.
        overrides: ``section.key=value`` items, applied in order. A value is TOML or a bare string.

    Raises:
        RecipeError: the file is missing or no TOML, a key is unknown (the nearest one is named), or
            a value is wrong.
    """
    raw = read_tables(path, "recipe", "recipes/")
    for item in overrides:
        apply_override(raw, item)
    return parse_recipe(raw, str(path))


def read_tables(path: str | os.PathLike[str], what: str, shipped: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Args:
        path: the file.
        what: the kind of file, for the error message.
        shipped: the folder of the shipped files of that kind, for the error message.

    Raises:
        RecipeError: the file is missing or no TOML.
    """
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such {what}. The shipped ones are in {shipped}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise RecipeError(f"{path}: not a TOML file: {error}") from None


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate a recipe given as nested tables. One ``RecipeError`` names every problem."""
    return parse_tables(Recipe, raw, source)


def parse_tables(cls: type[S], raw: dict[str, Any], source: str) -> S:
    """Validate nested tables as a ``cls``. One ``RecipeError`` names every problem and its key."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item, cls, raw) for item in error.errors()]
        raise RecipeError("\n".join(f"{source}: {line}" for line in lines)) from None


def apply_override(raw: dict[str, Any], item: str) -> None:
    """Set ``section.key=value`` in nested tables, in place.

    A model has one origin: ``student.model=DIR`` replaces the recipe's ``[student.prepare]``.

    Raises:
        RecipeError: the item is not of that form, or a section of it is a value.
    """
    key, equals, text = item.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(
            f"--set {item}: write it as --set section.key=value, for example --set trainer.lr=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = raw
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {item}: {name} is a value in the recipe, not a table")
    if names[0] in ("student", "teacher", "teachers") and names[-1] == "model":
        for origin in ("prepare", "policy"):
            table.pop(origin, None)
    table[names[-1]] = value


def _explain(item: Any, root: type[BaseModel], raw: Any) -> str:
    """Return one pydantic error as one sentence that names the key and the remedy."""
    loc = item["loc"]
    key = ".".join(str(part) for part in loc)
    if item["type"] == "extra_forbidden":
        known = _fields_at(loc[:-1], root, raw)
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}."
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if item["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {message} (got {item['input']!r})"


def _fields_at(loc: Sequence[Any], root: type[BaseModel], raw: Any) -> list[str]:
    """Return the names of the fields of the table that an error location leads to."""
    table, value = root, raw
    for part in loc:
        value = value[part]
        field = table.model_fields.get(part)
        if field is None:  # the NAME of [teachers.NAME]
            continue
        models = models_in(field.annotation)
        table = models[0] if models else table
        if issubclass(table, LossConfig):
            table = loss_type(value["type"])
    return list(table.model_fields)
