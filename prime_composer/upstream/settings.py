"""Settings of the whole-run adapter: what all processes of one prime-rl run share.

They are passed in the environment variable ``PRIME_COMPOSER``, which has these forms:

    unset, "", "0", "false", "no", "off"    the adapter is off
    "1"                                     on; prime-rl's launcher adds the loss of its config
    @FILE                                   on, with such an object as follows in FILE.json, or with
                                            the loss of prime-rl's own config, FILE.toml or JSON.
                                            No shell, template or TOML changes this form
    {"loss": {...}, ...}                    on, with [trainer.loss.kwargs] itself, and maybe further
                                            fields of ``AdapterSettings``

prime-rl's launcher passes all of them on to its children. A process that is started by hand derives
from the loss what the object lacks.

Losses, and torch with them, are imported only to check a loss table, and this folder's rules with
them.
"""

import functools
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from prime_composer.removed import REMOVED
from prime_composer.tables import Table, nearest, reason_of
from prime_composer.upstream.keys import IMPORT_PATH, PROMPTS_KEY, SECTION, SWITCH, TOKENIZERS_KEY
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR

OFF = ("", "0", "false", "no", "off")
"""Values of that variable that turn it off, in any case. ``prime_composer.pth`` has them too."""

EXAMPLE = f"""{SWITCH}='{{"loss": {{"type": "topk_reverse_kl", "k": 32}}}}'"""

SET_SWITCH = (
    f"Set {SWITCH} for every process of the run, and check that prime-composer is installed in the "
    "orchestrator's environment."
)
"""Remedy for an orchestrator without the adapter."""

FILE_KEY = "adapter"
"""Key of a loss table; ``adapter = true`` sets ``AdapterSettings.teachers_mixed``."""

LETTERS_SHOWN = 2000
"""Length of the longest message about the variable's value."""

TEACHER_KEYS = ("asked_by", "head_on")
"""Keys of a teacher's table in a recipe, and settings of the same names."""

IN_LOSS_TABLE = (*TEACHER_KEYS, TOKENIZERS_KEY, PROMPTS_KEY)
"""Further keys of a loss table, which prime-rl has no table for: settings of the same names."""


class Teacher(Table):
    """One teacher, or one of a mixture."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(repr=False)
    """Base URL of its server."""

    model: str
    """The name under which the server has it."""

    weight: PositiveFloat
    """Its weight in the mixture, relative to the others'."""

    api_key_var: str = API_KEY_VAR
    """Environment variable with the server's API key."""


