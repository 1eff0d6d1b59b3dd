"""Translate a recipe into the tables of prime-rl's TOML."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_composer.backends.transformers import window
from prime_composer.losses import LossConfig
from prime_composer.losses.shared.dialect import dialect_of
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.tables import Table
from prime_composer.upstream.environment import NAME, data_settings
from prime_composer.upstream.export.plan import ExportedEnvironment, ExportPlan, api_key, v1_url
from prime_composer.upstream.export.refusals import asker_settings
from prime_composer.upstream.export.toml import merge, merge_native, toml_value
from prime_composer.upstream.keys import IMPORT_PATH, PROMPTS_KEY, TOKENIZERS_KEY
from prime_composer.upstream.settings import FILE_KEY, TEACHER_KEYS
from prime_composer.upstream.versions.records import Version
from prime_composer.upstream.versions.toml_shapes import (
    ENVIRONMENTS,
    HINT_KEYS,
    WANDB,
    output_dir_and_name,
    put,
    source_of,
    write_teachers,
)

VLLM_LOGPROBS = 20  # vLLM's default max_logprobs; it refuses requests for more

TOOL_CALL_PARSERS = {"qwen3": "hermes"}
"""What vLLM calls a parser of ``renderers``. prime-rl evaluates with vLLM's chat completions, and
finds the parser by the model's name, which a model in a directory has not."""


def build_tables(plan: ExportPlan) -> dict[str, Any]:
    """Return the recipe in prime-rl's terms, without its [prime_rl]."""
    recipe = plan.recipe
    table: dict[str, Any] = {
        "max_steps": recipe.trainer.steps,
        "seq_len": recipe.rollout.context(windows=[window(plan.student)]),
        "model": {"name": plan.student},
        "orchestrator": orchestrator(plan),
        "trainer": trainer(plan),
        # Without [ckpt] prime-rl writes no weights at all. Without an interval: the last ones only.
        "ckpt": {"keep_last": recipe.checkpoint.keep},
    }
    if recipe.checkpoint.every:
        table["ckpt"]["interval"] = recipe.checkpoint.every
    if recipe.output_dir is not None:
        table |= output_dir_and_name(Path(recipe.output_dir))
    if recipe.logging.wandb is not None:
        wandb = recipe.logging.wandb.model_dump(exclude_none=True)
        for name in reversed(WANDB):
            wandb = {name: wandb}
        merge(table, wandb)
    if recipe.rollout.url is None:
        arguments = vllm_arguments(plan)
        table["inference"] = {"vllm": arguments} if arguments else {}
    return table


def orchestrator(plan: ExportPlan) -> dict[str, Any]:
    """Return [orchestrator]: batches, environments, teachers, evaluation, the student's server."""
    recipe, version = plan.recipe, plan.version
    environments = [environment_entry(part) for part in plan.environments]
    table: dict[str, Any] = {"batch_size": recipe.trainer.batch_size}
    put(table, version.places.group_size, recipe.rollout.group_size)
    put(table, "train.sampling.temperature", recipe.rollout.temperature)
    put(table, "train.sampling.max_completion_tokens", recipe.rollout.max_tokens)
    put(table, f"train.{ENVIRONMENTS}", environments)
    if "ahead" in recipe.rollout.model_fields_set:
        table["max_off_policy_steps"] = recipe.rollout.ahead
    if recipe.rollout.top_p != 1:
        put(table, version.places.top_p, recipe.rollout.top_p)
    if recipe.loss.compares_with_teacher:
        if plan.teachers:
            mixtures = {
                part.name: [
                    {**plan.teachers[teacher], "weight": weight}
                    for teacher, weight in part.mixture.items()
                ]
                for part in plan.environments
            }
            write_teachers(table, environments, mixtures, version.places.algo)
        else:
            put(table, version.places.algo, self_distillation(plan))
    for entry, part in zip(environments, plan.environments, strict=True):
        merge_own_settings(entry, part, version)
    if plan.renderer:
        table["renderer"] = toml_value(plan.renderer)
    if recipe.loss.reads_rewards_and_teacher and version.zero_advantages is not None:
        put(table, version.zero_advantages, False)  # worth their distillation
    if recipe.rollout.url is not None:
        client = {"base_url": v1_url(recipe.rollout.url)} | api_key(recipe.rollout)
        merge(table, {"model": {"client": client}})
    if "eval" in recipe.model_fields_set and plan.evaluated:
        table["eval"] = evaluation_table(plan)
        size = math.ceil(recipe.eval.size / len(plan.evaluated))
        put(table, version.places.eval_size, size)
    return table


