"""Open the models of a recipe: the student and its sampler, the teachers and their scorers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from torch import nn

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import (
    ModelUnavailable,
    checkpoint_layers,
    lm_head_weight,
    load_student,
    load_tokenizer,
    read_eos_token_ids,
)
from prime_composer.backends.protocols import Sampler, Scorer
from prime_composer.contract import Scores
from prime_composer.local.run_dir.model_check import in_table, local_models
from prime_composer.local.sources import Sources
from prime_composer.local.tokenized_problems import (
    TeacherPrompts,
    TokenizedProblems,
    context_of,
)
from prime_composer.losses import LossConfig
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import ModelConfig, Recipe, RolloutConfig, TeacherConfig
from prime_composer.samplers.registry import BackendSpec, open_sampler
from prime_composer.scoring.shared_vocabulary import MOST_PADDING, lacking
from prime_composer.step.batch import Pair, Sample, trained_logprobs, with_scores
from prime_composer.step.overflow import Rule, fit
from prime_composer.step.replay import read_pairs
from prime_composer.teachers.compatibility import PreflightError, alien_id
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer, make_pair
from prime_composer.teachers.policy import PolicyTeacher, students_choice
from prime_composer.teachers.registry import open_scorer
from prime_composer.tiny_models.rounding import LatentWeights

if TYPE_CHECKING:
    from prime_composer.environments.runner import Environments

COUNTED_PROBLEMS = 2000
"""Problems on whose texts two tokenizers are compared."""

SCORED_AT_ONCE = 4
"""Sequences that a teacher that only scores has cache for, on a CPU. Prefill takes all cores with
one already, and the cache of a large model takes memory."""


def student_spec(
    rollout: RolloutConfig, model: str | Path, dtype: str, sequences: int
) -> BackendSpec:
    """Return how to open the student's sampler, which samples ``sequences`` at once at most."""
    return BackendSpec(
        backend=rollout.backend,
        model=model,
        dtype=dtype,
        max_model_len=rollout.context(),
        sequences=sequences,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        url=rollout.url,
        api_key_var=rollout.api_key_var,
        wait=rollout.wait,
        starting="wait" in rollout.model_fields_set,
        timeout=rollout.timeout,
        section="[rollout]",
        weights_dir=rollout.weights_dir,
    )


def teacher_spec(
    teacher: TeacherConfig, student: BackendSpec, model: str | Path, samples: bool, table: str
) -> BackendSpec:
    """Return how to open a teacher's scorer, whose table has this name.

    ``samples`` says whether it samples sequences as well.
    """
    return BackendSpec(
        backend=teacher.runs_on(student.backend),
        model=model,
        dtype=teacher.dtype or student.dtype,
        max_model_len=student.max_model_len,
        sequences=student.sequences if samples else min(student.sequences, SCORED_AT_ONCE),
        gpu_memory_utilization=teacher.gpu_memory_utilization,
        url=teacher.url,
        api_key_var=teacher.api_key_var,
        wait=teacher.wait,
        starting="wait" in teacher.model_fields_set,
        timeout=teacher.timeout,
        section=f"[{table}]",
        head=teacher.head,
    )


@runtime_checkable
class Served(Protocol):
    """A scorer whose model is on a server."""

    @property
    def dtype(self) -> str | None:
        """Number format of the server's weights and activations; None where it does not say."""
        ...


@dataclass(frozen=True)
class Scored:
    """What the teacher made of a step's samples.

    Attributes:
        samples: those that train, with scores where the loss needs a teacher.
        without_hint: how many were left out, because a policy teacher has no hint for them.
        cut: of how many the teacher's window holds the head alone.
        dropped: how many were left out, because they do not fit into the teacher's window.
        padding_ids: how many of their ids a teacher's head lacks; None where none can.
        metrics: of teachers with a tokenizer of their own.
    """

    samples: list[Sample]
    without_hint: int = 0
    cut: int = 0
    dropped: int = 0
    padding_ids: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Overflow(TypedDict):
    """``cut`` and ``dropped`` of ``Scored``."""

    cut: int
    dropped: int


