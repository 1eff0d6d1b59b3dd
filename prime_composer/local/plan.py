"""Describe and check a run on this machine, without running or writing anything."""

from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import nn

from prime_composer.backends.hf_model import load_tokenizer, read_config
from prime_composer.backends.protocols import Limits
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.local.engine import BackendName, teacher_backend
from prime_composer.local.model_check import check_models
from prime_composer.local.preflight import (
    binding,
    check_context,
    check_hinted_prompts,
    check_lengths,
    check_objective,
    check_routing,
    check_tokenizers,
    check_vocabularies,
    naming,
    route,
    sampling_warnings,
)
from prime_composer.local.replay import read_pairs
from prime_composer.local.sources import Sources
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.tracker import import_wandb
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import TITLES, require_library, signature
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import ModelConfig, Recipe, RolloutConfig
from prime_composer.tiny_models.cache import cached_path

EXTRAS = (
    "pip install 'prime-composer[local]' on a CPU machine, 'prime-composer[gpu]' on a GPU machine"
)
"""Pip lines of the one-machine engine."""


def plan(recipe: Recipe, problems: ProblemSet) -> list[str]:
    """Check what ``train`` checks before its first step, as far as no engine has to be opened for
    it.

    Prompts, hints, solutions and vocabularies are compared with the contexts where the tokenizers
    are in a directory on this machine. Servers are not contacted, and nothing is downloaded.

    Args:
        recipe: the recipe.
        problems: its problems.

    Returns:
        Lines that describe the run.

    Raises:
        ImportError: a library that the run needs is missing.
        ValueError: the run would stop before its first step, for this reason.
    """
    check_models(recipe, hub=False)
    check_routing(recipe, problems)
    check_objective(recipe)
    routing = Routing.of_recipe(recipe)
    require_libraries(recipe, routing)
    models: dict[str, ModelConfig] = {"student": recipe.student}
    models |= {teacher.table: config for teacher, config in routing.teachers.items()}
    folders = {table: local_folder(model, problems) for table, model in models.items()}
    return [
        *(f"{table}: {describe_model(model, folders[table])}" for table, model in models.items()),
        *describe_policy_teacher(recipe),
        *describe_loss(recipe),
        *describe_hidden_states(recipe, routing, folders),
        *describe_data(recipe, problems, routing),
        *describe_steps(recipe),
        *check_sequences(recipe, problems, routing, folders),
        *(f"warning: {warning}" for warning in sampling_warnings(recipe.rollout)),
    ]


def require_libraries(recipe: Recipe, routing: Routing) -> None:
    """Raise where a library that the run would import is not installed.

    Raises:
        ImportError: naming all of them and the pip lines.
        ValueError: W&B, or the library of a metric, is missing.
    """
    backends: set[BackendName] = {recipe.rollout.backend}
    if recipe.asks_teacher:
        backends |= {
            teacher_backend(teacher, recipe.rollout.backend)
            for teacher in routing.teachers.values()
        }
    libraries = {"transformers", "rich", "matplotlib"}
    libraries |= {"vllm"} if "vllm" in backends else set()
    libraries |= {"httpx"} if "server" in backends else set()
    libraries |= {"tensorboard"} if recipe.logging.tensorboard else set()
    missing = sorted(name for name in libraries if find_spec(name) is None)
    if missing:
        raise ImportError(f"this recipe needs {', '.join(missing)}: {EXTRAS}")
    for data in recipe.problem_sources.values():
        require_library(data.metric)
    if recipe.eval.temperatures:
        require_library("bleu", "[eval] temperatures")
    if recipe.logging.wandb is not None:
        import_wandb()


def local_folder(model: ModelConfig, problems: ProblemSet) -> Path | None:
    """Return a model's directory; None for one that is not on this machine yet."""
    if model.prepare is not None:
        return cached_path(model.prepare, problems)
    folder = Path(str(model.model))
    return folder if folder.is_dir() else None


