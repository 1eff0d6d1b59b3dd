"""Mark every key of a recipe with what an export to prime-rl does with it.

- carried: written in prime-rl's own terms, or refused if the version cannot do what it says;
- only refused: read only by a setting that the export refuses;
- not carried: a run can do without it. The export lists it with the reason.

The mark is on the field, as its ``json_schema_extra``. Keys under ``loss``, ``prepare`` and
``prime_rl`` belong to their table, whose field has the mark.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from prime_composer.problems.config import DataConfig


@dataclass(frozen=True)
class Mark:
    """What an export does with a key."""

    export: Literal["carried", "not carried", "only refused"]  # one of the three
    why: str = ""  # the reason that a key is not carried
    # values with which nothing is lost although the key is not carried
    harmless: tuple[Any, ...] = ()


def _marked(mark: Mark) -> dict[str, Any]:
    return {"prime_rl": asdict(mark)}


def uncarried(why: str, harmless: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a key that prime-rl has no setting for."""
    return _marked(Mark("not carried", why, harmless))


CARRIED = _marked(Mark("carried"))
ONLY_REFUSED = _marked(Mark("only refused"))

DATA: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("source", "path", "hub_id", "hub_name", "prompt_key", "answer_key"), CARRIED),
    **dict.fromkeys(("limit", "prompt_chars", "clean", "kind", "size", "seed"), CARRIED),
    **dict.fromkeys(("operations", "topics", "hold_out", "use"), CARRIED),
    **dict.fromkeys(("calculator_annotations", "prompt_template"), CARRIED),
    **dict.fromkeys(("messages_key", "system", "system_key", "template_args"), CARRIED),
    "chat_template": uncarried("prime-rl always renders a chat", harmless=(True,)),
    **dict.fromkeys(("metric", "ratio", "teacher", "teacher_key"), CARRIED),
}
"""Marks of ``[data]``. Its class belongs to the room ``problems``, which does not refer to
prime-rl."""


class SetKey(NamedTuple):
    """A key that a recipe sets."""

    key: str  # as the recipe writes it, for example "teachers.math.url"
    value: Any  # its value
    mark: Mark  # what an export does with it


def keys_set(table: BaseModel, key: str = "") -> Iterator[SetKey]:
    """Yield every key that a recipe sets, not those left at their default, with its mark."""
    for name in type(table).model_fields:
        if name not in table.model_fields_set:
            continue
        value, mark = getattr(table, name), mark_of(type(table), name)
        if mark is not None:
            yield SetKey(f"{key}{name}", value, mark)
        elif isinstance(value, BaseModel):
            yield from keys_set(value, f"{key}{name}.")
        elif isinstance(value, Mapping):
            for child_name, child in value.items():
                yield from keys_set(child, f"{key}{name}.{child_name}.")


def mark_of(table: type[BaseModel], name: str) -> Mark | None:
    """Return the mark of a field, or None for a table whose keys have their own."""
    extra = DATA[name] if table is DataConfig else table.model_fields[name].json_schema_extra
    mark = extra.get("prime_rl") if isinstance(extra, dict) else None
    return Mark(**mark) if isinstance(mark, dict) else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that an annotation names, also in unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
