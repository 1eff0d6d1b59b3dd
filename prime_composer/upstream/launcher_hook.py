"""prime-rl's launcher: resolve the settings once, and pass them to every process of the run."""

import functools
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from prime_composer.extras import requirement
from prime_composer.upstream import launches
from prime_composer.upstream.settings import (
    IMPORT_PATH,
    SECTION,
    SWITCH,
    AdapterSettings,
    names_ours,
    parse_loss_table,
    parse_switch,
    split_table,
)
from prime_composer.upstream.teachers import configured
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.capabilities import UnknownSurface
from prime_composer.upstream.versions.doctor import refuse_old, require

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
        in_one_line(resolve, config)
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
                in_one_line(begin, RESOLVED.pop(), given["output_dir"], given["resume_step"])
            return result

        return cleaned

    capabilities.replace(capabilities.CLEAN, module, begins)


def begin(config: Any, run_dir: Path, resume_step: int) -> None:
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


def resolve(config: Any) -> None:
    """Read the loss of a launcher's config, check it, and pass the settings on to all children.

    A run with a wrong loss table therefore ends before any process is started. The config of
    another process, which has no trainer, is left alone: an env server never imports torch.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return
    require("adapter")
    given = _given(config)
    loss = getattr(trainer, "loss", None)
    in_file = loss is not None and names_ours(getattr(loss, "import_path", None))
    settings = _with_file(given, loss.kwargs) if loss is not None and in_file else given
    if settings.loss is None:
        raise ValueError(
            f"{SWITCH} is on and names no loss, nor does [trainer.loss], so that this run would "
            f'have prime-rl\'s own losses. Write type = "custom", import_path = "{IMPORT_PATH}" '
            f"into [trainer.loss] and the table into [{SECTION}], or unset {SWITCH}."
        )
    _refuse_uv_sync(getattr(config, "slurm", None))
    loss_table = settings.loss
    loss_config = parse_loss_table(loss_table)
    if not in_file and not loss_config.compares_with_teacher:
        raise ValueError(
            f"{SWITCH} names {loss_config.type!r}, a loss of rl tokens. Those are set in "
            f'[trainer.loss]: write type = "custom", import_path = "{IMPORT_PATH}", and the table '
            f"in [{SECTION}]."
        )
    settings = settings.derived(loss_config)
    _check_rewards(config, settings, loss_config.type, in_file)
    if loss_config.compares_with_teacher:
        settings = _with_student(settings, trainer)
    if settings.trainer_asks and settings.teachers is None:
        settings = settings.model_copy(update={"teachers": configured(config.orchestrator)})
    if loss_config.reads_hidden_states:
        require("full")
        _refuse_offloading(trainer.model, loss_config.type)
    if settings.k and not settings.trainer_asks:
        _refuse_router_replay(config, loss_config.type, settings.k)
    if settings.k or loss_config.reads_hidden_states:
        _refuse_sampling_replay(config, loss_config.type)
    table = _with_token_ids(loss_table, loss_config, trainer.model.name)
    if loss is not None and in_file:
        loss.kwargs.update(table)
    os.environ.update(settings.model_copy(update={"loss": table}).to_env())
    RESOLVED[:] = [config]


def _given(config: Any) -> AdapterSettings:
    """Return what this process's variable says, and prime-rl's own [env_vars].

    Those would override what the launcher resolves, so it is taken out of them.
    """
    said = {SWITCH: AdapterSettings.from_env()}
    for path in ENV_VARS:
        table = _at(config, path) or {}
        if SWITCH in table:
            said[f"[{path}] {SWITCH}"] = parse_switch(table.pop(SWITCH))
    named = {place: each for place, each in said.items() if each != AdapterSettings()}
    settings = [*named.values()] or [AdapterSettings()]
    if any(each != settings[0] for each in settings) or settings[0] is None:
        raise ValueError(f"{' and '.join(said)} say different things: keep one of them.")
    return settings[0]


def _refuse_uv_sync(slurm: Any) -> None:
    """Refuse a job script that removes this package: `uv sync` keeps what prime-rl locks alone."""
    if slurm is None:
        return
    template, lock = Path(slurm.template_path), Path(slurm.project_dir) / "uv.lock"
    lines = (line.partition("#")[0] for line in template.read_text("utf-8").splitlines())
    if all("uv sync" not in line or "--inexact" in line for line in lines):
        return
    if lock.is_file() and 'name = "prime-composer"' in lock.read_text("utf-8"):
        return
    own = slurm.pre_run_command or ""
    everywhere = getattr(slurm, "shared_fs", True)
    if not re.search(r"\b(pip install|uv add)\b", own) or not (everywhere or "srun" in own):
        where = "" if everywhere else "srun --ntasks-per-node=1 "
        raise ValueError(
            f"[slurm] the job script {template.name} runs `uv sync`, which removes this package, "
            "and the job would train prime-rl's own loss. Let it be installed again: "
            f'pre_run_command = "{where}uv pip install {requirement()}"'
        )


def _with_file(settings: AdapterSettings, kwargs: dict[str, Any]) -> AdapterSettings:
    table, in_file = split_table(kwargs)
    if settings.loss is not None and parse_loss_table(settings.loss) != parse_loss_table(table):
        raise ValueError(
            f"{SWITCH} holds the loss {settings.loss} and [{SECTION}] {table}: keep one of them."
        )
    given = settings.model_dump(exclude_none=True, exclude={"loss", "k"})
    mixed = {"teachers_mixed": settings.teachers_mixed or "teachers_mixed" in in_file}
    return AdapterSettings.model_validate({**given, **in_file, **mixed, "loss": table})


def _with_student(settings: AdapterSettings, trainer: Any) -> AdapterSettings:
    """Return the settings with the student's tokenizer and the longest sequence, for teachers."""
    tokenizer = _at(trainer, "tokenizer.name") or trainer.model.name
    student = {
        "student_tokenizer": settings.student_tokenizer or tokenizer,
        "seq_len": settings.seq_len or _at(trainer, "model.seq_len"),
    }
    return settings.model_copy(update=student)


