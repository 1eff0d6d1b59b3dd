"""Open the models of a recipe: the student and its sampler, the teachers and their scorers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    checkpoint_layers,
    load_student,
    load_tokenizer,
    shapes,
)
from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.lora.views import base_of
from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.backends.transformers import fix_frequencies, window, window_of
from prime_composer.local.context import RESERVED, context_of
from prime_composer.local.engine import Engine
from prime_composer.local.requirements import check_backend, in_table
from prime_composer.local.sources import ProblemsAndTasks
from prime_composer.local.tokenized_problems import TokenizedProblems, with_ends
from prime_composer.local.weight_sync import TOLERANCES
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import ModelConfig, Recipe, RolloutConfig, TeacherConfig
from prime_composer.recipe.watchers import ChecksConfig
from prime_composer.samplers.registry import BackendSpec, open_sampler
from prime_composer.step.replay import read_pairs
from prime_composer.teachers.compatibility import tokenizer_hash
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.own_prompt import PLAIN, OwnPromptScorer, TeacherPrompts
from prime_composer.teachers.own_tokenizer import with_own_tokenizer
from prime_composer.teachers.policy import PolicyTeacher
from prime_composer.teachers.registry import open_scorer
from prime_composer.teachers.tape.opening import tape_alone, with_tape
from prime_composer.teachers.tokenizer_pair import ends_of, own_tokenizer_of
from prime_composer.teachers.transformers import TransformersScorer
from prime_composer.tiny_models.rounding import LatentWeights, layers_to_round

if TYPE_CHECKING:
    from prime_composer.environments.runner import Environments

SCORED_AT_ONCE = 4  # Sequences of a teacher that only scores, on a CPU: prefill takes all cores


def _student_spec(
    recipe: Recipe,
    rollout: RolloutConfig,
    model: str | Path,
    ends: tuple[int, ...],
    resumes: bool,
) -> BackendSpec:
    """Return how to open the student's sampler."""
    return BackendSpec(
        rollout,
        "[rollout]",
        rollout.backend,
        model,
        dtype=recipe.trainer.dtype,
        max_model_len=rollout.context(),
        sequences=recipe.side_by_side,
        ends=ends,
        resumes=resumes,
    )


def teacher_spec(
    teacher: TeacherConfig, student: BackendSpec, model: str | Path, samples: bool, table: str
) -> BackendSpec:
    """Return how to open a teacher's scorer, whose table has this name."""
    backend, ends = teacher.runs_on(student.backend), student.ends
    if teacher.tokenizer == "own":
        ends = tuple(ends_of(model) or ()) or None
    return BackendSpec(
        teacher,
        f"[{table}]",
        backend,
        model,
        dtype="float32" if teacher.base else teacher.dtype or student.dtype,
        max_model_len=room_of(backend, model, student.max_model_len),
        sequences=student.sequences if samples else min(student.sequences, SCORED_AT_ONCE),
        ends=ends,
        resumes=student.resumes,
    )


def room_of(backend: str, model: str | Path, context: int) -> int:
    """Return the context of a model on this machine: the run's, within the model's own window."""
    return min(context, backend_of(backend).within_positions and window(model) or context)


@runtime_checkable
class ServedScorer(Protocol):
    """A scorer whose model is on a server."""

    @property
    def dtype(self) -> str | None:
        """Number format of the server's weights and activations; None where it does not say."""
        ...