def overflow(samples: Sequence[Sample], fitted: Sequence[Sample | None]) -> Overflow:
    """Return ``cut`` and ``dropped`` of ``Scored``.

    Args:
        samples: before they were fitted into their teachers' windows.
        fitted: after that.
    """
    dropped = sum(sample is None for sample in fitted)
    same = sum(after is before for before, after in zip(samples, fitted, strict=True))
    return {"cut": len(samples) - dropped - same, "dropped": dropped}


@dataclass
class Engine:
    """The open models of a run.

    Attributes:
        problems: the recipe's problems, in the student's tokens.
        loss: the recipe's loss, which decides what the teachers score.
        model: the student that trains, in float32.
        sampler: samples the student's rollouts.
        teachers: score rollouts with models of their own, and may sample; None where neither the
            loss nor ``[rollout]`` needs one.
        reward_scale: lambda of G-OPD, with which the teachers' scores are extrapolated from the
            reference's; None without a ``[reference]``.
        policy_teacher: scores with the policy itself; None without ``[teacher.policy]``.
        policy_overflow: what to do with a rollout that its hint makes too long.
        policy_room: tokens that a policy teacher may read.
        teacher_specs: how the teachers were opened.
        reference: the frozen policy of the replay channel's loss, where that loss needs one.
        pairs: the preference pairs of a file.
        environments: the environments by id, running; None without one.
        context: longest sequence in tokens that the engines read.
        latent: the weights behind a student that stays rounded; None for any other.
    """

    problems: TokenizedProblems
    loss: LossConfig
    model: nn.Module
    sampler: Sampler
    teachers: Teachers | None = None
    reward_scale: float | None = None
    policy_teacher: PolicyTeacher | None = None
    policy_overflow: Rule = "error"
    policy_room: int = 0
    teacher_specs: Mapping[TeacherId, BackendSpec] = field(default_factory=dict)
    reference: nn.Module | None = None
    pairs: Sequence[Pair] = ()
    environments: "Environments | None" = None
    context: int = 0
    latent: LatentWeights | None = None

    @property
    def vocab_size(self) -> int:
        """Entries of the student's output head."""
        return lm_head_weight(self.model).shape[0]

    @property
    def head_sizes(self) -> set[int]:
        """Entries of the output heads of the student and its teachers, as far as they are known."""
        scorers = () if self.teachers is None else self.teachers.scorers.values()
        sizes = {self.vocab_size, *(scorer.limits.vocab_size for scorer in scorers)}
        return {size for size in sizes if size is not None}

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the loss compares whole vocabularies by the teachers' hidden states."""
        return self.loss.reads_hidden_states

    @property
    def may_overflow(self) -> bool:
        """Whether a teacher scores the head of a rollout that is too long, or drops it."""
        teachers = () if self.teachers is None else self.teachers.routing.teachers.values()
        rules = [self.policy_overflow, *(teacher.on_overflow for teacher in teachers)]
        return any(rule != "error" for rule in rules)

    def score(self, samples: Sequence[Sample]) -> Scored:
        """Return the samples with their teacher's scores; unchanged where the loss needs no
        teacher.

        A policy teacher leaves out the samples that it has no hint for.

        Raises:
            InvalidAnswer: a teacher lists an id that is no padding of the student's vocabulary.
            ValueError: a sample does not fit into its teacher's window, and its rule is "error".
        """
        if self.teachers is not None and self.loss.compares_with_teacher:
            fitted = self.fit(samples)
            kept = [sample for sample in fitted if sample is not None]
            rollouts = [sample.rollout for sample in kept]
            size, by_student = self.loss.asked_of_teacher
            shared, padding_ids = min(self.head_sizes), None
            if shared < self.vocab_size:
                padding_ids = sum(int(lacking(one.token_ids, shared).sum()) for one in rollouts)
            self.teachers.take_metrics()  # of checks and evaluations, which are no part of a step
            scores = self.teachers.score(
                rollouts,
                [sample.problem for sample in kept],
                size,
                students_choice(self.model, rollouts, size, shared) if by_student else None,
                self.reads_hidden_states,
            )
            self._check_ids(scores)
            if self.reward_scale is not None:
                scores = self.teachers.extrapolate(rollouts, scores, self.reward_scale)
            scored = [with_scores(sample, own) for sample, own in zip(kept, scores, strict=True)]
            return Scored(
                [sample for sample in scored if sample is not None],
                **overflow(samples, fitted),
                padding_ids=padding_ids,
                metrics=self.teachers.take_metrics(),
            )
        if self.policy_teacher is not None:
            return self._score_with_policy(self.policy_teacher, samples)
        return Scored(list(samples))

    def fit(self, samples: Sequence[Sample]) -> list[Sample | None]:
        """Return what of each sample its teachers can read; None for a sample to drop."""
        assert self.teachers is not None
        scorers, routing = self.teachers.scorers, self.teachers.routing
        fitted: list[Sample | None] = []
        for sample in samples:
            left: Sample | None = sample
            for teacher in routing.readers(sample.problem):
                rule = routing.teachers[teacher].on_overflow
                limit = None if rule == "error" else scorers[teacher].limits.max_model_len
                if left is not None and limit is not None:
                    # A scorer on vLLM reads one token less.
                    left = fit(left, left.rollout.start, limit - 1, rule)
            fitted.append(left)
        return fitted

    def _check_ids(self, scores: Sequence[Scores]) -> None:
        for index, one in enumerate(scores):
            wrong = alien_id(one, self.vocab_size)
            if wrong is not None:
                tables = ", ".join(f"[{teacher.table}]" for teacher in self.teacher_specs)
                raise InvalidAnswer(
                    f"{tables}: the scores of rollout {index} list id {wrong}, and the student's "
                    f"head has {self.vocab_size} entries, of which padding explains at most "
                    f"{MOST_PADDING} more; choose a teacher with the student's vocabulary"
                )

    def _score_with_policy(self, teacher: PolicyTeacher, samples: Sequence[Sample]) -> Scored:
        hinted = [
            (sample, teacher.prompt_of(sample, hint))
            for sample, hint in zip(samples, teacher.hints(samples), strict=True)
            if hint is not None
        ]
        fitted = [
            fit(sample, len(prompt), self.policy_room, self.policy_overflow)
            for sample, prompt in hinted
        ]
        kept = [
            (sample, prompt)
            for sample, (_, prompt) in zip(fitted, hinted, strict=True)
            if sample is not None
        ]
        counts = overflow([sample for sample, _ in hinted], fitted)
        without_hint = len(samples) - len(hinted)
        if not kept:
            return Scored([], without_hint=without_hint, **counts)
        size, by_student = self.loss.asked_of_teacher
        scores = teacher.score(
            [sample.rollout for sample, _ in kept],
            [prompt for _, prompt in kept],
            size,
            chosen_by_student=by_student,
            hidden=self.reads_hidden_states,
        )
        scored = [
            replace(sample, scores=own) for (sample, _), own in zip(kept, scores, strict=True)
        ]
        if "contrast_logprobs" in self.loss.needs:
            scored = self._with_contrast(teacher, scored)
        return Scored(scored, without_hint=without_hint, **counts)

    def _with_contrast(self, teacher: PolicyTeacher, samples: Sequence[Sample]) -> list[Sample]:
        """Set each sample's log-probs under wrong hints.

        A wrong hint that does not fit into the teacher's window is left out. A rollout without any
        has no contrast: the right hint's own log-probs take their place.
        """
        prompts = [
            [
                prompt
                for prompt in (teacher.prompt_of(sample, hint) for hint in own)
                if len(prompt) + sample.length - sample.rollout.start <= self.policy_room
            ]
            for sample, own in zip(samples, teacher.wrong_hints(samples), strict=True)
        ]
        contrasts = teacher.contrast([sample.rollout for sample in samples], prompts)
        return [
            replace(sample, contrast=trained_logprobs(sample) if own is None else own)
            for sample, own in zip(samples, contrasts, strict=True)
        ]

    def end_step(self, step: int) -> None:
        """Send the new weights to a teacher that follows the policy, and to the sampler.

        The sampler may be a server that is away. It comes last, when the step's state is whole.
        """
        if self.policy_teacher is not None:
            self.policy_teacher.end_step(step)
        self.sampler.update_weights(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the student: the weights of a moving teacher."""
        return {} if self.policy_teacher is None else self.policy_teacher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        if self.policy_teacher is not None:
            self.policy_teacher.load_state_dict(state)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.environments is not None:
            self.environments.close()
        self.sampler.close()
        if self.teachers is not None:
            self.teachers.close()


def open_engine(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    status: Callable[[str], None],
    student_dir: Path | None = None,
) -> Engine:
    """Load the student for training, and open its sampler and the teachers' scorers.

    Where one of them cannot be opened, those that are open already are closed.

    Args:
        recipe: the recipe.
        problems: its problems.
        paths: directories of the prepared models, by table ("student", "teacher", "teachers.NAME").
        status: callback for progress messages.
        student_dir: the student's weights in a checkpoint; None for the recipe's own. With them a
            server is waited for in full, because it may have been restarted together with the run.

    Raises:
        ImportError: a backend's library is missing; the message names the pip line.
        ValueError: a model, a backend or the file of preference pairs is unusable.
    """
    origin = model_origin(recipe.student, "student", paths)
    resumes = student_dir is not None
    with ExitStack() as opened:
        model, tokenizer = _load_student(student_dir or origin, status)
        latent = _round(model, recipe.student)
        if recipe.trainer.gradient_checkpointing:
            checkpoint_layers(model)
        tokenized = TokenizedProblems(problems, tokenizer)
        rollout = recipe.rollout.within(
            context_of(recipe.rollout, tokenized, local_models(recipe), paths)
        )
        environments = None
        if isinstance(problems, Sources):
            # Not a checkpoint: the library chooses a renderer by the name of the model.
            environments = _start_environments(
                problems, str(origin), recipe.rollout.renderer, status
            )
            opened.callback(environments.close)
        status(f"opening the {rollout.backend} sampler")
        spec = student_spec(rollout, origin, recipe.trainer.dtype, recipe.largest_call)
        sampler = open_sampler(replace(spec, starting=spec.starting or resumes), status)
        opened.callback(sampler.close)
        if resumes or latent is not None:
            sampler.update_weights(model)
        engine = Engine(
            tokenized,
            recipe.loss,
            model,
            sampler,
            environments=environments,
            context=rollout.context(),
            latent=latent,
        )
        if recipe.teacher is not None and (policy := recipe.teacher.policy) is not None:
            engine.policy_teacher = PolicyTeacher(policy, problems.sources, model, tokenizer)
            engine.policy_overflow = recipe.teacher.on_overflow
            config: Any = model.config
            positions = config.get_text_config().max_position_embeddings
            engine.policy_room = min(engine.context, positions)
        elif recipe.asks_teacher:
            routing = Routing.of_recipe(recipe)
            engine.teacher_specs = {
                teacher: teacher_spec(
                    config,
                    spec,
                    model_origin(config, teacher.table, paths),
                    recipe.rollout.teacher_samples,
                    teacher.table,
                )
                for teacher, config in routing.teachers.items()
            }
            scorers = _open_scorers(engine.teacher_specs, resumes, status, opened)
            for teacher, config in routing.teachers.items():
                if config.tokenizer == "own":
                    status(f"comparing the tokenizers of student and {teacher.display}")
                    scorers[teacher] = with_own_tokenizer(
                        scorers[teacher], engine, engine.teacher_specs[teacher], teacher
                    )
            engine.teachers = Teachers(scorers, routing)
            if recipe.reference is not None:
                engine.reward_scale = recipe.reference.reward_scale
        if environments is not None:
            environments.room = conversation_room(engine.context, engine.teachers)
        if recipe.loss.reads_pairs:
            if replay_needs_reference(recipe.loss):
                engine.reference = load_student(origin, dtype="float32")[0].requires_grad_(False)
                _round(engine.reference, recipe.student)
            if recipe.replay.path is not None:
                engine.pairs = read_pairs(recipe.replay.path, problems.sources, tokenizer)
        opened.pop_all()
    return engine


def _load_student(model: str | Path, status: Callable[[str], None]) -> tuple[nn.Module, Any]:
    """Return the student for training, and its tokenizer."""
    status(f"loading the student from {model}")
    with in_table("student"):
        student, tokenizer = load_student(model, dtype="float32")
    if tokenizer is None:
        raise ModelUnavailable(f"[student] {model} has no tokenizer; add its files")
    return student, tokenizer


def _round(model: nn.Module, config: StudentConfig) -> LatentWeights | None:
    """Round a student that stays rounded, and return the weights behind it."""
    if config.quantize is None:
        return None
    try:
        return LatentWeights.of_model(model, config.quantize)
    except ValueError as error:
        raise ModelUnavailable(f"[student] {error}") from None


def _start_environments(
    problems: Sources, student: str, renderer: Mapping[str, Any], status: Callable[[str], None]
) -> "Environments":
    from prime_composer.environments.runner import Environments

    status("starting the environments")
    return Environments(problems.environments, student, renderer, status)


def _open_scorers(
    specs: Mapping[TeacherId, BackendSpec],
    resumes: bool,
    status: Callable[[str], None],
    opened: ExitStack,
) -> dict[TeacherId, Scorer]:
    """Open the teachers' scorers, and leave to ``opened`` to close them."""
    scorers = {}
    for teacher, spec in specs.items():
        status(f"opening the {teacher.display}'s {spec.backend} scorer")
        with in_table(teacher.table):
            scorers[teacher] = open_scorer(replace(spec, starting=spec.starting or resumes), status)
        opened.callback(scorers[teacher].close)
        if isinstance(scorer := scorers[teacher], Served):
            answers = f"answers in {scorer.dtype}"
            if scorer.dtype is None:
                answers = "has no scoring plugin, and does not say in which precision it answers"
            status(f"the {teacher.display}'s server {answers}")
    return scorers


def with_own_tokenizer(
    scorer: Scorer, engine: Engine, spec: BackendSpec, teacher: TeacherId
) -> OwnTokenizerScorer:
    """Let a teacher with a tokenizer of its own score the student's tokens.

    Raises:
        PreflightError: the tokenizers cannot be compared.
    """
    try:
        tokenizer = load_tokenizer(spec.model)
    except ModelUnavailable as error:
        raise PreflightError(
            f'[{teacher.table}] tokenizer = "own" needs the teacher\'s tokenizer: give `model` its '
            f"directory or hub id. {error}"
        ) from None
    prompts = TeacherPrompts(engine.problems, tokenizer)
    pair = make_pair(
        tokenizer,
        engine.problems.tokenizer,
        read_eos_token_ids(spec.model),
        prompts.texts(COUNTED_PROBLEMS),
        teacher.table,
    )
    parts = [part for part, _ in engine.loss.needs_by_section().values()]
    fixed = any(part.needs_fixed_support for part in parts)
    return OwnTokenizerScorer(scorer, pair, prompts, engine.vocab_size, fixed=fixed)


def conversation_room(max_model_len: int, teachers: Teachers | None) -> int:
    """Return the most tokens of a conversation that every model of a run can read.

    Teachers that read the head of a long rollout, or drop it, do not count.
    """
    rooms = [max_model_len]
    if teachers is not None:
        for teacher, scorer in teachers.scorers.items():
            limit = scorer.limits.max_model_len
            if limit is not None and teachers.routing.teachers[teacher].on_overflow == "error":
                rooms.append(limit - 1)  # a scorer on vLLM reads one token less
    return min(rooms)


def model_origin(config: ModelConfig, table: str, paths: Mapping[str, Path]) -> str | Path:
    """Return a model's directory or hub id. ``paths`` has the prepared ones, by table."""
    return paths[table] if config.model is None else config.model


def replay_needs_reference(loss: LossConfig) -> bool:
    """Return whether the loss of the replay channel compares with a frozen policy."""
    return any(part.on_pairs and "ref_logprobs" in part.loss.needs for part in loss.channels)