def _check_rewards(config: Any, settings: AdapterSettings, name: str, in_file: bool) -> None:
    """Check that a loss of rewards and teachers is where prime-rl will find it.

    rl tokens have a loss of their own, and a loss of both is called on them, so that [trainer.loss]
    has to name it.
    """
    if settings.rewards:
        require("rl")
    if settings.rewards == "in_loss" and not in_file:
        raise ValueError(
            f"{SWITCH} names {name!r}, which reads rewards and a teacher. prime-rl has both for rl "
            f'tokens alone: write type = "custom", import_path = "{IMPORT_PATH}" into '
            f"[trainer.loss], and the table into [{SECTION}]."
        )
    for path, table in _train_tables(config):
        smallest = _at(table, "min_abs_advantage")
        if settings.rewards == "in_loss" and smallest:
            raise ValueError(
                f"[{SECTION}] type = {name!r} reads rewards and a teacher, and {path}."
                f"min_abs_advantage = {smallest} takes tokens with small advantages out of it, the "
                "teacher's part with them: set it to 0."
            )
    if settings.rewards == "beside" and in_file:
        raise ValueError(
            f'{SWITCH}: rewards = "beside" leaves [trainer.loss] to prime-rl\'s own rl loss, and '
            "this run names ours there. For one loss of rewards and a teacher use compose, or "
            "rl_mix of any loss."
        )


def _at(table: Any, path: str) -> Any:
    """Return a setting at a dotted path, None where this prime-rl has none."""
    for key in path.split("."):
        table = getattr(table, key, None)
    return table


def _refuse_offloading(model: Any, name: str) -> None:
    """Check that the output head's weight stays on the trainer's device.

    A loss of whole vocabularies multiplies with it between prime-rl's forward and backward. Two
    options keep it on the CPU between its uses, and were not run with such a loss:
    ``fsdp_cpu_offload`` (559b4477 trainer/model.py, ``setup_fsdp``) and
    ``full_offload`` (559b4477 trainer/optim/offload.py). Offloading of optimizer states or of
    activations leaves it where it is.
    """
    active = [key for key in ("fsdp_cpu_offload", "full_offload") if _at(model, key)]
    if active:
        raise ValueError(
            f"[{SECTION}] type = {name!r} multiplies with the output head after the forward, and "
            f"trainer.model.{' and '.join(active)} keeps it on the CPU: set "
            "trainer.model.optim_cpu_offload = true in its place, or give the loss a number k."
        )


def _refuse_router_replay(config: Any, name: str, k: int) -> None:
    experts = "enable_return_routed_experts"
    keys = ("trainer.enable_router_replay", f"inference.{experts}", f"inference.vllm.{experts}")
    active = [key for key in keys if _at(config, key)]
    if active:
        raise ValueError(
            f"[{SECTION}] type = {name!r} needs the teacher's top-{k} support, which is sent in "
            f'the field of router replay: set asked_by = "trainer" in [{SECTION}], which sends '
            f"none, or {' and '.join(active)} = false."
        )


def _train_tables(config: Any) -> list[tuple[str, Any]]:
    """Return [orchestrator.train] and each of its sources, by their paths."""
    path = "orchestrator.train"
    sources = enumerate(_at(config, f"{path}.source") or ())
    return [(path, _at(config, path)), *((f"{path}.source[{i}]", source) for i, source in sources)]


def _refuse_sampling_replay(config: Any, name: str) -> None:
    """Check that prime-rl's trainer normalizes its log-probs over the whole vocabulary.

    With typed ``top_p`` and ``top_k`` it takes the ids that sampling kept (``sampling_mask``).
    """
    mask = "enable_return_sampling_mask"
    keys = (f"inference.{mask}", f"inference.vllm.{mask}")
    active = [key for key in keys if _at(config, key)]
    off = {"top_p": (None, 1), "top_k": (None, -1, 0)}
    for path, table in _train_tables(config):
        cuts = [key for key, values in off.items() if _at(table, f"sampling.{key}") not in values]
        active += [f"{path}.sampling.{key}" for key in cuts]
    if active:
        raise ValueError(
            f"[{SECTION}] type = {name!r} compares log-probs over the whole vocabulary, and this "
            f"prime-rl's trainer renormalizes its own over the ids that sampling kept: leave out "
            f"{', '.join(active)}."
        )


def _with_token_ids(table: dict[str, Any], loss_config: Any, model: str) -> dict[str, Any]:
    """Return the loss table with its tokens' texts as ids: the trainer's loss has no tokenizer."""
    text = json.dumps(table)  # at any depth: channels have modifiers of their own
    if '"strings"' not in text and '"texts"' not in text:
        return table
    from transformers import AutoTokenizer

    from prime_composer.losses.shared.modifiers import resolve as with_ids

    resolved = with_ids(loss_config, AutoTokenizer.from_pretrained(model))
    return {"type": resolved.type, **resolved.model_dump(mode="json", exclude_unset=True)}
