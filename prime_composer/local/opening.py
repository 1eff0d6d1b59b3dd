"""Open the models of a recipe: the student and its sampler, the teachers and their scorers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from prime_composer.contract import given
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
from prime_composer.recipe.schema import ModelConfig, Recipe, TeacherConfig
from prime_composer.samplers.registry import BackendSpec, open_sampler
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

SCORED_AT_ONCE = 4  # Sequences of a teacher that only scores, on a CPU: prefill takes all cores


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
    with ExitStack() as opened:
        opening = Opening(recipe, paths, status, opened, student_dir, teachers_alone)
        engine = opening.student(problems)
        if recipe.teacher is not None and (policy := recipe.teacher.policy) is not None:
            tokenizer, context = engine.problems.tokenizer, engine.context
            engine.policy_teacher = PolicyTeacher(policy, problems.sources, engine.model, tokenizer)
            engine.policy_overflow = recipe.teacher.on_overflow
            engine.policy_room = min(context, window_of(engine.model.config) or context)
        elif recipe.asks_teacher:
            opening.teachers(engine)
        if engine.environments is not None:
            engine.environments.room = conversation_room(engine.context, engine.teachers)
        opened.pop_all()
    return engine


@dataclass
class Opening:
    """A recipe's models while they are opened, and ``opened``, which closes them."""

    recipe: Recipe
    paths: Mapping[str, Path]
    status: Callable[[str], None]
    opened: ExitStack
    student_dir: Path | None  # the checkpoint of a resumed run
    teachers_alone: bool

    @property
    def origin(self) -> str | Path:
        """Where the student was before the run."""
        return model_origin(self.recipe.student, "student", self.paths)

    def student(self, problems: ProblemSet) -> Engine:
        """Open the student, its sampler, and the environments that it plays."""
        recipe, origin = self.recipe, self.origin
        resumes = self.student_dir is not None
        model, tokenizer, adapter = self._load_student()
        latent = None if self.teachers_alone else round_student(model, recipe.student)
        if recipe.trainer.gradient_checkpointing:
            checkpoint_layers(model)
        readers = Routing.of_recipe(recipe).teachers if recipe.asks_teacher else {}
        tokenized, said = with_ends(
            TokenizedProblems(problems, tokenizer), recipe.rollout.stop, origin, readers, self.paths
        )
        for line in said:
            self.status(line)
        rollout = recipe.rollout.within(context_of(recipe, tokenized, self.paths))
        environments = None
        if isinstance(problems, ProblemsAndTasks):
            from prime_composer.environments.runner import Environments

            self.status("starting the environments")
            # Not a checkpoint: the library chooses a renderer by the name of the model.
            environments = Environments(
                problems.environments, str(origin), recipe.rollout.renderer, self.status
            )
            environments.reads_messages = any(one.prompt is not None for one in readers.values())
            self.opened.callback(environments.close)
        spec = BackendSpec(
            rollout,
            "[rollout]",
            rollout.backend,
            origin,
            dtype=recipe.trainer.dtype,
            max_model_len=rollout.context(),
            sequences=recipe.side_by_side,
            ends=tokenized.ends.ids,
            resumes=resumes,
        )
        sampler: Sampler = NoSampler()
        if not self.teachers_alone:
            self.status(f"opening the {spec.backend} sampler")
            with in_table("student"):
                check_backend(model, spec.backend, spec.dtype, trains=True)
            sampler = open_sampler(spec, self.status)
        self.opened.callback(sampler.close)
        # Those of a server are its own context's, which may be longer.
        fix_frequencies(model, sampler.limits.max_model_len or rollout.context())
        begun = adapter is not None and given(recipe.student.lora).start is not None
        rounded = latent is not None or recipe.student.load == "nf4"
        if resumes or rounded or begun:
            sampler.update_weights(model)
        return Engine(
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

    def _load_student(self) -> tuple[nn.Module, Any, LoraAdapter | None]:
        """Return the student for training, its tokenizer, and its adapter."""
        recipe, origin = self.recipe, self.origin
        lora = None if self.teachers_alone else recipe.student.lora
        # A checkpoint of an adapter has a tokenizer and no weights.
        weights = origin if lora is not None else self.student_dir or origin
        self.status(f"loading the student from {weights}")
        with in_table("student"):
            if self.teachers_alone:
                model, tokenizer = shapes(weights), load_tokenizer(weights)
            else:
                model, tokenizer = load_student(weights, recipe.student.load)
            if lora is not None and self.student_dir is not None:
                tokenizer = load_tokenizer(self.student_dir)
        if tokenizer is None:
            raise ModelUnavailable(f"[student] {weights} has no tokenizer; add its files")
        if lora is None:
            return model, tokenizer, None
        seed, merge = recipe.trainer.seed, recipe.checkpoint.merge
        adapter = LoraAdapter.of_model(
            model, lora, origin, seed, merge, checkpoint=self.student_dir
        )
        return model, tokenizer, adapter

    def teachers(self, engine: Engine) -> None:
        """Open the teachers that are models of their own, and their tapes."""
        recipe, routing = self.recipe, Routing.of_recipe(self.recipe)
        student = given(engine.student_spec)
        prompts = own_prompts(routing.teachers, engine.problems, self.paths)
        room = {one: student.max_model_len + own.surplus for one, own in prompts.items()}
        engine.teacher_specs = {
            teacher: teacher_spec(
                config,
                replace(student, max_model_len=room.get(teacher, student.max_model_len)),
                model_origin(config, teacher.table, self.paths),
                recipe.rollout.teacher_samples,
                teacher.table,
            )
            for teacher, config in routing.opened.items()
        }
        scorers = {
            teacher: self._scorer(teacher, spec, engine, routing)
            for teacher, spec in engine.teacher_specs.items()
        }
        for teacher, config in routing.teachers.items():
            if config.tape is not None:
                scorers[teacher] = self._taped(teacher, config, engine, scorers.get(teacher))
        # Mixtures add up in this order.
        scorers = {teacher: scorers[teacher] for teacher in routing.teachers}
        for teacher, own in prompts.items():
            scorers[teacher] = OwnPromptScorer(scorers[teacher], own)
        for teacher, config in routing.teachers.items():
            if config.tokenizer == "own":
                self.status(f"comparing the tokenizers of student and {teacher.display}")
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
        engine.teachers = Teachers(scorers, routing)
        if recipe.reference is not None:
            engine.reward_scale = recipe.reference.reward_scale

    def _scorer(
        self, teacher: TeacherId, spec: BackendSpec, engine: Engine, routing: Routing
    ) -> Scorer:
        """Open a teacher's scorer, and say in which precision it answers."""
        if routing.teachers[teacher].base and engine.adapter is not None:
            self.status(f"the {teacher.display} is the student without its adapter")
            return TransformersScorer(
                base_of(engine.model),
                max_model_len=spec.max_model_len,
                source=spec.model,
                eos_token_ids=spec.ends,
            )
        self.status(f"opening the {teacher.display}'s {spec.backend} scorer")
        with in_table(teacher.table):
            scorer = open_scorer(spec, self.status)
        self.opened.callback(scorer.close)
        head = getattr(scorer, "head_dtype", None)
        head = "" if head is None else f", its output head in {head}"
        if hasattr(scorer, "dtype"):  # that of a server
            answers = f"answers in {scorer.dtype}{head}"
            if scorer.dtype is None:
                answers = "has no scoring plugin, and does not say in which precision it answers"
            self.status(f"the {teacher.display}'s server {answers}")
        elif head:
            self.status(f"the {teacher.display} answers in {spec.dtype}{head}")
        return scorer

    def _taped(
        self, teacher: TeacherId, config: TeacherConfig, engine: Engine, scorer: Scorer | None
    ) -> Scorer:
        """Let a teacher keep its answers on a tape, or the tape answer where none is opened."""
        self.status(f"opening the {teacher.display}'s tape {config.tape}")
        own, ends = None, engine.problems.ends.ids
        if config.tokenizer == "own":
            origin = tokenizer_origin(engine, teacher, config)
            own = tokenizer_hash(own_tokenizer_of(origin, teacher.table))
            ends = tuple(ends_of(origin) or ())
        tokenizers = (tokenizer_hash(engine.problems.tokenizer), own)
        if scorer is None:
            context = engine.context
            taped = tape_alone(config, teacher.table, tokenizers, context, self.status, ends)
        else:
            spec, checks = engine.teacher_specs[teacher], self.recipe.checks
            dtype = getattr(scorer, "dtype", spec.dtype) or "bfloat16"
            limit = checks.tolerance or TOLERANCES[dtype]
            taped = with_tape(scorer, spec, tokenizers, limit, checks.every > 0, self.status)
        self.opened.callback(taped.close)
        return taped


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
