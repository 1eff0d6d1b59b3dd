"""The marks of all keys that a recipe may set."""

from typing import get_origin

from pydantic import BaseModel

from prime_composer.problems.config import DataConfig
from prime_composer.recipe.carried import Mark, mark_of, models_in


def marks(table: type[BaseModel], kind: str = "") -> dict[str, Mark]:
    """Return the mark of every key that a recipe may set, also "teacher.url" of [teachers.NAME]."""
    found: dict[str, Mark] = {}
    for name, field in table.model_fields.items():
        mark = mark_of(table, name)
        if mark is not None:
            found[f"{kind}{name}"] = mark
            continue
        of_tables = get_origin(field.annotation) is dict
        for child in models_in(field.annotation):
            of_one = "data" if child is DataConfig else name.removesuffix("s")
            found |= marks(child, f"{of_one if of_tables else kind + name}.")
    return found
