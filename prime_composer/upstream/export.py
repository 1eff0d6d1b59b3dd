"""A recipe as a native prime-rl TOML, in the words of one of four dialects.

What the recipe says is written where that version wants it; ``[prime_rl]`` of the recipe, native settings that only
prime-rl knows, is merged on top and wins; its sub-tables named after a dialect (``[prime_rl.head]``) count for that
dialect alone; ``[[prime_rl.teachers]]`` are more teachers to mix in, which travel in the environment. What a version cannot do is an error that names the key, never a silent loss.

    meaning              v0.6                          v0.7                       v0.8                  head
    distillation         training_mode = "opd"         [orchestrator.algo] type = "opd"                 =
    teacher              [orchestrator.teacher.*]      [orchestrator.algo.teacher], base_url a list     a string
    environment          [[orchestrator.train.env]]    =  (taskset, harness)      [[...train.source]]   =
    zero advantages      filter off                    never fires                =                     no filter
    W&B                  [wandb]                       =                          =                     [monitors.wandb]
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_composer.recipe import Recipe, RecipeError
from prime_composer.upstream.environment import NAME, data_settings
from prime_composer.upstream.probe import DIALECTS

IMPORT_PATH = "prime_composer.upstream.loss_fn"


def export_recipe(recipe: Recipe, dialect: str, models: Mapping[str, Any] | None = None) -> str:
    """The recipe as TOML for prime-rl's `rl @ FILE`.

    Args:
        recipe: the recipe.
        dialect: "v0.6", "v0.7", "v0.8" or "head".
        models: directories of the models under ``[student.prepare]`` and ``[teacher.prepare]``, by role.

    Raises:
        RecipeError: the dialect is unknown; the recipe asks for something that this dialect cannot do.
    """
    table = export_tables(recipe, dialect, models)
    keep = {key: value for key, value in recipe.prime_rl.items() if key not in (*DIALECTS, "teachers")}
    merge(table, keep)
    merge(table, recipe.prime_rl.get(dialect, {}))
    head = (
        f"# Written by prime_composer for prime-rl's {dialect} dialect. Start it with the adapter on:\n"
        "#     prime-rl rl --config THIS_FILE --engine prime-rl\n"
        "# which is PRIME_COMPOSER=1 in front of prime-rl's own `rl @ THIS_FILE`.\n"
    )
    if "teachers" in recipe.prime_rl:
        settings = {"loss": loss_table(recipe, dialect), "teachers": plain(recipe.prime_rl["teachers"])}
        head += f"# More teachers are mixed in by the environment: PRIME_COMPOSER='{json.dumps(settings)}'\n"
    return head + to_toml(table)


def export_tables(recipe: Recipe, dialect: str, models: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``export_recipe`` as nested tables, before ``[prime_rl]`` is merged in."""
    if dialect not in DIALECTS:
        raise RecipeError(f"unknown dialect {dialect!r}: choose one of {', '.join(DIALECTS)}")
    refuse(recipe, dialect)
    models = {} if models is None else models
    student = model_name(recipe.student.model, models, "student")
    distils = bool({"ref_logprobs", "support"} & recipe.loss.needs)

    orchestrator: dict[str, Any] = {
        "batch_size": recipe.trainer.batch_size,
        "group_size": recipe.rollout.group_size,
        "train": {
            "sampling": sampling(recipe),
            ENVIRONMENT_KEY[dialect]: [environment(recipe, dialect)],
        },
    }
    if distils and recipe.teacher is not None and recipe.teacher.policy is not None:
        # The policy told the reference solution: prime-rl reads it from the task, as our environment names it.
        orchestrator["algo"] = {"type": "opsd", "demo_key": "answer"}
    elif distils:
        assert recipe.teacher is not None  # the recipe has checked it
        name = model_name(recipe.teacher.model, models, "teacher")
        url = recipe.teacher.url or DEFAULT_TEACHER_URL
        add_teacher(orchestrator, dialect, name, v1_url(url))
    if recipe.rollout.url is not None:
        client = {"base_url": v1_url(recipe.rollout.url) if dialect == "head" else [v1_url(recipe.rollout.url)]}
        key = "student" if dialect == "v0.6" else "model"
        orchestrator.setdefault(key, {})["client"] = client
    table: dict[str, Any] = {
        "max_steps": recipe.trainer.steps,
        "seq_len": recipe.rollout.max_model_len,
        "model": {"name": student},
        "orchestrator": orchestrator,
        "trainer": {
            "loss": {"type": "custom", "import_path": IMPORT_PATH, "kwargs": loss_table(recipe, dialect)},
            "optim": {
                "type": "adamw",
                "lr": recipe.trainer.lr,
                "weight_decay": recipe.trainer.weight_decay,
                "betas1": recipe.trainer.betas[0],
                "betas2": recipe.trainer.betas[1],
                "max_norm": recipe.trainer.max_grad_norm,
            },
            "scheduler": scheduler(recipe),
        },
    }
    if recipe.output_dir is not None:
        run_dir = Path(recipe.output_dir)
        if dialect == "head":  # it would put a generated name below output_dir otherwise
            table |= {"output_dir": str(run_dir.parent), "run": {"name": run_dir.name}}
        else:
            table["output_dir"] = str(run_dir)
    if recipe.checkpoint.every:
        table["ckpt"] = {"interval": recipe.checkpoint.every, "keep_last": recipe.checkpoint.keep}
    if recipe.logging.wandb is not None:
        wandb = {"project": recipe.logging.wandb.project}
        if recipe.logging.wandb.name is not None:
            wandb["name"] = recipe.logging.wandb.name
        table |= {"monitors": {"wandb": wandb}} if dialect == "head" else {"wandb": wandb}
    if recipe.rollout.url is None:
        memory = {}
        if "gpu_memory_utilization" in recipe.rollout.model_fields_set:
            memory["gpu_memory_utilization"] = recipe.rollout.gpu_memory_utilization
        table["inference"] = {"vllm": memory} if dialect == "head" and memory else memory
    return table


