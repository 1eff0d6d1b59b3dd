"""prime-rl's launcher: resolve the settings once, and pass them to every process of the run."""

import functools
import json
import os
import sys
from typing import Any

from prime_composer.upstream.settings import (
    IMPORT_PATH,
    SECTION,
    SWITCH,
    WITHOUT_MESSAGES,
    AdapterSettings,
    parse_loss_table,
    split_table,
)
from prime_composer.upstream.teachers import configured
from prime_composer.upstream.versions.capabilities import RL_LOSS
from prime_composer.upstream.versions.doctor import fits, require


def hook_config(module: Any) -> None:
    """Let ``prime_rl.utils.config.cli`` resolve the settings of the config that it returns.

    It is a re-export of pydantic_config's (38494ccb and 559b4477). Every entry point copies it by
    name later.
    TODO(prime-rl): remove once the orchestrator's config has room for K.
    """
    cli = module.cli

    @functools.wraps(cli)
    def resolved(*args: Any, **kwargs: Any) -> Any:
        config = cli(*args, **kwargs)
        resolve(config)
        return config

    module.cli = resolved


def resolve(config: Any) -> None:
    """Read the loss of a launcher's config, check it, and pass the settings on to all children.

    A run with a wrong loss table therefore ends before any process is started. The config of
    another process, which has no trainer, is left alone: an env server never imports torch.

    Raises:
        UnknownSurface: the installed prime-rl does not fit the run.
        ValueError: the loss table is wrong, [trainer.loss] and PRIME_COMPOSER disagree, the loss is
            in the wrong one of them, it needs a support on the wire and router replay is on, it
            compares whole vocabularies and the output head is kept on the CPU, or the trainer
            cannot ask the run's teachers. Or a kind of scores is named that no loss reads.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:
        return
    require("adapter")
    given = AdapterSettings.from_env() or AdapterSettings()
    loss = getattr(trainer, "loss", None)
    in_file = getattr(loss, "import_path", None) == IMPORT_PATH
    settings = _with_file(given, loss.kwargs) if loss is not None and in_file else given
    if settings.loss is None:
        if settings.scores is not None:
            raise ValueError(
                f"{SWITCH}: scores = {settings.scores!r}, and no loss is named that would read "
                f"them: name one in [{SECTION}], or leave scores out."
            )
        print(
            f"prime_composer: {SWITCH} is on and names no loss, nor does [trainer.loss]: this run "
            "has prime-rl's own losses",
            file=sys.stderr,
            flush=True,
        )
        os.environ.update(AdapterSettings(k=0).to_env())
        return
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
    if settings.teacher_tokenizers:
        settings = _with_student(settings, trainer.model.name)
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


def _with_file(settings: AdapterSettings, kwargs: dict[str, Any]) -> AdapterSettings:
    table, in_file = split_table(kwargs)
    if settings.loss is not None and parse_loss_table(settings.loss) != parse_loss_table(table):
        raise ValueError(
            f"{SWITCH} holds the loss {settings.loss} and [{SECTION}] {table}: keep one of them."
        )
    given = settings.model_dump(exclude_none=True, exclude={"loss", "k"})
    mixed = {"teachers_mixed": settings.teachers_mixed or "teachers_mixed" in in_file}
    return AdapterSettings.model_validate({**given, **in_file, **mixed, "loss": table})


def _with_student(settings: AdapterSettings, model: str) -> AdapterSettings:
    """Return the settings with the student's tokenizer, for teachers that have others.

    Raises:
        ValueError: this prime-rl hands no messages to what scores.
    """
    if not fits(RL_LOSS):  # v0.6, which has one loss for all tokens
        raise ValueError(WITHOUT_MESSAGES)
    return settings.model_copy(update={"student_tokenizer": settings.student_tokenizer or model})


def _check_rewards(config: Any, settings: AdapterSettings, name: str, in_file: bool) -> None:
    """Check that a loss of rewards and teachers is where prime-rl will find it.

    Where rl tokens have a loss of their own, a loss of both is called on them, so that
    [trainer.loss] has to name it.
    """
    separates_kinds = fits(RL_LOSS)
    if settings.rewards and separates_kinds:
        require("rl")
    if settings.rewards == "in_loss" and separates_kinds and not in_file:
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
    if settings.rewards == "beside" and (in_file or not separates_kinds):
        raise ValueError(
            f'{SWITCH}: rewards = "beside" leaves [trainer.loss] to prime-rl\'s own rl loss, from '
            f"v0.7 on, and this run {'names ours there' if in_file else 'has one loss for all'}. "
            "For one loss of rewards and a teacher use compose, or rl_mix of any loss."
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
    ``fsdp_cpu_offload`` (38494ccb and 559b4477 trainer/model.py, ``setup_fsdp``) and
    ``full_offload`` (559b4477 trainer/optim/offload.py). Offloading of optimizer states or of
    activations leaves it where it is.

    Raises:
        ValueError: it does not; the message names the key.
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
    """Return the loss table with its special tokens as ids.

    The launcher has the model's tokenizer, the trainer's loss has not.
    """
    if '"strings"' not in json.dumps(table):  # at any depth: channels have modifiers of their own
        return table
    from transformers import AutoTokenizer

    from prime_composer.losses.shared.modifiers import resolve as with_ids

    resolved = with_ids(loss_config, AutoTokenizer.from_pretrained(model))
    return {"type": resolved.type, **resolved.model_dump(mode="json", exclude_unset=True)}
