"""Define ``[environments.NAME]`` with an ``id``: an environment of the verifiers library.

Its package is imported neither here nor by an export, only by the engine that runs it.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    field_validator,
)

from prime_composer.problems.config import DataConfig, TeacherWeights, Used
from prime_composer.recipe.urls import without_passwords
from prime_composer.tables import Table

MOST_TURNS = 1_000_000  # Upper bound of turns

OpenTable = Annotated[dict[str, Any], PlainSerializer(without_passwords)]
"""A table whose keys belong to somebody else. It is shown and saved without passwords."""


class EnvironmentConfig(Used, Table):
    """An environment of verifiers, by its id, which has its own tasks, tools, turns and rewards."""

    id: str
    """The environment's id in verifiers (API v1) and prime-rl: ``name``, ``owner/name`` or
    ``owner/name@version``."""

    args: OpenTable = Field(default_factory=dict)
    """Its own settings, of several environments also the system prompt."""

    use: Literal["both", "train", "eval"] = "both"
    """Whether its tasks are trained on, evaluated, or both. For other tasks of evaluation add a
    second environment with ``eval`` and its ``args``."""

    max_turns: int | None = Field(default=None, ge=1, le=MOST_TURNS)
    """Most turns of the student per rollout. Unset: the environment's own limit."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds that a rollout may take. Unset: the engine's own limit."""

    ratio: float = Field(default=1.0, gt=0.0)
    """Share of the prompts, relative to the other ``[environments]``."""

    teacher: TeacherWeights = None
    """With ``[teachers]``: the one that scores its rollouts, or a table ``name = weight``, a
    mixture of several. Unset: all of them, by their own weights."""

    prime_rl: OpenTable = Field(default_factory=dict)
    """prime-rl's own settings of this environment, merged into the export; a table named after a
    version, such as ``head``, for that version alone."""

    @field_validator("id")
    @classmethod
    def _check_id(cls, environment_id: str) -> str:
        if re.fullmatch(r"([\w.-]+/)?[\w.-]+(@[\w.+!-]+)?", environment_id, re.ASCII) is None:
            raise ValueError(
                f"{environment_id[:80]!r} is no environment's id; write name, owner/name or "
                "owner/name@version"
            )
        return environment_id


def environment_kind(table: dict[str, Any]) -> type[DataConfig] | type[EnvironmentConfig]:
    """Return the model of an ``[environments.NAME]`` table: ``id`` tells them apart."""
    by_id = EnvironmentConfig.model_fields.keys() - DataConfig.model_fields.keys()
    return EnvironmentConfig if by_id & table.keys() else DataConfig


def _parse_environment(table: Any) -> Any:
    return environment_kind(table).model_validate(table) if isinstance(table, dict) else table


AnyEnvironment = Annotated[DataConfig | EnvironmentConfig, BeforeValidator(_parse_environment)]
"""An ``[environments.NAME]`` table of either kind."""
