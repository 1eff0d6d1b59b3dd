"""Write the reference of every recipe key as Markdown, from the pydantic models.

python -m docs.reference                  # print it
python -m docs.reference --write FILE     # renew it between the markers of FILE
python -m docs.reference --check FILE     # fail if FILE is stale

The page is recipes/reference.md. In the guide, recipes/README.md, the same command renews the table
of refused pairs, from ``rules.py``.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.losses import built_in_losses, generate, page_parser, summary_of
from prime_composer.losses import LossConfig
from prime_composer.losses.config import SupportLossConfig, TopKLossConfig
from prime_composer.recipe.carried import mark_of, models_in
from prime_composer.recipe.rules import PAIRS
from prime_composer.recipe.schema import Recipe

BEGIN = "<!-- reference: begin, from python -m docs.reference --write FILE -->"
END = "<!-- reference: end -->"

BEGIN_PAIRS = "<!-- pairs: begin, from python -m docs.reference --write FILE -->"
END_PAIRS = "<!-- pairs: end -->"

TYPE_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
}

REFUSED = {"teachers.NAME.policy"}  # Tables that the models allow and a validator refuses

SHARED = "Losses on a support"  # The section of the knobs that most losses have

Table = tuple[str, type[BaseModel]]  # A table's name in a recipe, and its model


def reference() -> str:
    """Return the reference of all tables of a recipe: keys, types, defaults, meanings."""
    tables = list(_tables_below(Recipe, ""))
    top = {name: field for name, field in Recipe.model_fields.items() if name != "loss"}
    sections = [_section("Top level", Recipe, top)]
    for model in dict.fromkeys(model for _, model in tables):
        names = [name for name, other in tables if other is model]
        title = ", ".join(f"`[{name}]`" for name in names)
        sections.append(_section(title, model, *_own_fields(model, tables)))
    sections += _loss_sections()
    return "\n\n".join(sections) + "\n"


def _loss_sections() -> Iterator[str]:
    """Yield the sections of ``[loss]``: what losses share, every type, then the modifiers."""
    built_in = built_in_losses()
    types = ", ".join(f"`{name}`" for name in built_in)
    yield (
        "## `[loss]`\n\n"
        f"The objective. `type` is one of {types}, or `my_package.my_module:my_loss` for a loss of "
        "your own. The modifiers `[loss.special_tokens]`, `[loss.position_weights]` and "
        "`[loss.rl_mix]` work with every type, `[loss.stops]` with a top K or all ids of a teacher."
    )
    shared = _knobs(SupportLossConfig)
    yield _section(SHARED, SupportLossConfig, shared, level=3)
    for name, config in built_in.items():
        fields, summary = _knobs(config), summary_of(config)
        if issubclass(config, TopKLossConfig):
            same = [
                key
                for key in fields
                if key in shared and _row(config, key) == _row(SupportLossConfig, key)
            ]
            fields = {key: field for key, field in fields.items() if key not in same}
            names = ", ".join(f"`{key}`" for key in same)
            summary += f" {names}: see [{SHARED}](#{SHARED.lower().replace(' ', '-')})."
        yield _section(f'`type = "{name}"`', config, fields, summary=summary, level=3)
        for table, model in _tables_below(config, "loss", skip=LossConfig.model_fields):
            yield _section(f"`[{table}]`", model, model.model_fields, level=3)
    for table, model in _tables_below(LossConfig, "loss"):
        yield _section(f"`[{table}]`", model, model.model_fields, level=3)


def _knobs(config: type[LossConfig]) -> dict[str, FieldInfo]:
    """Return the fields of a loss that not every loss has."""
    fields = config.model_fields.items()
    return {key: field for key, field in fields if key not in LossConfig.model_fields}


def _tables_below(
    model: type[BaseModel], prefix: str, skip: Sequence[str] | dict[str, Any] = ()
) -> Iterator[Table]:
    """Yield the tables within a table, at every depth. ``[loss]`` has its own sections."""
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        for child in models_in(field.annotation):
            table = f"{prefix}.{name}" if prefix else name
            if get_origin(field.annotation) is dict:
                table += ".NAME"
            if issubclass(child, LossConfig) or table in REFUSED:
                continue
            yield table, child
            yield from _tables_below(child, table)


def _own_fields(
    model: type[BaseModel], tables: Sequence[Table]
) -> tuple[dict[str, FieldInfo], str]:
    """Return the fields that no other table's model defines, and a sentence about the others."""
    for name, other in tables:
        if other is not model and issubclass(model, other):
            own = {k: f for k, f in model.model_fields.items() if k not in other.model_fields}
            end = ", and:" if own else "."
            return own, f"{_first_line(model)} It has the keys of `[{name}]`{end}"
    return dict(model.model_fields), _first_line(model)


def _section(
    title: str,
    model: type[BaseModel],
    fields: dict[str, FieldInfo],
    summary: str | None = None,
    level: int = 2,
) -> str:
    rows = [
        _row(model, name)
        for name, field in fields.items()
        if not _is_table(field) and name != "type"
    ]
    text = f"{'#' * level} {title}\n\n{_markdown(summary or _first_line(model))}"
    if rows:
        head = ["| key | value | default | meaning |", "|---|---|---|---|"]
        text += "\n\n" + "\n".join(head + rows)
    return text


def _row(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    key = f"`{field.alias or name}`"
    kind = _cell(_type_name(field.annotation) + _bounds(field.metadata))
    default = _cell(_default_of(field))
    meaning, mark = field.description or "", mark_of(model, name)
    if mark is not None:
        meaning += f" Not exported: {mark.why}."
    return f"| {key} | {kind} | {default} | {_cell(_markdown(meaning))} |"


def _is_table(field: FieldInfo) -> bool:
    models = models_in(field.annotation)
    return bool(models) and not issubclass(models[0], LossConfig)


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().partition("\n\n")[0]


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, LossConfig):
        return f'`type = "{value.type}"`'
    if isinstance(value, tuple):
        value = list(value)
    return f"`{json.dumps(value) if not isinstance(value, Path) else value}`"


def _type_name(annotation: Any) -> str:
    """Return an annotation as a recipe's author reads it, for example "integer ≥ 1"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(_type_name(a) for a in arguments)}"
    if origin is dict:
        return "table" if arguments[1] is Any else f"table of name = {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, LossConfig):
        return "table like `[loss]`"
    return TYPE_NAMES[annotation]


BOUNDS = {
    "ge": " ≥ {}",
    "gt": " > {}",
    "le": " ≤ {}",
    "lt": " < {}",
    "multiple_of": " multiple of {}",
    "min_length": " (at least {})",
}
"""How a bound is written, by its name in pydantic."""


def _bounds(metadata: Sequence[Any]) -> str:
    words = [
        form.format(limit)
        for bound in metadata
        for name, form in BOUNDS.items()
        if (limit := getattr(bound, name, None)) is not None
    ]
    return ",".join(words).replace(", (", " (")


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the reference, or a page's table of pairs. Return the exit status."""
    options = page_parser("The reference of every recipe key.").parse_args(arguments)
    path = options.write or options.check
    if path is not None and BEGIN_PAIRS in path.read_text(encoding="utf-8"):
        rows = [f"| {refused} | {instead} |" for refused, instead in PAIRS.items()]
        content = "\n".join(["| refused | instead |", "|---|---|", *rows]) + "\n"
        markers = (BEGIN_PAIRS, END_PAIRS)
    else:
        markers, content = (BEGIN, END), reference()
    return generate("docs.reference", markers, content, options)


if __name__ == "__main__":
    sys.exit(main())
