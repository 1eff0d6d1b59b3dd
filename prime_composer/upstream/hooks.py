"""What runs when prime-rl has loaded one of the modules of ``autoload.HOOKS``. One function per process role; torch is imported
where it is needed."""

import json
import os
import sys
from types import ModuleType
from typing import Any

from prime_composer.upstream.switch import EXAMPLE, SECTION, SWITCH, needs_adapter, switch

IMPORT_PATH = "prime_composer.upstream.loss_fn"


def launcher(module: ModuleType) -> None:
    """Lift the loss table out of the resolved config into the environment, where the orchestrator finds K.

    Rebinds ``prime_rl.utils.config.cli`` (38494ccb and 559b4477: a re-export of pydantic_config's), which every entry
    point copies by name after this. To go when the orchestrator's config has room for K.
    """
    cli = module.cli

    def lifted(*args: Any, **kwargs: Any) -> Any:
        config = cli(*args, **kwargs)
        lift(config)
        return config

    module.cli = lifted


def lift(config: Any) -> None:
    """Copy ``[trainer.loss.kwargs]`` into PRIME_COMPOSER if it names our loss; check it, so that a run with a wrong
    table ends before anything is started.

    Raises:
        ValueError: the loss table is wrong; it asks for a support and router replay is on; two tables disagree.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None:  # not the launcher's: no torch for an env server
        return
    from prime_composer.upstream.registration import distils, parse_loss

    loss = getattr(trainer, "loss", None)
    settings = switch() or {}
    table = settings.get("loss")
    if getattr(loss, "import_path", None) == IMPORT_PATH:
        in_file = dict(loss.kwargs)
        if table is not None and parse_loss(table) != parse_loss(in_file):
            raise ValueError(
                f"{SWITCH} holds the loss {table} and [{SECTION}] {in_file}: keep one of them."
            )
        table = in_file
    elif table is not None and not distils(parse_loss(table)):
        raise ValueError(
            f'{SWITCH} names {table["type"]!r}, a loss of rl tokens; those go where [trainer.loss] says: set type = "custom", '
            f'import_path = "{IMPORT_PATH}", and the table in [{SECTION}].'
        )
    if table is None:  # on, and nothing to do
        line = f"prime_composer: {SWITCH} is on and names no loss, nor does [trainer.loss]: this run has prime-rl's own losses"
        print(line, file=sys.stderr, flush=True)
        os.environ[SWITCH] = json.dumps({**settings, "loss": None})
        return
    k = support_size(table)
    replays = {
        "trainer.enable_router_replay": getattr(trainer, "enable_router_replay", False),
        "inference.enable_return_routed_experts": getattr(
            getattr(config, "inference", None), "enable_return_routed_experts", False
        ),
    }
    if k and any(replays.values()):
        raise ValueError(
            f"[{SECTION}] type = {table['type']!r} needs the teacher's top-{k} support, which travels where router replay "
            f"would: set {' and '.join(key for key, on in replays.items() if on)} = false, or use a loss without a support."
        )
    table = with_ids(table, trainer.model.name)
    if getattr(loss, "import_path", None) == IMPORT_PATH:
        loss.kwargs.clear()
        loss.kwargs.update(table)
    os.environ[SWITCH] = json.dumps({**settings, "loss": table})


def with_ids(table: dict[str, Any], model: str) -> dict[str, Any]:
    """The loss table with its special tokens as ids: the launcher knows the tokenizer, the trainer's loss does not."""
    from prime_composer.upstream.registration import parse_loss

    config = parse_loss(table)
    if '"strings"' not in json.dumps(table):
        return table
    from transformers import AutoTokenizer

    from prime_composer.losses.shared.modifiers import resolve

    resolved = resolve(config, AutoTokenizer.from_pretrained(model))
    beside = {key: table[key] for key in ("adapter",) if key in table}
    return {"type": resolved.type, **resolved.model_dump(mode="json", exclude_unset=True), **beside}


def support_size(table: dict[str, Any]) -> int:
    """K of a loss table; 0 without a support.

    Raises:
        ValueError: the table is wrong, or it wants the full vocabulary.
    """
    from prime_composer.upstream.registration import parse_loss

    size = parse_loss(table).support_size
    if size == "full":
        raise ValueError(
            f"[{SECTION}] type = {table['type']!r} asks for the full vocabulary; prime-rl's wire carries a top-K "
            "support: give it a number k."
        )
    return size


def wanted_support() -> int:
    """K for the orchestrator.

    Raises:
        ValueError: the switch is on and names no loss: this process was not started by prime-rl's `rl`.
    """
    settings = switch() or {}
    if "loss" not in settings:
        raise ValueError(
            f"{SWITCH}=1 and no loss is named in this process. prime-rl's launcher `rl` fills it in from "
            f"[{SECTION}]; where processes are started one by one, give each of them the table: "
            f"{EXAMPLE}"
        )
    return 0 if settings["loss"] is None else support_size(settings["loss"])


def wants_mark() -> bool:
    """Whether the trainer expects to see that the orchestrator runs with the adapter."""
    table = (switch() or {}).get("loss")
    return table is not None and needs_adapter(table)


def trainer_loss(module: ModuleType) -> None:
    from prime_composer.upstream import trainer
    from prime_composer.upstream.registration import register

    trainer.hook_loss(module)
    table = (switch() or {}).get("loss")
    if table is not None:
        register(table)


def trainer_data(module: ModuleType) -> None:
    from prime_composer.upstream import journal, trainer

    trainer.hook_data(module)
    journal.hook_data(module)


def trainer_offload(module: ModuleType) -> None:
    from prime_composer.upstream.registration import hook_offload

    hook_offload(module)


def trainer_head(module: ModuleType) -> None:
    from prime_composer.upstream import trainer

    trainer.hook_head(module)


def trainer_cp(module: ModuleType) -> None:
    from prime_composer.upstream import trainer

    trainer.hook_cp(module)


def orchestrator_v0_6(module: ModuleType) -> None:
    from prime_composer.upstream import orchestrator

    if hasattr(module, "compute_teacher_logprobs"):
        orchestrator.hook_v0_6(module)


def orchestrator_client(module: ModuleType) -> None:
    from prime_composer.upstream import orchestrator

    if hasattr(module, "prefill_logprobs"):
        orchestrator.hook_client(module)


def orchestrator_algorithm(module: ModuleType) -> None:
    from prime_composer.upstream import orchestrator

    orchestrator.hook_algorithm(module)


def orchestrator_samples(module: ModuleType) -> None:
    from prime_composer.upstream import orchestrator

    if hasattr(module, "trace_to_samples"):
        orchestrator.hook_samples(module)


def orchestrator_routing(module: ModuleType) -> None:
    from prime_composer.upstream import orchestrator

    if hasattr(module, "assign_reference_logprobs"):
        orchestrator.hook_routing(module)