def describe_model(model: ModelConfig, folder: Path | None) -> str:
    """Return a model's origin, and whether it is on this machine."""
    if model.prepare is None:
        return f"{folder}" if folder else f"{model.model} (hub id, loaded when the run starts)"
    if folder is not None:
        return f"prepared, cached in {folder}"
    return f"to be prepared now: {model.prepare.work}"


def describe_policy_teacher(recipe: Recipe) -> list[str]:
    """Return one line for a hint-conditioned teacher."""
    policy = None if recipe.teacher is None else recipe.teacher.policy
    if policy is None:
        return []
    return [f"teacher: the policy itself, with the hint {policy.hint!r}; weights: {policy.update}"]


def describe_loss(recipe: Recipe) -> list[str]:
    """Return the loss with its channels and needs, and K."""
    lines = []
    for section, (name, needs) in recipe.loss.needs_by_section().items():
        lines.append(f"[{section}] {name}: needs {', '.join(sorted(needs)) or 'nothing more'}")
    support = recipe.loss.support
    if support is not None:
        size = "the whole vocabulary" if support.k == "full" else f"K = {support.k}"
        lines.append(f"support: {size}, chosen by the {support.chosen_by}")
    return lines


def describe_hidden_states(
    recipe: Recipe, routing: Routing, folders: Mapping[str, Path | None]
) -> list[str]:
    """Return one line per teacher on the size of its hidden states and head.

    Empty for a loss that reads none, and for a teacher whose directory is not on this machine.
    """
    if "hidden_states" not in recipe.loss.needs:
        return []
    lines = []
    for teacher, config in routing.teachers.items():
        folder = folders[teacher.table]
        if folder is None:
            continue
        sizes = read_config(folder).get_text_config()
        bytes_each = 4 if (config.dtype or recipe.trainer.dtype) == "float32" else 2
        per_token = sizes.hidden_size * bytes_each
        head = per_token * sizes.vocab_size
        step = per_token * recipe.trainer.batch_size * recipe.rollout.max_tokens
        lines.append(
            f"[{teacher.table}] hidden states: {per_token:,} bytes per token, at most "
            f"{step / 1e6:,.1f} MB per step; output head {sizes.vocab_size:,} x "
            f"{sizes.hidden_size:,}, {head / 1e6:,.1f} MB"
        )
    return lines


def describe_data(recipe: Recipe, problems: ProblemSet, routing: Routing) -> list[str]:
    """Return the number of problems of each environment, and who scores them."""
    practice = Counter(problem.environment for problem in problems.practice)
    held_out = Counter(problem.environment for problem in problems.held_out)
    lines = []
    for name, data in problems.sources.items():
        line = f"{name}: {practice[name]} problems to train on, {held_out[name]} held out"
        if name in problems.left_out:
            line += f", {problems.left_out[name]} rows left out (clean)"
        if data.graded:
            line += f"; {TITLES[data.metric]}, {signature(data.metric)}"
        if recipe.teachers and recipe.asks_teacher:
            shares = routing.of_environment(name).items()
            line += f"; scored by {' + '.join(f'{w:g} {t.name}' for t, w in shares)}"
            if data.teacher_key is not None:
                line += f", or by the teacher that a row names in {data.teacher_key!r}"
        lines.append(line)
    if isinstance(problems, Sources):
        for name, environment in problems.by_id.items():
            line = f"{name}: {practice[name]} tasks of {environment.id} to train on"
            line += f", {held_out[name]} to evaluate"
            if recipe.teachers and recipe.asks_teacher:
                shares = routing.of_environment(name).items()
                line += f"; scored by {' + '.join(f'{w:g} {t.name}' for t, w in shares)}"
            lines.append(line)
    return lines


