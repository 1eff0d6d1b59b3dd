"""Read a recipe file, apply overrides, and explain what is wrong with it."""

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError

from prime_composer.extras import checkout, installed_from
from prime_composer.losses import LossConfig, loss_type
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.carried import models_in
from prime_composer.recipe.environment import environment_kind
from prime_composer.recipe.prepare import PrepareConfig, prepare_kind
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.recipe.urls import public_url
from prime_composer.removed import REMOVED
from prime_composer.tables import Table, nearest, reason_of

S = TypeVar("S", bound=Table)

REMEDIES_OF_MISSING = {
    "loss": '; write [loss] with type = "topk_reverse_kl" and k = 32, the recipes\' default',
    "student": '; write [student] with model = "DIR or hub id"',
    "trainer": "; write [trainer] with the number of its steps, such as steps = 100",
    "trainer.steps": "; write the number of optimizer steps, such as steps = 100",
}
"""What to write, by a key that has no default."""

REMEDIES = {
    **dict.fromkeys(("greater_than", "greater_than_equal"), "; raise it"),
    **dict.fromkeys(("less_than", "less_than_equal"), "; lower it"),
    "finite_number": "; write a number such as 1e-4",
}
"""What to do, by the type of a pydantic error."""


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
    """Return the tables of a TOML file; a ``RecipeError`` where it is missing or no TOML."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        home = checkout() or installed_from() or Path("the repository")
        raise RecipeError(
            f"{path}: no such {what}. The shipped ones are in {home / shipped}."
        ) from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise RecipeError(f"{path}: not a TOML file: too deeply nested") from None
    except ValueError as error:  # malformed, not UTF-8, or a number of thousands of digits
        raise RecipeError(f"{path}: not a TOML file: {abridged(str(error))}") from None


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate a recipe given as nested tables. One ``RecipeError`` names every problem."""
    return parse_tables(Recipe, raw, source)


def parse_tables(cls: type[S], raw: dict[str, Any], source: str) -> S:
    """Validate nested tables as a ``cls``. One ``RecipeError`` names its problems."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        lines = [f"{source}: {_explain(item, cls, raw)}" for item in error.errors()]
    raise RecipeError("\n".join(lines))


def abridged(text: str, limit: int = 200) -> str:
    """Return a text of at most ``limit`` letters, the middle left out, and without passwords."""
    text = public_url(text)
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def apply_override(raw: dict[str, Any], item: str) -> None:
    """Set ``section.key=value`` in nested tables, in place.

    A model has one origin: ``student.model=DIR`` replaces the recipe's ``[student.prepare]``.
    """
    key, equals, text = item.partition("=")
    names = key.strip().split(".")
    shown = f"--set {abridged(item)}"
    if not equals or not all(names):
        raise RecipeError(
            f"{shown}: write it as --set section.key=value, for example --set trainer.lr=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except (RecursionError, ValueError):
        raise RecipeError(f"{shown}: too deeply nested, or a number of too many digits") from None
    table = raw
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(
                f"{shown}: {abridged(name, 80)} is a value in the recipe, not a table"
            )
    if names[0] in ("student", "teacher", "teachers", "reference") and names[-1] == "model":
        for origin in ("prepare", "policy", "start"):
            table.pop(origin, None)
    table[names[-1]] = value


def _explain(item: Any, root: type[BaseModel], raw: Any) -> str:
    """Return one pydantic error as one sentence that names the key and the remedy."""
    loc = item["loc"]
    key = abridged(".".join(str(part) for part in loc), 100)
    if item["type"] == "extra_forbidden":
        if instead := REMOVED.get(re.sub(r"^environments\.[^.]*", "environments.NAME", key)):
            return f"{key} was removed: {instead}"
        known = fields_at(loc[:-1], root, raw)
        near = nearest(str(loc[-1]), known, cutoff=0.5)
        hint = f"did you mean {near}?" if near else f"known here: {', '.join(sorted(known))}."
        return f"unknown key {key}; {hint}"
    if item["type"] == "missing":
        return f"{key} is missing{REMEDIES_OF_MISSING.get(key, '')}"
    message = abridged(reason_of(item), 500)
    if not key:
        return message
    if item["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {message} (got {abridged(repr(item['input']))}){REMEDIES.get(item['type'], '')}"


def fields_at(loc: Sequence[Any], root: type[BaseModel], raw: Any) -> list[str]:
    """Return the names of the fields of the table that an error location leads to."""
    table, value, is_name = root, raw, False
    for part in loc:
        value = value[part]
        if is_name:
            is_name = False
        else:
            annotation = table.model_fields[part].annotation
            table, is_name = models_in(annotation)[0], get_origin(annotation) is dict
        if is_name:
            continue
        if issubclass(table, LossConfig):
            table = loss_type(value["type"])
        elif issubclass(table, PrepareConfig):
            table = prepare_kind(value)
        elif issubclass(table, DataConfig) and loc[0] == "environments":
            table = environment_kind(value)
    return [field.alias or name for name, field in table.model_fields.items()]