class AdapterSettings(Table):
    """Settings of one run."""

    loss: dict[str, Any] | None = None
    """Loss table: ``type`` and knobs. None: this run has prime-rl's own losses."""

    k: NonNegativeInt | None = None
    """Size of the teacher's support on the wire, 0 for none. None: nobody has named a loss yet."""

    teachers_mixed: bool = False
    """The adapter mixes or routes this run's teachers, so the orchestrator cannot do without it."""

    reads_rewards: bool = False
    """Whether the loss reads the rewards of rollouts that a teacher scores. A process derives it
    from the loss."""

    asked_by: Literal["orchestrator", "trainer"] | None = None
    """Who asks the teachers. None: the trainer where the loss reads hidden states, otherwise the
    orchestrator."""

    head_on: Literal["device", "cpu"] | None = None
    """Where the trainer keeps the teachers' output heads. None: on its device. On the CPU they are
    copied to the device chunk by chunk, at each pass of each sequence."""

    teachers: list[dict[str, Any]] | dict[str, list[dict[str, Any]]] | None = Field(
        default=None, repr=False
    )
    """Teachers that the trainer asks, for all environments or by environment: tables of ``url``,
    ``model``, ``weight``, and maybe ``api_key_var``. The launcher reads them in the orchestrator's
    config."""

    teacher_tokenizers: dict[str, str] | None = None
    """Teachers with tokenizers of their own: the name that a teacher is served by -> directory or
    hub id of its tokenizer. All others have the student's."""

    teacher_prompts: dict[str, dict[str, Any]] | None = None
    """Teachers that read prompts of their own: the name that a teacher is served by ->
    ``tokenizer``, the directory or hub id of its tokenizer, and the keys of a recipe's
    ``[teacher.prompt]``. Such a teacher is asked turn by turn."""

    student_tokenizer: str | None = None
    """Directory or hub id of the student's tokenizer, which each teacher's server is compared with.
    The launcher reads it in the trainer's config."""

    seq_len: int | None = None
    """Longest sequence in tokens, which a teacher's server has to take. The launcher reads it in
    the trainer's config."""

    @field_validator("teachers")
    @classmethod
    def _are_teachers(cls, teachers: Any) -> Any:
        for entries in teachers.values() if isinstance(teachers, dict) else [teachers]:
            for entry in entries or []:
                Teacher.model_validate(entry)
            if entries is not None and not entries:
                raise ValueError("name at least one: {url, model, weight}")
        return teachers

    @field_validator("teacher_prompts")
    @classmethod
    def _are_prompts(cls, prompts: Any) -> Any:
        from prime_composer.recipe.teacher import TeacherPromptConfig

        for name, table in (prompts or {}).items():
            if not isinstance(table.get("tokenizer"), str):
                raise ValueError(f"{name}: name the teacher's directory or hub id in tokenizer")
            own = {key: value for key, value in table.items() if key != "tokenizer"}
            TeacherPromptConfig.model_validate(own)
        return prompts

    @model_validator(mode="before")
    @classmethod
    def _are_split(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or not isinstance(settings.get("loss"), dict):
            return settings
        table, own = split_table(settings["loss"])
        return {**settings, "loss": table, **own}

    @classmethod
    def from_env(cls) -> "AdapterSettings | None":
        """Return the settings of this process, None where the adapter is off.

        A value of the environment variable is parsed once per process.
        """
        return parse_switch(os.environ.get(SWITCH, ""))

    def to_env(self) -> dict[str, str]:
        """Return the environment variable that passes these settings on."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return {SWITCH: json.dumps(values) if values else "1"}

    def derived(self, loss: Any, section: str = SECTION, **run: Any) -> "AdapterSettings":
        """Return the settings with K, whether rewards count, and who asks, as the loss has it.

        What does not go together is refused. ``run`` has further fields of
        ``refusals.LaunchedRun``: prime-rl's config, where there is one.
        """
        from prime_composer.upstream.refusals import LaunchedRun, refuse

        trainer = "trainer" if loss.reads_hidden_states else None
        settings = self.model_copy(
            update={
                "k": wire_support_size(loss, section),
                "reads_rewards": loss.reads_rewards_and_teacher,
                "asked_by": self.asked_by or trainer,
            }
        )
        refuse(LaunchedRun(loss, settings, section=section, **run))
        return settings

    @property
    def needs_orchestrator(self) -> bool:
        """Whether an orchestrator without the adapter would ask a teacher for something else.

        The trainer sees it by ``wire.MARK``.
        """
        return self.teachers_mixed or bool(self.teacher_tokenizers or self.teacher_prompts)

    @property
    def trainer_asks(self) -> bool:
        """Whether the trainer asks the teachers, and the orchestrator asks none."""
        return self.asked_by == "trainer"

    def support_size(self) -> int:
        """Return K for the orchestrator's requests; 0 where the loss has no support."""
        if self.k is None:
            raise ValueError(
                f"{SWITCH}=1 and no loss is named in this process. prime-rl's launcher `rl` fills "
                f"it in from [{SECTION}] where it has the variable itself: write {SWITCH}=1 in "
                "front of `rl`, and not in [env_vars] alone. Where processes are started one by "
                f"one, give each of them the table: {EXAMPLE}, or {SWITCH}=@FILE"
            )
        return self.k


@functools.lru_cache(maxsize=8)
def parse_switch(value: str) -> AdapterSettings | None:
    """Return the settings that a value of the variable says, None where it is off."""
    value = value.strip()
    if value.lower() in OFF:
        return None
    if value == "1":
        return AdapterSettings()
    try:
        return _read(value)
    except ValueError as error:
        from prime_composer.recipe.loading import abridged

        # The value may have a password, and a text of any length.
        raise ValueError(abridged(str(error), LETTERS_SHOWN)) from None


def of_config(tables: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the settings in prime-rl's config, which names a loss of ours in [trainer.loss]."""
    trainer = tables.get("trainer")
    loss = trainer.get("loss") if isinstance(trainer, dict) else None
    if not isinstance(loss, dict) or not names_ours(loss.get("import_path")):
        raise ValueError(
            f'{place} names no loss of ours: write type = "custom", import_path = "{IMPORT_PATH}" '
            f"into [trainer.loss], and the loss table into [{SECTION}]."
        )
    return {"loss": loss.get("kwargs") or {}}


def names_ours(import_path: Any) -> bool:
    """Return whether an import path is that of our losses; one that misses it is refused."""
    path = str(import_path)
    if path != IMPORT_PATH and (path.startswith("prime_composer") or nearest(path, [IMPORT_PATH])):
        raise ValueError(
            f'[trainer.loss] import_path = "{path}": there is no such loss; did you mean '
            f'"{IMPORT_PATH}"?'
        )
    return path == IMPORT_PATH


def _of_file(path: Path) -> dict[str, Any]:
    """Return the settings that a file has: an object of them, or the loss of prime-rl's config."""
    try:
        text = path.read_text(encoding="utf-8")
        read = tomllib.loads if path.suffix == ".toml" else json.loads
        tables = read(text)
        if not isinstance(tables, dict):
            raise ValueError("it has no tables")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{SWITCH}=@{path}: {error}. Name a TOML or a JSON file.") from None
    is_config = path.suffix == ".toml" or not AdapterSettings.model_fields.keys() & tables.keys()
    return of_config(tables, f"{SWITCH}=@{path}") if is_config else tables


def _object(value: str) -> dict[str, Any]:
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or too deep
        given = None
    if not isinstance(given, dict):
        # Of a URL in damaged text nobody knows where its password ends.
        shown = "... (not shown: it may have a password)" if "@" in value else repr(value)
        raise ValueError(
            f"{SWITCH}={shown}: write {SWITCH}=1, {SWITCH}=@FILE, or a JSON object such as "
            f"{EXAMPLE}"
        )
    return given


def _read(value: str) -> AdapterSettings:
    given = _of_file(Path(value[1:])) if value.startswith("@") else _object(value)
    known = AdapterSettings.model_fields
    for key in given:
        if instead := REMOVED.get(f"{SWITCH}.{key}"):
            raise ValueError(f"{SWITCH}: {key} was removed: {instead}")
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}."
            raise ValueError(f"{SWITCH}: unknown key {key!r}; {hint} Example: {EXAMPLE}")
    try:
        settings = AdapterSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{SWITCH}: {key}: {reason_of(first)}. Example: {EXAMPLE}") from None
    if settings.k is not None or settings.loss is None:
        return settings
    return settings.derived(parse_loss_table(settings.loss))


def split_table(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split [trainer.loss.kwargs] into the loss's own table and settings of the adapter.

    prime-rl's command line makes strings of values, so "true" counts as true.
    """
    known = (FILE_KEY, *IN_LOSS_TABLE)
    loss = {key: value for key, value in table.items() if key not in known}
    settings = {key: table[key] for key in IN_LOSS_TABLE if key in table}
    if str(table.get(FILE_KEY, False)).lower() == "true":
        settings["teachers_mixed"] = True
    return loss, settings


def parse_loss_table(table: Mapping[str, Any], section: str = SECTION) -> Any:
    """Return the ``LossConfig`` of a loss table, which comes without the file key ``adapter``.

    Strings are read as numbers where a number is expected: prime-rl's command line
    (``--trainer.loss.kwargs.k 32``) passes strings.

    An error names the nearest key or the choices, and the table as ``section``.
    """
    from prime_composer.losses import parse_loss

    if table.get("type") is None:
        from prime_composer.losses import LOSS_TYPES

        raise ValueError(
            f"[{section}] has no `type`. The losses are: {', '.join(sorted(LOSS_TYPES))}"
        )
    try:
        return parse_loss(dict(table))
    except ValidationError as error:
        lines = [_explain(item, table, section) for item in error.errors()]
        raise ValueError("; ".join(lines)) from None
    except ValueError as error:
        raise ValueError(f"[{section}] {error}") from None


def _explain(item: Any, table: Mapping[str, Any], section: str) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] != "extra_forbidden":
        return f"[{section}] {key}: {reason_of(item)}"
    from prime_composer.losses import loss_type
    from prime_composer.recipe.loading import fields_at

    known = fields_at(item["loc"][:-1], loss_type(str(table["type"])), table)
    near = nearest(path[-1], known)
    hint = f"did you mean {near!r}?" if near else f"it takes: {', '.join(known)}"
    return f"[{section}] has the unknown key {key!r}; {hint}"


def wire_support_size(config: Any, section: str = SECTION) -> int:
    """Return K of a ``LossConfig`` inside prime-rl, 0 where the loss has no support.

    A support of the student's choice, or of the whole vocabulary, is refused.
    """
    size = config.support_size
    if size == "full":
        raise ValueError(
            f"[{section}] type = {config.type!r} compares ids that no server can be asked for: the "
            f"student's own top {config.support.k}, which prime-rl knows only after the teacher "
            'was asked. Set k = "full", which compares all ids, or chosen_by = "teacher".'
        )
    assert isinstance(size, int)
    return size
