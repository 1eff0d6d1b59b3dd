"""Describe and check a run on this machine, without running or writing anything."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from prime_composer.backends.hf_model import load_tokenizer, read_config, shapes
from prime_composer.backends.lora.adapter import layers_to_adapt
from prime_composer.backends.protocols import Limits
from prime_composer.backends.transformers import window_of
from prime_composer.local.context import context_of
from prime_composer.local.opening import own_prompts, room_of, round_student
from prime_composer.local.preflight import (
    check_objective,
    check_routing,
    check_scorer,
    check_texts,
    naming_teacher,
    sampling_warnings,
)
from prime_composer.local.requirements import (
    check_backend,
    check_requirements,
    in_table,
    local_models,
)
from prime_composer.local.sources import ProblemsAndTasks
from prime_composer.local.tokenized_problems import TokenizedProblems, with_ends
from prime_composer.losses import LossConfig, setup_loss_fn
from prime_composer.losses.shared.modifiers import with_token_ids
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import TITLES, signature
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import (
    ModelConfig,
    Recipe,
    TeacherConfig,
)
from prime_composer.teachers.policy import PolicyTeacher
from prime_composer.tiny_models.cache import cached_path, is_shipped


def dry_run(recipe: Recipe, problems: ProblemSet) -> list[str]:
    """Return lines that describe a run, after the checks that ``train`` makes without an engine."""
    check_requirements(recipe, hub=False)
    routing = Routing.of_recipe(recipe)
    check_routing(routing, problems)
    check_objective(recipe.loss, recipe.rollout)
    teachers = {teacher.table: config for teacher, config in routing.opened.items()}
    models: dict[str, ModelConfig] = {"student": recipe.student, **teachers}
    folders = {table: local_folder(model, problems) for table, model in models.items()}
    for table, model, backend in local_models(recipe):
        if (folder := folders[table]) is None:
            continue
        dtype = getattr(model, "dtype", None) or recipe.trainer.dtype
        with in_table(table):
            net = shapes(folder)
            check_backend(net, backend, dtype, trains=table == "student")
        if table == "student":
            round_student(net, recipe.student)
    return [
        *_models(recipe, routing, folders),
        *_loss(recipe.loss),
        *_data(problems, routing if recipe.teachers and recipe.asks_teacher else None),
        *_steps(recipe, len(problems.held_out)),
        *check_sequences(recipe, problems, routing, folders),
        *(f"warning: {warning}" for warning in sampling_warnings(recipe.rollout)),
    ]


def local_folder(model: ModelConfig, problems: ProblemSet) -> Path | None:
    """Return a model's directory; None for one that is not on this machine yet."""
    if model.prepare is not None:
        return cached_path(model.prepare, problems)
    folder = Path(str(model.model))
    return folder if folder.is_dir() else None


def describe_model(model: ModelConfig, folder: Path | None) -> str:
    """Return a model's origin, and whether it is on this machine."""
    if isinstance(model, TeacherConfig) and model.base:
        return "the student's own weights, without its adapter"
    if model.prepare is None:
        return f"{folder}" if folder else f"{model.model} (hub id, loaded when the run starts)"
    if folder is not None:
        origin = "comes with the package:" if is_shipped(folder) else "cached in"
        return f"prepared, {origin} {folder}"
    return f"to be prepared now: {model.prepare.work}"


def _models(recipe: Recipe, routing: Routing, folders: Mapping[str, Path | None]) -> Iterator[str]:
    """Yield where each model is from, and what changes of the student."""
    student, folder = recipe.student, folders["student"]
    yield f"student: {describe_model(student, folder)}"
    if (quantize := student.quantize) is not None:
        yield f"student: {quantize.work} while it learns"
    if (lora := student.lora) is not None:
        layers = ""
        if folder is not None:
            adapted = layers_to_adapt(shapes(folder), lora.targets).values()
            size = lora.rank * sum(layer.in_features + layer.out_features for layer in adapted)
            layers = f" ({len(adapted)} layers, {size:,} numbers)"
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        begins = "" if lora.start is None else f", which begins as {lora.start}"
        yield (
            f"student: an adapter of rank {lora.rank}, alpha {lora.alpha}, on "
            f"{targets}{layers}{begins}"
        )
    for teacher, config in routing.opened.items():
        yield f"{teacher.table}: {describe_model(config, folders[teacher.table])}"
    for teacher, config in routing.teachers.items():
        if config.tape is not None:
            alone = "alone answers, and no teacher is opened"
            what = alone if config.tape_only else "keeps its answers"
            yield f"{teacher.table}: the tape {config.tape} {what}"
    if (policy := recipe.policy_teacher) is not None:
        yield f"teacher: the policy itself, with the hint {policy.hint!r}; weights: {policy.update}"


def _loss(loss: LossConfig) -> Iterator[str]:
    """Yield what each part of the loss needs, and K."""
    for section, (part, needs) in loss.needs_by_section().items():
        yield f"[{section}] {part.type}: needs {', '.join(sorted(needs)) or 'nothing more'}"
    if loss.support is not None:
        size = "the whole vocabulary" if loss.support.k == "full" else f"K = {loss.support.k}"
        yield f"support: {size}, chosen by the {loss.support.chosen_by}"


