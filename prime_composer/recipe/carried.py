"""Mark the keys of a recipe that an export to prime-rl does not carry.

A run can do without such a key, and the export lists it with the reason. Every other one is written
in prime-rl's own terms, refused where the version cannot do what it says, or read by nothing but a
setting that is refused. The mark is on the field, as its ``json_schema_extra``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from prime_composer.problems.config import DataConfig


class Mark(NamedTuple):
    """Why prime-rl has no setting for a key."""

    why: str
    harmless: tuple[Any, ...] = ()  # values with which nothing is lost


def uncarried(why: str, harmless: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a key that prime-rl has no setting for."""
    return {"prime_rl": {"why": why, "harmless": harmless}}


OF_DATA = {"chat_template": uncarried("prime-rl always renders a chat", harmless=(True,))}
"""Marks of ``[data]``. Its class belongs to the room ``problems``, which does not refer to
prime-rl."""


def mark_of(table: type[BaseModel], name: str) -> Mark | None:
    """Return the mark of a field; None where it is carried."""
    field = table.model_fields[name]
    extra = OF_DATA.get(name) if table is DataConfig else field.json_schema_extra
    mark = extra.get("prime_rl") if isinstance(extra, dict) else None
    return Mark(**mark) if isinstance(mark, dict) else None


def keys_not_carried(table: BaseModel, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key that a recipe sets and that is lost in an export, with the reason."""
    for name in type(table).model_fields:
        if name not in table.model_fields_set:
            continue
        value, mark = getattr(table, name), mark_of(type(table), name)
        if mark is not None and value not in mark.harmless:
            yield f"{key}{name}", mark.why
        inner = value if isinstance(value, Mapping) else {"": value}
        for child_name, child in inner.items():
            if isinstance(child, BaseModel):
                path = f"{key}{name}.{child_name}".rstrip(".")
                yield from keys_not_carried(child, f"{path}.")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that an annotation names, also in unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
