"""Read a recipe file, apply overrides, explain what is wrong with it."""

import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from prime_composer.losses import LOSS_TYPES
from prime_composer.recipe.schema import Recipe, RecipeError, Section

S = TypeVar("S", bound=Section)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: a TOML file.
        overrides: ``section.key=value`` items applied on top; the value is TOML, or a bare string.

    Raises:
        RecipeError: the file is missing or no TOML, a key is unknown (the nearest one is named), a
            value is wrong.
    """
    raw = read_tables(path, "recipe", "recipes/")
    for item in overrides:
        apply_override(raw, item)
    return parse_recipe(raw, str(path))


def read_tables(path: str | os.PathLike[str], what: str, shipped: str) -> dict[str, Any]:
    """The tables of a TOML file. ``what`` it is and where the ``shipped`` ones are go into the
    message of a missing one."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such {what}. The shipped ones are in {shipped}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise RecipeError(f"{path}: not a TOML file: {error}") from None


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate a recipe given as nested tables; every problem is named in one ``RecipeError``."""
    return parse_tables(Recipe, raw, source)


def parse_tables(cls: type[S], raw: dict[str, Any], source: str) -> S:
    """Nested tables as a ``cls``; every problem is named, with its key, in one ``RecipeError``."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item, cls) for item in error.errors()]
        raise RecipeError("\n".join(f"{source}: {line}" for line in lines)) from None


def apply_override(raw: dict[str, Any], item: str) -> None:
    """Set ``section.key=value`` in nested tables, in place.

    A model has one origin: ``student.model=DIR`` takes the place of the recipe's
    ``[student.prepare]``.
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


def _explain(item: Any, root: type[BaseModel]) -> str:
    """One pydantic error as one sentence that names the key and the remedy."""
    loc = item["loc"]
    key = ".".join(str(part) for part in loc if part not in LOSS_TYPES)
    if item["type"] == "extra_forbidden":
        known = _fields_at(loc[:-1], root)
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}."
        return f"unknown key {key}; {hint}"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        given = item["ctx"].get("tag")
        near = difflib.get_close_matches(str(given), LOSS_TYPES, n=1)
        what = f"unknown loss type {given!r}" if given is not None else f"{key}.type is missing"
        return f"{what}{f'; did you mean {near[0]}?' if near else ''} The choices are: {', '.join(LOSS_TYPES)}."
    if item["type"] == "missing":
        return f"{key} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return (
        f"{key}: {message} (got {item['input']!r})"
        if key and item["type"] != "value_error"
        else (f"{key}: {message}" if key else message)
    )


def _fields_at(loc: Sequence[Any], root: type[BaseModel]) -> list[str]:
    """Names of the fields of the section of ``root`` that an error location points into."""
    here: Any = root
    for part in loc:
        if part in LOSS_TYPES:
            here = LOSS_TYPES[part]
            continue
        field = getattr(here, "model_fields", {}).get(part)
        if field is None:
            continue
        options = [field.annotation, *get_args(field.annotation)]
        models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        here = models[0] if models else here
    return list(here.model_fields)