def describe_steps(recipe: Recipe) -> list[str]:
    """Return steps, batches, the token budget, and what happens between the steps."""
    trainer, rollout, evaluation = recipe.trainer, recipe.rollout, recipe.eval
    prompts = trainer.batch_size // rollout.group_size
    rollouts = trainer.steps * trainer.batch_size
    every = f"every {evaluation.every} steps" if evaluation.every else "before and after training"
    return [
        f"rollouts: {rollout.backend}, at most {rollout.max_tokens} new tokens each",
        f"steps: {trainer.steps} of {prompts} prompts x {rollout.group_size} rollouts; "
        f"{rollouts:,} rollouts, at most {rollouts * rollout.max_tokens:,} new tokens",
        f"evaluation: {every}, {evaluation.size} problems, {evaluation.kl_size} for the reverse KL",
        *(
            [
                f"diversity: {evaluation.samples} answers to each of them at T = "
                f"{', '.join(f'{temperature:g}' for temperature in evaluation.temperatures)}"
            ]
            if evaluation.temperatures
            else []
        ),
    ]


def check_sequences(
    recipe: Recipe, problems: ProblemSet, routing: Routing, folders: Mapping[str, Path | None]
) -> list[str]:
    """Check all that needs tokenizers, as far as they are on this machine.

    Returns:
        The longest prompt, and warnings.

    Raises:
        ValueError: a sequence, a vocabulary, a special token or the file of pairs does not fit.
    """
    folder = folders["student"]
    tokenizer = None if folder is None else load_tokenizer(folder)
    if folder is None or tokenizer is None:
        return ["prompt lengths: not checked, the student's tokenizer is not on this machine yet"]
    tokenized, rollout = TokenizedProblems(problems, tokenizer), recipe.rollout
    setup_loss_fn(resolve(recipe.loss, tokenizer))
    if recipe.replay.path is not None:
        read_pairs(recipe.replay.path, problems.sources, tokenizer)
    prompts = [tokenized.prompt(problem) for problem in problems.practice]
    check_context(prompts, rollout.max_tokens, sampler=context(rollout.backend, rollout))
    student = read_config(folder).get_text_config()
    teacher_table = recipe.teacher
    if (
        teacher_table is not None
        and teacher_table.policy is not None
        and teacher_table.on_overflow == "error"
    ):
        # The weights are not read: "live" copies none.
        live = teacher_table.policy.model_copy(update={"update": "live"})
        policy = PolicyTeacher(live, problems.sources, nn.Module(), tokenizer)
        positions = student.max_position_embeddings
        check_hinted_prompts(policy, problems.practice, rollout, positions)
    longest = max(len(ids) for ids in prompts)
    lines = [
        f"longest prompt: {longest} tokens, {longest + rollout.max_tokens} with a full completion; "
        f"the context is {rollout.max_model_len}"
    ]
    scored_problems = route(routing, problems.practice)
    for teacher, config in routing.teachers.items() if recipe.asks_teacher else ():
        limits = context(teacher_backend(config, rollout.backend), rollout)
        limits = binding(limits, config.on_overflow)
        with naming(teacher, among=routing.teachers):
            check_lengths(tokenized, scored_problems[teacher], rollout, limits, teacher)
            lines += compare_with_teacher(
                tokenizer,
                student.vocab_size,
                folders[teacher.table],
                recipe.loss.asked_of_teacher[0],
            )
    return lines


def compare_with_teacher(
    tokenizer: Any, vocab_size: int, folder: Path | None, support_size: int | Literal["full"]
) -> list[str]:
    """Compare the student's tokenizer and head with those of a teacher's directory.

    Args:
        tokenizer: the student's.
        vocab_size: entries of the student's head.
        folder: the teacher's directory; nothing is compared without one.
        support_size: K.

    Raises:
        PreflightError: they differ in a way that training cannot bridge.
    """
    teacher_tokenizer = None if folder is None else load_tokenizer(folder)
    if folder is None or teacher_tokenizer is None:
        return []
    limits = Limits(vocab_size=read_config(folder).get_text_config().vocab_size)
    warnings = check_tokenizers(tokenizer, teacher_tokenizer)
    warnings += check_vocabularies(vocab_size, limits, len(tokenizer), support_size)
    return [f"warning: {warning}" for warning in warnings]


def context(backend: BackendName, config: RolloutConfig) -> Limits:
    """Return the context that the recipe gives a backend. A server has one of its own."""
    return Limits(None if backend == "server" else config.max_model_len)