def _data(problems: ProblemSet, routing: Routing | None) -> Iterator[str]:
    """Yield the number of problems of each environment, and with a routing who scores them."""
    practice = Counter(problem.environment for problem in problems.practice)
    held_out = Counter(problem.environment for problem in problems.held_out)

    def scored_by(name: str) -> str:
        if routing is None:
            return ""
        shares = routing.of_environment(name).items()
        return f"; scored by {' + '.join(f'{w:g} {t.name}' for t, w in shares)}"

    for name, data in problems.sources.items():
        line = f"{name}: {practice[name]} problems to train on, {held_out[name]} held out"
        if name in problems.left_out:
            line += f", {problems.left_out[name]} rows left out (clean)"
        if data.graded:
            line += f"; {TITLES[data.metric]}, {signature(data.metric)}"
        line += scored_by(name)
        if routing is not None and data.teacher_key is not None:
            line += f", or by the teacher that a row names in {data.teacher_key!r}"
        yield line
    by_id = problems.by_id if isinstance(problems, ProblemsAndTasks) else {}
    for name, environment in by_id.items():
        yield (
            f"{name}: {practice[name]} tasks of {environment.id} to train on, {held_out[name]} to "
            f"evaluate{scored_by(name)}"
        )


def _steps(recipe: Recipe, held_out: int) -> Iterator[str]:
    """Yield steps, batches, the token budget, and what happens between the steps."""
    trainer, rollout, evaluation = recipe.trainer, recipe.rollout, recipe.eval
    size, kl_size = (min(held_out, wanted) for wanted in (evaluation.size, evaluation.kl_size))
    rollouts, prompts = trainer.steps * trainer.batch_size, trainer.batch_size // rollout.group_size
    every = f"every {evaluation.every} steps" if evaluation.every else "before and after training"
    yield f"rollouts: {rollout.backend}, at most {rollout.max_tokens} new tokens each"
    yield (
        f"steps: {trainer.steps} of {prompts} prompts x {rollout.group_size} rollouts; "
        f"{rollouts:,} rollouts, at most {rollouts * rollout.max_tokens:,} new tokens"
    )
    yield f"evaluation: {every}, {size} problems, {kl_size} for the reverse KL"
    if rollout.ahead:
        yield (
            f"ahead: a step trains on what the student sampled up to {rollout.ahead} steps before"
        )
    if (until := trainer.until) is not None:
        yield f"ends earlier where {until.metric} is no better at {until.plateau} evaluations"


def check_sequences(
    recipe: Recipe, problems: ProblemSet, routing: Routing, folders: Mapping[str, Path | None]
) -> list[str]:
    """Check all that needs tokenizers on this machine; return the longest prompt, and warnings."""
    folder = folders["student"]
    tokenizer = None if folder is None else load_tokenizer(folder)
    if folder is None or tokenizer is None:
        return ["prompt lengths: not checked, the student's tokenizer is not on this machine yet"]
    tokenized = TokenizedProblems(problems, tokenizer)
    readers = routing.opened if recipe.asks_teacher else {}
    tokenized, lines = with_ends(tokenized, recipe.rollout.stop, folder, readers, folders)
    context = context_of(recipe, tokenized, folders)
    setup_loss_fn(with_token_ids(recipe.loss, tokenizer))
    student, policy = read_config(folder).get_text_config(), None
    if recipe.policy_teacher is not None:
        # The weights are not read: "live" copies none.
        live = recipe.policy_teacher.model_copy(update={"update": "live"})
        policy = PolicyTeacher(live, problems.sources, nn.Module(), tokenizer)
    limit = limit_of(recipe.rollout.backend, context, folder)
    positions = window_of(student) or context
    warnings = check_texts(recipe, tokenized, context, limit, policy, positions)
    max_tokens, held_out = recipe.rollout.max_tokens, problems.held_out[: recipe.eval.largest]
    longest = max(len(tokenized.prompt(problem)) for problem in (*problems.practice, *held_out))
    lines.append(
        f"longest prompt: {longest} tokens, {longest + max_tokens} with a full completion; "
        f"the context is {context}"
    )
    prompts = own_prompts(readers, tokenized, folders)
    for teacher, config in readers.items():
        if config.tokenizer == "own":  # its window counts its own tokens: the preflight looks
            lines.append(f"[{teacher.table}] has a tokenizer of its own: not compared yet")
            continue
        model, own = folders[teacher.table], prompts.get(teacher)
        room = context if own is None else context + own.surplus
        size = None if model is None else read_config(model).get_text_config().vocab_size
        limits = Limits(limit_of(config.runs_on(recipe.rollout.backend), room, model), size)
        known = None if model is None else load_tokenizer(model)
        read = None if own is None else own.of
        with naming_teacher(teacher, among=routing.teachers):
            warnings += check_scorer(
                recipe, tokenized, teacher, limits, read, student.vocab_size, known
            )
    return lines + [f"warning: {warning}" for warning in warnings]


def limit_of(backend: str, context: int, model: Path | None) -> int | None:
    """Return the context that the recipe gives a model; None for a server, which has its own."""
    if backend_of(backend).serves:
        return None
    return context if model is None else room_of(backend, model, context)