def self_distillation(plan: ExportPlan) -> dict[str, Any]:
    """Return the algorithm of a policy that is its own teacher, given a hint."""
    policy, renderer = plan.recipe.policy_teacher, plan.renderer
    assert policy is not None, "a loss without a teacher"
    table: dict[str, Any] = {"type": "opsd", "demo_key": HINT_KEYS[policy.hint]}
    if policy.hint == "feedback":
        table["template"] = "{demonstration}"  # prime-rl's own calls it an expert's response
    if renderer:
        table["renderer"] = toml_value(renderer)  # of the hint
    return table


def environment_entry(part: ExportedEnvironment, split: str = "train") -> dict[str, Any]:
    """Return an environment: one that ``prime_composer_problems`` serves, or one by id.

    One to evaluate has no ratio. main has no such key, and nothing else reads it.
    """
    entry: dict[str, Any] = {"name": part.name}
    if split == "train":
        entry["ratio"] = part.ratio
    source = part.source
    if not isinstance(source, DataConfig):
        return source_of(
            source.id, toml_value(source.args), entry, source.max_turns, source.timeout
        )
    settings = data_settings(source)
    if split != "train":
        settings["split"] = split
    if part.rows is not None:
        settings["rows_of"] = part.rows
    return source_of(NAME, settings, entry)


def merge_own_settings(entry: dict[str, Any], part: ExportedEnvironment, version: Version) -> None:
    """Merge ``[environments.NAME.prime_rl]`` into its environment, in place."""
    if not isinstance(part.source, DataConfig):
        merge_native(entry, part.source.prime_rl, version.name)


def evaluation_table(plan: ExportPlan) -> dict[str, Any]:
    """Return [orchestrator.eval] without its size: greedy accuracy on the held-out problems.

    prime-rl evaluates before the first step, and whenever its count of steps is a multiple of the
    interval. ``every = 0`` becomes the count after the last step.
    """
    recipe, version = plan.recipe, plan.version
    entries = [environment_entry(part, "test") for part in plan.evaluated]
    for entry, part in zip(entries, plan.evaluated, strict=True):
        merge_own_settings(entry, part, version)
    return {
        "interval": recipe.eval.every or recipe.trainer.steps + 1,
        "sampling": {"temperature": 0.0, "max_completion_tokens": recipe.rollout.max_tokens},
        ENVIRONMENTS: entries,
    }


def trainer(plan: ExportPlan) -> dict[str, Any]:
    """Return [trainer]: loss, optimizer, schedule, activation checkpointing, adapter."""
    config = plan.recipe.trainer
    table: dict[str, Any] = {
        "loss": {"type": "custom", "import_path": IMPORT_PATH, "kwargs": exported_loss(plan)},
        "optim": {
            "type": "adamw",
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "betas1": config.betas[0],
            "betas2": config.betas[1],
            "max_norm": config.max_grad_norm,
        },
        "scheduler": scheduler(config),
    }
    if "gradient_checkpointing" in config.model_fields_set:
        # Offloading, which prime-rl turns on as well, would turn checkpointing on again.
        off = {"ac": "None", "ac_offloading": "None"}
        table["model"] = {"ac": {"mode": "full"}} if config.gradient_checkpointing else off
    if (lora := plan.recipe.student.lora) is not None:
        put(table, "model.lora", {"rank": lora.rank, "alpha": float(lora.alpha)})
        if lora.targets != "all-linear":  # prime-rl's own list: a dense model's names, and experts
            put(table, "model.lora.target_modules", list(lora.targets))
    return table


