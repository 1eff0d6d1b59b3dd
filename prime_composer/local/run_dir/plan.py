"""Describe and check a run on this machine, without running or writing anything."""

from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import nn

from prime_composer.backends.errors import how_to_install
from prime_composer.backends.hf_model import check_plain_head, load_tokenizer, read_config, shapes
from prime_composer.backends.lora.adapter import import_peft, layers_to_adapt
from prime_composer.backends.protocols import Limits
from prime_composer.backends.transformers import window_of
from prime_composer.local.opening import own_prompts, room_of, round_student
from prime_composer.local.preflight import (
    binding,
    check_hinted_prompts,
    check_lengths,
    check_objective,
    check_prompts,
    check_routing,
    naming,
    sampling_warnings,
)
from prime_composer.local.run_dir.model_check import (
    check_backend,
    check_models,
    in_table,
    local_models,
)
from prime_composer.local.sources import Sources
from prime_composer.local.tokenized_problems import TokenizedProblems, context_of, with_ends
from prime_composer.local.tracker import import_wandb
from prime_composer.losses import LossConfig, setup_loss_fn
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import TITLES, require_library, signature
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.model import LoraConfig
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import (
    EvalConfig,
    ModelConfig,
    Recipe,
    RolloutConfig,
    TeacherConfig,
    TrainerConfig,
)
from prime_composer.step.replay import read_pairs
from prime_composer.teachers.compatibility import check_tokenizers, check_vocabularies
from prime_composer.teachers.policy import PolicyTeacher
from prime_composer.tiny_models.cache import cached_path, is_shipped


def plan(recipe: Recipe, problems: ProblemSet) -> list[str]:
    """Return lines that describe a run, after the checks that ``train`` makes without an engine."""
    check_models(recipe, hub=False)
    routing = Routing.of_recipe(recipe)
    check_routing(routing, problems)
    check_objective(recipe.loss, recipe.rollout)
    require_libraries(recipe, routing)
    teachers = {teacher.table: config for teacher, config in routing.opened.items()}
    models: dict[str, ModelConfig] = {"student": recipe.student, **teachers}
    folders = {table: local_folder(model, problems) for table, model in models.items()}
    for table, model, backend in local_models(recipe):
        if (folder := folders[table]) is None:
            continue
        dtype = getattr(model, "dtype", None) or recipe.trainer.dtype
        with in_table(table):
            net = shapes(folder)
            if table == "student" or backend_of(backend).by_head:
                check_plain_head(net)
            check_backend(net, backend, dtype, trains=table == "student")
        if table == "student":
            round_student(net, recipe.student)
    lines = [f"{table}: {describe_model(model, folders[table])}" for table, model in models.items()]
    if (lora := recipe.student.lora) is not None:
        lines.insert(1, f"student: {describe_adapter(lora, folders['student'])}")
    lines += describe_tapes(routing)
    if (quantize := recipe.student.quantize) is not None:
        lines.insert(1, f"student: {quantize.work} while it learns")
    if (policy := recipe.policy_teacher) is not None:
        lines.append(
            f"teacher: the policy itself, with the hint {policy.hint!r}; weights: {policy.update}"
        )
    lines += describe_loss(recipe.loss)
    if recipe.loss.reads_hidden_states:
        lines += describe_hidden_states(
            recipe.trainer, recipe.rollout.max_tokens, routing.opened, folders
        )
    lines += describe_data(problems, routing if recipe.teachers and recipe.asks_teacher else None)
    lines += describe_steps(recipe.trainer, recipe.rollout, recipe.eval, len(problems.held_out))
    lines += check_sequences(recipe, problems, routing, folders)
    return lines + [f"warning: {warning}" for warning in sampling_warnings(recipe.rollout)]


def require_libraries(recipe: Recipe, routing: Routing) -> None:
    """Refuse a run whose libraries are missing, naming all of them with their pip lines."""
    student = recipe.rollout.backend
    backends = {student}
    if recipe.asks_teacher:
        backends |= {teacher.runs_on(student) for teacher in routing.opened.values()}
    libraries = {"transformers", "rich", "matplotlib"}
    libraries |= {library for name in backends for library in backend_of(name).libraries}
    libraries |= {"tensorboard"} if recipe.logging.tensorboard else set()
    missing = sorted(name for name in libraries if find_spec(name) is None)
    if missing:
        raise ImportError(f"this recipe needs {', '.join(missing)}: {how_to_install()}")
    for data in recipe.problem_sources.values():
        require_library(data.metric)
    if recipe.student.lora is not None:
        import_peft()
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
    if isinstance(model, TeacherConfig) and model.base:
        return "the student's own weights, without its adapter"
    if model.prepare is None:
        return f"{folder}" if folder else f"{model.model} (hub id, loaded when the run starts)"
    if folder is not None:
        origin = "comes with the package:" if is_shipped(folder) else "cached in"
        return f"prepared, {origin} {folder}"
    return f"to be prepared now: {model.prepare.work}"