def open_engine(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    status: Callable[[str], None],
    student_dir: Path | None = None,
    *,
    teachers_alone: bool = False,
) -> Engine:
    """Load the student for training, and open its sampler and the teachers' scorers.

    Where one of them cannot be opened, those that are open already are closed. A student from
    ``student_dir``, a checkpoint, makes servers be waited for in full: they may have been restarted
    with the run. With ``teachers_alone`` the student has no weights, and samples nothing.
    """
    origin = model_origin(recipe.student, "student", paths)
    resumes = student_dir is not None
    with ExitStack() as opened:
        load = _student_without_weights if teachers_alone else load_student
        lora = None if teachers_alone else recipe.student.lora
        weights = student_dir if student_dir is not None and lora is None else origin
        model, tokenizer = _load_student(load, weights, student_dir or origin, status)
        latent = None if teachers_alone else round_student(model, recipe.student)
        adapter = None
        if lora is not None:
            seed, merge = recipe.trainer.seed, recipe.checkpoint.merge
            adapter = LoraAdapter.of_model(model, lora, origin, seed, merge, checkpoint=student_dir)
        if recipe.trainer.gradient_checkpointing:
            checkpoint_layers(model)
        tokenized = TokenizedProblems(problems, tokenizer)
        readers = Routing.of_recipe(recipe).teachers if recipe.asks_teacher else {}
        tokenized, said = with_ends(tokenized, recipe.rollout.stop, origin, readers, paths)
        for line in said:
            status(line)
        rollout = recipe.rollout.within(context_of(recipe, tokenized, paths))
        environments = None
        if isinstance(problems, ProblemsAndTasks):
            # Not a checkpoint: the library chooses a renderer by the name of the model.
            environments = _start_environments(problems, str(origin), recipe, readers, status)
            opened.callback(environments.close)
        spec = _student_spec(recipe, rollout, origin, tokenized.ends.ids, resumes)
        sampler = NoSampler() if teachers_alone else _open_sampler(model, spec, status)
        opened.callback(sampler.close)
        # Those of a server are its own context's, which may be longer.
        fix_frequencies(model, sampler.limits.max_model_len or rollout.context())
        if resumes or latent is not None or (lora is not None and lora.start is not None):
            sampler.update_weights(model)
        engine = Engine(
            tokenized,
            recipe.loss,
            model,
            sampler,
            student_spec=spec,
            environments=environments,
            context=rollout.context(),
            latent=latent,
            adapter=adapter,
        )
        if recipe.teacher is not None and (policy := recipe.teacher.policy) is not None:
            engine.policy_teacher = PolicyTeacher(policy, problems.sources, model, tokenizer)
            engine.policy_overflow = recipe.teacher.on_overflow
            engine.policy_room = min(engine.context, window_of(model.config) or engine.context)
        elif recipe.asks_teacher:
            routing, samples = Routing.of_recipe(recipe), recipe.rollout.teacher_samples
            prompts = _set_specs(engine, routing, spec, paths, samples)
            scorers = _open_scorers(engine, routing, status, opened)
            _open_tapes(engine, routing, scorers, recipe.checks, status, opened)
            _wrap_own_readers(engine, routing, scorers, prompts, status)
            engine.teachers = Teachers(scorers, routing)
            if recipe.reference is not None:
                engine.reward_scale = recipe.reference.reward_scale
        if environments is not None:
            environments.room = conversation_room(engine.context, engine.teachers)
        if recipe.loss.reads_pairs:
            channels = recipe.loss.channels
            if any(one.on_pairs and "ref_logprobs" in one.loss.needs for one in channels):
                engine.reference = _frozen_start(engine, recipe.student, origin)
            if (path := recipe.replay.path) is not None:
                engine.pairs = read_pairs(path, problems.sources, tokenizer, tokenized.ends)
        opened.pop_all()
    return engine


def _open_sampler(student: nn.Module, spec: BackendSpec, status: Callable[[str], None]) -> Sampler:
    """Open the student's sampler, whose backend has to run such a model."""
    status(f"opening the {spec.backend} sampler")
    with in_table("student"):
        check_backend(student, spec.backend, spec.dtype, trains=True)
    return open_sampler(spec, status)


class NoSampler:
    """The sampler of an engine that only scores."""

    limits = Limits()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        raise NotImplementedError("this engine only scores")

    def update_weights(self, model: nn.Module) -> None:
        raise NotImplementedError("this engine only scores")

    def close(self) -> None:
        """Do nothing."""


def _student_without_weights(model: str | Path) -> tuple[nn.Module, Any]:
    return shapes(model), load_tokenizer(model)


def _load_student(
    load: Callable[[str | Path], tuple[nn.Module, Any]],
    model: str | Path,
    tokenizer_of_model: str | Path,
    status: Callable[[str], None],
) -> tuple[nn.Module, Any]:
    """Return the student for training, and its tokenizer, which a checkpoint may have apart."""
    status(f"loading the student from {model}")
    with in_table("student"):
        student, tokenizer = load(model)
        if tokenizer_of_model != model:
            tokenizer = load_tokenizer(tokenizer_of_model)
    if tokenizer is None:
        raise ModelUnavailable(f"[student] {model} has no tokenizer; add its files")
    return student, tokenizer


