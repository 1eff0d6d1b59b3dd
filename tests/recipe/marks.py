"""The marks of all keys that a recipe may set."""

from typing import Literal, get_origin

from pydantic import BaseModel

from prime_composer.problems.config import DataConfig
from prime_composer.recipe.carried import Mark, mark_of, models_in

ONLY_REFUSED = {
    "rollout.other_source",
    "teacher.policy.ema_rate", "teacher.policy.sync_every",
    "reference", "diloco",
}  # fmt: skip
"""Keys that nothing but a setting reads which the export refuses."""

WHOLE = {"loss", "prepare", "quantize", "reference", "diloco"}
"""Tables that an export takes or refuses as one."""


def marks(table: type[BaseModel], kind: str = "") -> dict[str, Mark | None]:
    """Return the mark of every key that a recipe may set, also "teacher.url" of [teachers.NAME]."""
    found: dict[str, Mark | None] = {}
    for name, field in table.model_fields.items():
        children = models_in(field.annotation)
        if name in WHOLE or not children:
            found[f"{kind}{name}"] = mark_of(table, name)
            continue
        of_tables = get_origin(field.annotation) is dict
        for child in children:
            of_one = "data" if child is DataConfig else name.removesuffix("s")
            found |= marks(child, f"{of_one if of_tables else kind + name}.")
    return found


def export_of(key: str, mark: Mark | None) -> Literal["carried", "not carried", "only refused"]:
    """Return what an export does with a key."""
    if mark is not None:
        return "not carried"
    return "only refused" if key in ONLY_REFUSED else "carried"