def exported_loss(plan: ExportPlan) -> dict[str, Any]:
    """Return the loss as the recipe sets it, and the knob ``dialect`` of each loss that has one."""
    loss = plan.recipe.loss
    set_by_recipe = loss.model_dump(exclude_unset=True, exclude_none=True)
    table = {"type": loss.type, **toml_value(set_by_recipe)}
    name_dialects(table, loss, plan.version.name)
    if plan.teachers_mixed:
        table[FILE_KEY] = True  # prime-rl alone would query the wrong teacher without any error
    if loss.compares_with_teacher:
        for key in TEACHER_KEYS:
            for value in asker_settings(plan.recipe.teacher_tables, key):
                table[key] = value
    tokenizers = plan.tokenizers
    if tokenizers:
        table[TOKENIZERS_KEY] = tokenizers
    if plan.prompts:
        table[PROMPTS_KEY] = toml_value(plan.prompts)
    return table


def name_dialects(table: dict[str, Any], config: Any, version: str) -> None:
    """Write a version's dialect into the table of each loss within ``config``, in place.

    A recipe's own dialect stays. A loss that the recipe leaves to its default gets a table.
    """
    for name, value in dict(config).items():
        if isinstance(value, Table | Mapping):
            inner = dict(table.get(name, {}))
            name_dialects(inner, value, version)
            table |= {name: inner} if inner else {}
    if isinstance(config, LossConfig) and "dialect" in type(config).model_fields:
        if "dialect" not in config.model_fields_set:
            table |= {"type": config.type, "dialect": dialect_of(version)}


def scheduler(config: TrainerConfig) -> dict[str, Any]:
    kind, warmup = config.schedule, config.warmup_steps
    decay = config.steps - warmup
    # A decay of one step is at its peak, and prime-rl would divide by decay - 1.
    if kind == "constant" or decay <= 1:
        if not warmup:
            return {"type": "constant"}
        return {"type": "linear", "warmup_steps": warmup, "decay_steps": 0}
    if kind == "linear":
        return {"type": "linear", "warmup_steps": warmup, "decay_steps": decay}
    return {"type": "cosine", "warmup_steps": warmup}


def vllm_arguments(plan: ExportPlan) -> dict[str, Any]:
    """Return arguments, by vLLM's names, of the server that prime-rl starts for the student."""
    recipe, arguments = plan.recipe, dict[str, Any]()
    if "gpu_memory_utilization" in recipe.rollout.model_fields_set:
        arguments["gpu_memory_utilization"] = recipe.rollout.gpu_memory_utilization
    if "seed" in recipe.trainer.model_fields_set:
        arguments["seed"] = recipe.trainer.seed
    if "dtype" in recipe.trainer.model_fields_set and recipe.trainer.dtype == "bfloat16":
        # prime-rl's default, "auto", loads a float32 model as float16.
        arguments["dtype"] = "bfloat16"
    if recipe.policy_teacher is not None and needs_more_logprobs(recipe.loss):
        arguments["max_logprobs"] = recipe.loss.support_size
    renderer = recipe.rollout.renderer
    parser = TOOL_CALL_PARSERS.get(str(renderer.get("tool_parser") or renderer.get("name")))
    if parser is not None:
        arguments["tool_call_parser"] = parser
    return arguments


def needs_more_logprobs(loss: LossConfig) -> bool:
    """Return whether a server that scores needs a larger max_logprobs than vLLM's default."""
    k = loss.support_size
    return isinstance(k, int) and k > VLLM_LOGPROBS