def round_student(model: nn.Module, config: StudentConfig) -> LatentWeights | None:
    """Round a student that trains quantized; return the weights behind it, which a form has not."""
    if config.quantize is None:
        return None
    try:
        if next(model.parameters()).is_meta:
            layers_to_round(model, config.quantize)
            return None
        return LatentWeights.of_model(model, config.quantize)
    except ValueError as error:
        raise ModelUnavailable(f"[student] {error}") from None


def _frozen_start(engine: Engine, config: StudentConfig, origin: str | Path) -> nn.Module:
    """Return the student as it is before the first step, which does not train."""
    if config.lora is not None and config.lora.start is None:
        return base_of(engine.model)
    start, _ = load_student(origin)
    fix_frequencies(start, engine.sampler.limits.max_model_len or engine.context)
    round_student(start, config)
    if config.lora is not None:
        LoraAdapter.of_model(start, config.lora, origin, seed=0)
    return start.requires_grad_(False)


def _start_environments(
    problems: ProblemsAndTasks,
    student: str,
    recipe: Recipe,
    readers: Mapping[TeacherId, TeacherConfig],
    status: Callable[[str], None],
) -> "Environments":
    from prime_composer.environments.runner import Environments

    status("starting the environments")
    found = Environments(problems.environments, student, recipe.rollout.renderer, status)
    found.reads_messages = any(teacher.prompt is not None for teacher in readers.values())
    return found


def _set_specs(
    engine: Engine,
    routing: Routing,
    student: BackendSpec,
    paths: Mapping[str, Path],
    samples: bool,
) -> dict[TeacherId, TeacherPrompts]:
    """Set how the teachers that are models of their own are opened; return what they read."""
    prompts = own_prompts(routing.teachers, engine.problems, paths)
    room = {teacher: student.max_model_len + own.surplus for teacher, own in prompts.items()}
    engine.teacher_specs = {
        teacher: teacher_spec(
            config,
            replace(student, max_model_len=room.get(teacher, student.max_model_len)),
            model_origin(config, teacher.table, paths),
            samples,
            teacher.table,
        )
        for teacher, config in routing.opened.items()
    }
    return prompts


def own_prompts(
    teachers: Mapping[TeacherId, TeacherConfig],
    tokenized: TokenizedProblems,
    folders: Mapping[str, Path | None],
) -> dict[TeacherId, TeacherPrompts]:
    """Return the prompts of teachers with the student's tokens that read their own.

    ``folders`` has the directories of prepared models, by table.
    """
    prompts = {}
    for teacher, config in teachers.items():
        if config.prompt is not None and config.tokenizer == "shared":
            model, known = config.model or folders.get(teacher.table), None
            with suppress(ModelUnavailable):
                known = None if model is None else load_tokenizer(model)
            if known is None:  # its tokens are the student's, its template is not
                known = copy.copy(tokenized.tokenizer)
                known.chat_template = None
            prompts[teacher] = TeacherPrompts(
                tokenized.problem_set, known, tokenized.prompt, teacher.table, config.prompt
            )
    return prompts


def _open_tapes(
    engine: Engine,
    routing: Routing,
    scorers: dict[TeacherId, Scorer],
    checks: ChecksConfig,
    status: Callable[[str], None],
    opened: ExitStack,
) -> None:
    """Let teachers keep their answers on tapes, and tapes answer where no teacher is opened."""
    taping = {one: config for one, config in routing.teachers.items() if config.tape is not None}
    student = tokenizer_hash(engine.problems.tokenizer) if taping else ""
    for teacher, config in taping.items():
        status(f"opening the {teacher.display}'s tape {config.tape}")
        own, ends = None, engine.problems.ends.ids
        if config.tokenizer == "own":
            origin = tokenizer_origin(engine, teacher, config)
            own = tokenizer_hash(own_tokenizer_of(origin, teacher.table))
            ends = tuple(ends_of(origin) or ())
        tokenizers = (student, own)
        if config.tape_only:
            taped = tape_alone(config, teacher.table, tokenizers, engine.context, status, ends)
        else:
            scorer, spec = scorers[teacher], engine.teacher_specs[teacher]
            dtype = scorer.dtype if isinstance(scorer, ServedScorer) else spec.dtype
            limit = checks.tolerance or TOLERANCES[dtype or "bfloat16"]
            taped = with_tape(scorer, spec, tokenizers, limit, checks.every > 0, status)
        scorers[teacher] = taped
        opened.callback(taped.close)
    in_order = {teacher: scorers[teacher] for teacher in routing.teachers}
    scorers.clear()
    scorers.update(in_order)  # mixtures add up in this order