ENVIRONMENT_KEY = {"v0.6": "env", "v0.7": "env", "v0.8": "source", "head": "source"}
DEFAULT_TEACHER_URL = "http://localhost:8001"


def refuse(recipe: Recipe, dialect: str) -> None:
    """What no field of prime-rl's config can say.

    Raises:
        RecipeError: names the key and what to do.
    """
    if recipe.rollout.student_fraction != 1:
        raise RecipeError(
            f"rollout.student_fraction = {recipe.rollout.student_fraction}: prime-rl samples every sequence from the "
            "student. Set it to 1, or run the recipe with --engine local."
        )
    if recipe.loss.support_size == "full":
        raise RecipeError(
            f'loss.k = "full": prime-rl\'s wire carries a top-K support. Give [loss] type = {recipe.loss.type!r} a '
            "number k, or run the recipe with --engine local."
        )
    refuse_told_policy(recipe, dialect)
    pairs = sorted(set(recipe.loss.needs) & {"replay", "segment_ids"})
    if pairs:
        raise RecipeError(
            f"[loss] type = {recipe.loss.type!r} needs {' and '.join(pairs)}: preference pairs, and prime-rl hands a loss "
            "one sequence at a time. Set the replay channel's weight to 0, or run the recipe with --engine local."
        )
    if {"ref_logprobs", "support"} & recipe.loss.needs and "advantages" in recipe.loss.needs and dialect != "v0.6":
        raise RecipeError(
            f"[loss] type = {recipe.loss.type!r} needs advantages and a teacher for the same tokens; prime-rl "
            f"{dialect} assigns no advantages to distillation tokens. Use dialect v0.6, or --engine local."
        )


def refuse_told_policy(recipe: Recipe, dialect: str) -> None:
    """Self-distillation as far as prime-rl's ``opsd`` has it: the live policy, with the data's solution in front.

    Raises:
        RecipeError: names the key that asks for more.
    """
    policy = None if recipe.teacher is None else recipe.teacher.policy
    if policy is None:
        return
    if dialect == "v0.6":
        raise RecipeError("teacher.policy: prime-rl v0.6 has no self-distillation. Use v0.7 or newer, or --engine local.")
    asked = {
        "hint": (policy.hint, "reference", "its opsd knows the data's demonstration alone, not a verdict or a sibling"),
        "update": (policy.update, "live", "its opsd scores with the policy's current weights"),
        "template": (policy.template, None, "its opsd puts the hint into a system message before the question"),
    }
    for key, (value, possible, why) in asked.items():
        if value != possible:
            remedy = "Leave it out" if possible is None else f"Set it to {possible!r}"
            raise RecipeError(
                f"teacher.policy.{key} = {value!r}: prime-rl cannot do that ({why}). {remedy}, or run the recipe with "
                "--engine local."
            )