def describe_adapter(lora: LoraConfig, folder: Path | None) -> str:
    """Return an adapter's rank and layers, and how many numbers it has where the model is here."""
    layers = ""
    if folder is not None:
        adapted = layers_to_adapt(shapes(folder), lora.targets).values()
        size = lora.rank * sum(layer.in_features + layer.out_features for layer in adapted)
        layers = f" ({len(adapted)} layers, {size:,} numbers)"
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    begins = "" if lora.start is None else f", which begins as {lora.start}"
    return f"an adapter of rank {lora.rank}, alpha {lora.alpha}, on {targets}{layers}{begins}"


def describe_tapes(routing: Routing) -> list[str]:
    """Return a line for each teacher with a tape."""
    words = {True: "alone answers, and no teacher is opened", False: "keeps its answers"}
    return [
        f"{teacher.table}: the tape {config.tape} {words[config.tape_only]}"
        for teacher, config in routing.teachers.items()
        if config.tape is not None
    ]


def describe_loss(loss: LossConfig) -> list[str]:
    """Return the loss with its channels and needs, and K."""
    lines = []
    for section, (part, needs) in loss.needs_by_section().items():
        needed = ", ".join(sorted(needs)) or "nothing more"
        lines.append(f"[{section}] {part.type}: needs {needed}")
    if loss.support is not None:
        size = "the whole vocabulary" if loss.support.k == "full" else f"K = {loss.support.k}"
        lines.append(f"support: {size}, chosen by the {loss.support.chosen_by}")
    return lines


def describe_hidden_states(
    trainer: TrainerConfig,
    max_tokens: int,
    teachers: Mapping[TeacherId, TeacherConfig],
    folders: Mapping[str, Path | None],
) -> list[str]:
    """Return one line per teacher on this machine on the size of its hidden states and head."""
    lines = []
    for teacher, config in teachers.items():
        folder = folders[teacher.table]
        if folder is None:
            continue
        sizes = read_config(folder).get_text_config()
        bytes_each = 4 if (config.dtype or trainer.dtype) == "float32" else 2
        per_token = sizes.hidden_size * bytes_each
        head = per_token * sizes.vocab_size
        step = per_token * trainer.batch_size * max_tokens
        lines.append(
            f"[{teacher.table}] hidden states: {per_token:,} bytes per token, at most "
            f"{step / 1e6:,.1f} MB per step; output head {sizes.vocab_size:,} x "
            f"{sizes.hidden_size:,}, {head / 1e6:,.1f} MB"
        )
    return lines


def describe_data(problems: ProblemSet, routing: Routing | None) -> list[str]:
    """Return the number of problems of each environment, and with a routing who scores them."""
    practice = Counter(problem.environment for problem in problems.practice)
    held_out = Counter(problem.environment for problem in problems.held_out)

    def scored_by(name: str) -> str:
        if routing is None:
            return ""
        shares = routing.of_environment(name).items()
        return f"; scored by {' + '.join(f'{w:g} {t.name}' for t, w in shares)}"

    lines = []
    for name, data in problems.sources.items():
        line = f"{name}: {practice[name]} problems to train on, {held_out[name]} held out"
        if name in problems.left_out:
            line += f", {problems.left_out[name]} rows left out (clean)"
        if data.graded:
            line += f"; {TITLES[data.metric]}, {signature(data.metric)}"
        line += scored_by(name)
        if routing is not None and data.teacher_key is not None:
            line += f", or by the teacher that a row names in {data.teacher_key!r}"
        lines.append(line)
    by_id = problems.by_id if isinstance(problems, Sources) else {}
    return lines + [
        f"{name}: {practice[name]} tasks of {environment.id} to train on, {held_out[name]} to "
        f"evaluate{scored_by(name)}"
        for name, environment in by_id.items()
    ]