def _wrap_own_readers(
    engine: Engine,
    routing: Routing,
    scorers: dict[TeacherId, Scorer],
    prompts: Mapping[TeacherId, TeacherPrompts],
    status: Callable[[str], None],
) -> None:
    """Let teachers with prompts or tokenizers of their own score the student's tokens."""
    for teacher, own in prompts.items():
        scorers[teacher] = OwnPromptScorer(scorers[teacher], own)
    for teacher, config in routing.teachers.items():
        if config.tokenizer == "own":
            status(f"comparing the tokenizers of student and {teacher.display}")
            scorers[teacher] = with_own_tokenizer(
                scorers[teacher],
                tokenizer_origin(engine, teacher, config),
                engine.problems.problem_set,
                engine.problems.tokenizer,
                engine.problems.prompt,
                engine.loss,
                engine.vocab_size,
                teacher.table,
                routing.route(engine.problems.problem_set.practice)[teacher],
                engine.problems.ends.answer,
                config.prompt or PLAIN,
            )


def tokenizer_origin(engine: Engine, teacher: TeacherId, config: TeacherConfig) -> str | Path:
    """Return where a teacher's tokenizer is, also where its tape alone answers."""
    if teacher in engine.teacher_specs:
        return engine.teacher_specs[teacher].model
    assert config.model is not None, "the recipe names it"
    return config.model


def tokenizer_of(spec: BackendSpec) -> Any | None:
    """Return a teacher's tokenizer; None where neither it nor a server's model is here."""
    try:
        return load_tokenizer(spec.model)
    except ModelUnavailable:
        if not spec.serves:
            raise
        return None  # the server's name for a model that is on another machine


def _open_scorers(
    engine: Engine,
    routing: Routing,
    status: Callable[[str], None],
    opened: ExitStack,
) -> dict[TeacherId, Scorer]:
    """Open the teachers' scorers, and leave to ``opened`` to close them."""
    scorers: dict[TeacherId, Scorer] = {}
    for teacher, spec in engine.teacher_specs.items():
        if routing.teachers[teacher].base and engine.adapter is not None:
            status(f"the {teacher.display} is the student without its adapter")
            scorers[teacher] = TransformersScorer(
                base_of(engine.model),
                max_model_len=spec.max_model_len,
                source=spec.model,
                eos_token_ids=spec.ends,
            )
            continue
        status(f"opening the {teacher.display}'s {spec.backend} scorer")
        with in_table(teacher.table):
            scorer = open_scorer(spec, status)
        opened.callback(scorer.close)
        scorers[teacher] = scorer
        head = getattr(scorer, "head_dtype", None)
        head = "" if head is None else f", its output head in {head}"
        if isinstance(scorer, ServedScorer):
            answers = f"answers in {scorer.dtype}{head}"
            if scorer.dtype is None:
                answers = "has no scoring plugin, and does not say in which precision it answers"
            status(f"the {teacher.display}'s server {answers}")
        elif head:
            status(f"the {teacher.display} answers in {spec.dtype}{head}")
    return scorers


def conversation_room(max_model_len: int, teachers: Teachers | None) -> int:
    """Return the most tokens of a conversation that every model of a run can read."""
    rooms = [max_model_len]
    if teachers is not None:
        for teacher, scorer in teachers.scorers.items():
            limit = scorer.limits.max_model_len
            if limit is not None and teachers.routing.teachers[teacher].on_overflow == "error":
                rooms.append(limit - RESERVED["teacher's scorer"])
    return min(rooms)


def model_origin(config: ModelConfig, table: str, paths: Mapping[str, Path]) -> str | Path:
    """Return a model's directory or hub id. ``paths`` has the prepared ones, by table."""
    return paths[table] if config.model is None else config.model
