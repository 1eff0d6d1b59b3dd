"""Names of prime-rl's versions, and whose arithmetic a loss follows.

prime-rl changed its own losses twice, so a dialect is the first version with an arithmetic.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

_SAME_LOSSES = {"v0.8": "v0.7", "head": "v0.7", "v0.9": "v0.7"}
"""Version -> the dialect that its losses have, where that is not its own name."""


def plain_name(name: str) -> str:
    """Return a version's name as its record has it: ``v0_6``, a bare TOML key, is ``v0.6``."""
    return re.sub(r"^(v\d+)_(\d+)$", r"\1.\2", name)


def dialect_of(value: Any) -> Any:
    """Return the dialect of a version, given its name in either spelling; else the value itself."""
    if not isinstance(value, str):
        return value
    name = plain_name(value)
    return _SAME_LOSSES.get(name, name)


Dialect = Annotated[Literal["v0.6", "v0.7", "main"], BeforeValidator(dialect_of)]
"""A dialect; the name of any version of prime-rl, in either spelling, is read as its own."""

MAX_RATIO = 1e4  # The importance ratio that prime-rl's main trains with at most


def with_defaults_of_main(knobs: Any, **defaults: float) -> Any:
    """Return a loss table with main's own defaults, if ``dialect`` is main; else as it is."""
    if isinstance(knobs, dict) and dialect_of(knobs.get("dialect")) == "main":
        return {**defaults, **knobs}
    return knobs