def model_name(name: str | None, models: Mapping[str, Any], role: str) -> str:
    if name is not None:
        return name
    if role not in models:
        raise RecipeError(
            f"[{role}.prepare] builds a small model first: run `prime-rl prepare --config FILE`, then export again, or "
            f"name an existing model with --set {role}.model=DIR"
        )
    return str(models[role])


def v1_url(url: str) -> str:
    """prime-rl's clients want the OpenAI base URL."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def add_teacher(orchestrator: dict[str, Any], dialect: str, name: str, url: str) -> None:
    if dialect == "v0.6":
        orchestrator["training_mode"] = "opd"
        orchestrator["teacher"] = {"model": {"name": name}, "client": {"base_url": [url]}}
        # The default list also enforces a zero-advantage filter, which would drop every group whose rollouts earn the
        # same reward: distillation learns from those as from any other.
        orchestrator["post_batch_filters"] = [{"type": "gibberish"}, {"type": "repetition"}]
        return
    teacher = {"name": name, "base_url": url if dialect == "head" else [url]}
    orchestrator["algo"] = {"type": "opd", "teacher": teacher}


def sampling(recipe: Recipe) -> dict[str, Any]:
    out: dict[str, Any] = {
        "temperature": recipe.rollout.temperature,
        "max_completion_tokens": recipe.rollout.max_tokens,
    }
    if recipe.rollout.top_p != 1:  # prime-rl hard-codes top_p = 1 and lets the request body say otherwise
        out["extra_body"] = {"top_p": recipe.rollout.top_p}
    return out


def scheduler(recipe: Recipe) -> dict[str, Any]:
    kind, warmup = recipe.trainer.schedule, recipe.trainer.warmup_steps
    if kind == "constant":
        return {"type": "constant"} if not warmup else {"type": "linear", "warmup_steps": warmup, "decay_steps": 0}
    if kind == "linear":
        return {"type": "linear", "warmup_steps": warmup, "decay_steps": max(recipe.trainer.steps - warmup, 0)}
    return {"type": "cosine", "warmup_steps": warmup}


def loss_table(recipe: Recipe, dialect: str) -> dict[str, Any]:
    """The loss with what was set in the recipe, and prime-rl's era where the loss asks for one."""
    table = {"type": recipe.loss.type, **plain(recipe.loss.model_dump(exclude_unset=True, exclude_none=True))}
    if "dialect" in type(recipe.loss).model_fields and "dialect" not in recipe.loss.model_fields_set:
        table["dialect"] = "v0_6" if dialect == "v0.6" else "v0_7"
    return table


def environment(recipe: Recipe, dialect: str) -> dict[str, Any]:
    """The recipe's [data], served by ``prime_composer_problems``."""
    settings = data_settings(recipe.data)
    if dialect == "v0.6":
        return {"id": NAME, "name": "problems", "args": settings}
    taskset = {"id": NAME, **settings}
    if dialect == "v0.7":
        return {"name": "problems", "taskset": taskset, "harness": {"id": "null", "runtime": {"type": "subprocess"}}}
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return {"name": "problems", "env": {"taskset": taskset, "agent": agent}}


def plain(value: Any) -> Any:
    """Tuples and sets as lists, recursively: what TOML knows."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """``more`` on top of ``into``, table by table; lists and values are replaced."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = plain(value)


def to_toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A TOML document: values first, then tables, then arrays of tables."""
    lines, tables, arrays = [], [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append((key, value))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            arrays.append((key, value))
        else:
            lines.append(f"{toml_key(key)} = {toml_value(value)}")
    text = "".join(f"{line}\n" for line in lines)
    for key, value in tables:
        here = (*path, key)
        inner = to_toml(value, here)
        only_tables = value and all(isinstance(item, Mapping) for item in value.values())
        text += ("" if only_tables else f"\n[{dotted(here)}]\n") + inner
    for key, items in arrays:
        here = (*path, key)
        for item in items:
            text += f"\n[[{dotted(here)}]]\n" + to_toml(item, here)
    return text


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(toml_key(part) for part in path)


def toml_key(key: str) -> str:
    return key if key and all(c.isalnum() and c.isascii() or c in "-_" for c in key) else json.dumps(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isinf(value) or math.isnan(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    # JSON's escapes are TOML's, except for characters outside the basic plane, which TOML takes as they are.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