def describe_steps(
    trainer: TrainerConfig, rollout: RolloutConfig, evaluation: EvalConfig, held_out: int
) -> list[str]:
    """Return steps, batches, the token budget, and what happens between the steps."""
    size, kl_size = (min(held_out, wanted) for wanted in (evaluation.size, evaluation.kl_size))
    prompts = trainer.batch_size // rollout.group_size
    rollouts = trainer.steps * trainer.batch_size
    every = f"every {evaluation.every} steps" if evaluation.every else "before and after training"
    lines = [
        f"rollouts: {rollout.backend}, at most {rollout.max_tokens} new tokens each",
        f"steps: {trainer.steps} of {prompts} prompts x {rollout.group_size} rollouts; "
        f"{rollouts:,} rollouts, at most {rollouts * rollout.max_tokens:,} new tokens",
        f"evaluation: {every}, {size} problems, {kl_size} for the reverse KL",
    ]
    if rollout.ahead:
        lines.append(
            f"ahead: a step trains on what the student sampled up to {rollout.ahead} steps before"
        )
    if (until := trainer.until) is not None:
        lines.append(
            f"ends earlier where {until.metric} is no better at {until.plateau} evaluations"
        )
    return lines


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
    looked = tokenized.look(answers=recipe.rollout.trains_on_data)
    lines += [f"warning: {warning}" for warning in looked]
    rollout = recipe.rollout.within(
        context_of(recipe.rollout, tokenized, local_models(recipe), folders)
    )
    setup_loss_fn(resolve(recipe.loss, tokenizer))
    if recipe.replay.path is not None:
        read_pairs(recipe.replay.path, problems.sources, tokenizer, tokenized.ends)
    held_out = problems.held_out[: recipe.eval.largest]
    limits = context(rollout.backend, rollout, folder)
    check_prompts(tokenized.prompt, problems.practice, held_out, recipe.rollout, sampler=limits)
    student = read_config(folder).get_text_config()
    teacher = recipe.teacher
    if teacher is not None and teacher.policy is not None and teacher.on_overflow == "error":
        # The weights are not read: "live" copies none.
        live = teacher.policy.model_copy(update={"update": "live"})
        policy = PolicyTeacher(live, problems.sources, nn.Module(), tokenizer)
        positions = window_of(student) or rollout.context()
        scored = [*filter(problems.is_scored, held_out)]
        check_hinted_prompts(policy, problems.practice, scored, rollout, positions)
    longest = max(len(tokenized.prompt(problem)) for problem in (*problems.practice, *held_out))
    lines.append(
        f"longest prompt: {longest} tokens, {longest + rollout.max_tokens} with a full completion; "
        f"the context is {rollout.max_model_len}"
    )
    scored_problems, evaluated = map(routing.route, (problems.practice, held_out))
    prompts = own_prompts(readers, tokenized, folders)
    for scorer, config in readers.items():
        own = prompts.get(scorer)
        room = rollout if own is None else rollout.within(rollout.context() + own.surplus)
        limits = context(config.runs_on(rollout.backend), room, folders[scorer.table])
        limits = binding(limits, config.on_overflow)
        support_size, _ = recipe.loss.asked_of_teacher
        if config.tokenizer == "own":  # its window counts its own tokens: the preflight looks
            lines.append(f"[{scorer.table}] has a tokenizer of its own: not compared yet")
            continue
        with naming(scorer, among=routing.teachers):
            asked = (scored_problems[scorer], evaluated[scorer])
            prompt_of = tokenized.prompt if own is None else own.of
            check_lengths(tokenized, *asked, recipe.rollout, limits, scorer, prompt_of)
            lines += compare_with_teacher(
                tokenizer, student.vocab_size, folders[scorer.table], support_size
            )
    return lines


def compare_with_teacher(
    tokenizer: Any, vocab_size: int, folder: Path | None, support_size: int | Literal["full"]
) -> list[str]:
    """Compare the student's tokenizer and head with those of a teacher's directory, if any."""
    teacher_tokenizer = None if folder is None else load_tokenizer(folder)
    if folder is None or teacher_tokenizer is None:
        return []
    limits = Limits(vocab_size=read_config(folder).get_text_config().vocab_size)
    check_tokenizers(tokenizer, teacher_tokenizer)
    warnings = check_vocabularies(vocab_size, limits, len(tokenizer), support_size)
    return [f"warning: {warning}" for warning in warnings]


def context(backend: str, config: RolloutConfig, model: Path | None) -> Limits:
    """Return the context that the recipe gives a model. A server has one of its own."""
    if backend_of(backend).serves:
        return Limits(None)
    return Limits(config.context() if model is None else room_of(backend, model, config.context()))
