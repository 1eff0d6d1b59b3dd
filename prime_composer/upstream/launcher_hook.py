"""prime-rl's launcher: resolve the settings once, and pass them to every process of the run."""

import functools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from prime_composer.upstream import launches
from prime_composer.upstream.keys import IMPORT_PATH, SECTION, SWITCH
from prime_composer.upstream.settings import (
    AdapterSettings,
    names_ours,
    parse_loss_table,
    parse_switch,
)
from prime_composer.upstream.teachers import configured
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.capabilities import UnknownSurface
from prime_composer.upstream.versions.doctor import refuse_old, require_road
from prime_composer.upstream.versions.toml_shapes import at

ENV_VARS = ("env_vars", "orchestrator.env_vars", "trainer.env_vars")  # Override the launcher's

MISSING = "prime_composer is not installed here: prime-rl would train its own loss"
CODE = f"import sys; {launches.HOOKED} or sys.exit('{MISSING}')"
GUARD = f'uv run --no-sync python -c "{CODE}" || exit 1'  # Ends a job without our hooks

RESOLVED: list[Any] = []  # The config of this launcher, once its settings are resolved


def hook_config(module: Any) -> None:
    """Let ``prime_rl.utils.config.cli`` resolve the settings of the config that it returns.

    It is a re-export of pydantic_config's (38494ccb and 559b4477). Every entry point copies it by
    name later, so that each process of an old version ends here, whatever trains there without our
    hooks. An error is one line; ``PYTHONDEVMODE=1`` keeps the traceback.
    TODO(prime-rl): remove once the orchestrator's config has room for K.
    """
    cli = module.cli

    @functools.wraps(cli)
    def resolved(*args: Any, **kwargs: Any) -> Any:
        in_one_line(refuse_old)
        config = cli(*args, **kwargs)
        in_one_line(resolve_settings, config)
        return config

    module.cli = resolved


def in_one_line(function: Any, *args: Any) -> None:
    """Call a function; where it refuses something, end the process with the sentence alone."""
    try:
        function(*args)
    except (ValueError, UnknownSurface) as error:
        from prime_composer.recipe.urls import public_url  # and torch with it

        if sys.flags.dev_mode:
            raise
        raise SystemExit(f"prime_composer: {public_url(str(error))}") from None


def hook_run_dir(module: Any) -> None:
    """Let the launcher begin a launch once its run directory is clean.

    559b4477 utils/pathing.py:196. Each launcher of prime-rl calls it at a start and
    at a resume, a dry run included, before it writes a config or starts a process.
    """

    def begins(clean: Any) -> Any:
        @functools.wraps(clean)
        def cleaned(*args: Any, **kwargs: Any) -> Any:
            result = clean(*args, **kwargs)
            given = dict(zip(("output_dir", "resume_step"), args, strict=False)) | kwargs
            if RESOLVED:
                in_one_line(hand_on, RESOLVED.pop(), given["output_dir"], given["resume_step"])
            return result

        return cleaned

    capabilities.replace(capabilities.CLEAN, module, begins)


def hand_on(config: Any, run_dir: Path, resume_step: int) -> None:
    """Hand the settings on in a file of the run directory, which names the launch for all marks.

    A resume from a step that was trained without this package is refused.
    """
    if untold := launches.missing(run_dir, resume_step):
        raise ValueError(" ".join(untold))
    os.environ[SWITCH] = f"@{launches.begin(run_dir, os.environ[SWITCH])}"
    line = f"export {SWITCH}={shlex.quote(os.environ[SWITCH])}"
    slurm = getattr(config, "slurm", None)
    if slurm is not None:
        guard = GUARD if getattr(slurm, "shared_fs", True) else f"srun --ntasks-per-node=1 {GUARD}"
        own = slurm.pre_run_command
        slurm.pre_run_command = "\n".join([*([own] if own else []), line, guard])
    if getattr(config, "dry_run", False):
        print(f"prime_composer: a process that you start by hand needs: {line}", file=sys.stderr)


def resolve_settings(config: Any) -> None:
    """Read the loss of a launcher's config, check it, and pass the settings on to all children.

    A run with a wrong loss table therefore ends before any process is started. The config of
    another process, which has no trainer, is left alone: an env server never imports torch.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return
    require_road("adapter")
    in_file = names_ours(at(trainer, "loss.import_path"))
    settings = _given(config, trainer.loss.kwargs if in_file else None)
    if settings.loss is None:
        raise ValueError(
            f"{SWITCH} is on and names no loss, nor does [trainer.loss], so that this run would "
            f'have prime-rl\'s own losses. Write type = "custom", import_path = "{IMPORT_PATH}" '
            f"into [trainer.loss] and the table into [{SECTION}], or unset {SWITCH}."
        )
    table = settings.loss
    loss = parse_loss_table(table)
    replays = at(config, "orchestrator.train.sampling.top_p") is not None
    settings = settings.derived(loss, config=config, names_loss=in_file, replays=replays)
    if loss.reads_rewards_and_teacher:
        require_road("rl")
    if loss.reads_hidden_states:
        require_road("full")
    update: dict[str, Any] = {"loss": _with_token_ids(table, loss, trainer.model.name)}
    if loss.compares_with_teacher:
        student = at(trainer, "tokenizer.name") or trainer.model.name
        update["student_tokenizer"] = settings.student_tokenizer or student
        update["seq_len"] = settings.seq_len or at(trainer, "model.seq_len")
    if settings.trainer_asks and settings.teachers is None:
        update["teachers"] = configured(config.orchestrator)
    if in_file:
        trainer.loss.kwargs.update(update["loss"])
    os.environ.update(settings.model_copy(update=update).to_env())
    RESOLVED[:] = [config]


def _given(config: Any, kwargs: dict[str, Any] | None) -> AdapterSettings:
    """Return what this process's variable, prime-rl's own [env_vars] and [trainer.loss] say.

    [env_vars] would override what the launcher resolves, so the variable is taken out of them.
    """
    said = {SWITCH: AdapterSettings.from_env()}
    for path in ENV_VARS:
        table = at(config, path) or {}
        if SWITCH in table:
            said[f"[{path}] {SWITCH}"] = parse_switch(table.pop(SWITCH))
    named = [each for each in said.values() if each != AdapterSettings()] or [AdapterSettings()]
    first = named[0]
    if first is None or any(each != first for each in named):
        raise ValueError(f"{' and '.join(said)} say different things: keep one of them.")
    if kwargs is None:
        return first
    given = first.model_dump(exclude_none=True, exclude={"loss", "k"})
    settings = AdapterSettings.model_validate({**given, "loss": kwargs})
    if first.loss and parse_loss_table(first.loss) != parse_loss_table(settings.loss or {}):
        raise ValueError(
            f"{SWITCH} holds the loss {first.loss} and [{SECTION}] {settings.loss}: keep one of "
            "them."
        )
    return settings


def _with_token_ids(table: dict[str, Any], loss_config: Any, model: str) -> dict[str, Any]:
    """Return the loss table with its tokens' texts as ids: the trainer's loss has no tokenizer."""
    text = json.dumps(table)  # at any depth: channels have modifiers of their own
    if '"strings"' not in text and '"texts"' not in text:
        return table
    from transformers import AutoTokenizer

    from prime_composer.losses.shared.modifiers import with_token_ids

    resolved = with_token_ids(loss_config, AutoTokenizer.from_pretrained(model))
    return {"type": resolved.type, **resolved.model_dump(mode="json", exclude_unset=True)}
