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
    model_validator,
)

from prime_composer.problems.config import DataConfig, TeacherWeights, Used
from prime_composer.recipe.carried import CARRIED
from prime_composer.recipe.urls import without_passwords
from prime_composer.tables import Table

MOST_TURNS = 1_000_000  # Upper bound of turns

OpenTable = Annotated[dict[str, Any], PlainSerializer(without_passwords)]
"""A table whose keys belong to somebody else. It is shown and saved without passwords."""


class EnvironmentConfig(Used, Table):
    """An environment of verifiers, by its id, which has its own tasks, tools, turns and rewards."""

    id: str = Field(json_schema_extra=CARRIED)
    """The environment's id as verifiers and prime-rl name it: ``name``, ``owner/name`` or
    ``owner/name@version``. It is a taskset's, of verifiers' API v1."""

    args: OpenTable = Field(default_factory=dict, json_schema_extra=CARRIED)
    """Its own settings: the taskset's keys. Several environments take their system prompt here."""

    use: Literal["both", "train", "eval"] = Field(default="both", json_schema_extra=CARRIED)
    """Whether its tasks are trained on, evaluated, or both. With ``both``, evaluation may have the
    tasks of training. For other ones add a second environment with ``eval`` and its ``args``."""

    max_turns: int | None = Field(default=None, ge=1, le=MOST_TURNS, json_schema_extra=CARRIED)
    """Most turns of the student per rollout. Unset: the environment's own limit."""

    timeout: float | None = Field(default=None, gt=0, json_schema_extra=CARRIED)
    """Seconds that a rollout may take. Unset: the engine's own limit."""

    ratio: float = Field(default=1.0, gt=0.0, json_schema_extra=CARRIED)
    """Share of the prompts, relative to the other ``[environments]``."""

    teacher: TeacherWeights = Field(default=None, json_schema_extra=CARRIED)
    """With ``[teachers]``: the one that scores its rollouts, or a table ``name = weight``, a
    mixture of several. Unset: all of them, by their own weights."""

    prime_rl: OpenTable = Field(default_factory=dict, json_schema_extra=CARRIED)
    """prime-rl's own settings of this environment, merged into its tables of the export. A table
    named after a version, such as ``head``, counts for that version alone. The one-machine engine
    ignores them."""

    @field_validator("id")
    @classmethod
    def _check_id(cls, environment_id: str) -> str:
        if re.fullmatch(r"([\w.-]+/)?[\w.-]+(@[\w.+!-]+)?", environment_id, re.ASCII) is None:
            raise ValueError(
                f"{environment_id[:80]!r} is no environment's id; write name, owner/name or "
                "owner/name@version"
            )
        return environment_id

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "id" in args:
            raise ValueError("`id` is written beside args, not in it")
        return args

    @model_validator(mode="after")
    def _check_use(self) -> "EnvironmentConfig":
        self.check_ratio()
        return self


def environment_kind(table: dict[str, Any]) -> type[DataConfig] | type[EnvironmentConfig]:
    """Return the model of an ``[environments.NAME]`` table: ``id`` tells them apart."""
    by_id = EnvironmentConfig.model_fields.keys() - DataConfig.model_fields.keys()
    return EnvironmentConfig if by_id & table.keys() else DataConfig


def _parse_environment(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    kind = environment_kind(table)
    of_problems = DataConfig.model_fields.keys() - EnvironmentConfig.model_fields.keys()
    foreign = [key for key in table if key in of_problems]
    if kind is EnvironmentConfig and "id" in table and foreign:
        raise ValueError(
            f"{', '.join(foreign)} describe{'s' if len(foreign) == 1 else ''} problems that are "
            "loaded here, and `id` names an environment of verifiers, which has its own tasks, "
            "prompts and rewards: keep one of the two; its settings go into `args`"
        )
    return kind.model_validate(table)


AnyEnvironment = Annotated[DataConfig | EnvironmentConfig, BeforeValidator(_parse_environment)]
"""An ``[environments.NAME]`` table of either kind."""
