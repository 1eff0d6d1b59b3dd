"""The open models of a run, and the scores that they give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from torch import nn

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import lm_head_weight
from prime_composer.backends.lora.adapter import Adapter
from prime_composer.backends.protocols import Sampler
from prime_composer.contract import Scores, given
from prime_composer.local.run_dir.identity import check_identity, data_digests, teacher_headers
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.losses import LossConfig
from prime_composer.recipe.routing import TeacherId
from prime_composer.samplers.registry import BackendSpec
from prime_composer.scoring.shared_vocabulary import MOST_PADDING, lacking
from prime_composer.step.batch import Pair, Sample, with_scores
from prime_composer.step.overflow import Rule, fit
from prime_composer.teachers.compatibility import alien_id
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.policy import PolicyTeacher, students_choice
from prime_composer.tiny_models.rounding import LatentWeights

if TYPE_CHECKING:
    from prime_composer.environments.runner import Environments

IDENTITY = "identity"  # Key of ``Engine.state_dict``


@dataclass(frozen=True)
class Scored:
    """What the teacher made of a step's samples."""

    samples: list[Sample]  # those that train, with scores where the loss needs a teacher
    without_hint: int = 0  # how many were left out, because a policy teacher has no hint for them
    cut: int = 0  # of how many the teacher's window holds the head alone
    dropped: int = 0  # how many were left out, because they do not fit into the teacher's window
    # how many of their ids a teacher's head lacks; None where none can
    padding_ids: int | None = None
    # of teachers with a tokenizer of their own
    metrics: Mapping[str, float] = field(default_factory=dict)


class Overflow(TypedDict):
    """``cut`` and ``dropped`` of ``Scored``."""

    cut: int
    dropped: int


def overflow(samples: Sequence[Sample], fitted: Sequence[Sample | None]) -> Overflow:
    """Return ``cut`` and ``dropped`` of ``Scored``, from the samples before and after ``fit``."""
    dropped = sum(sample is None for sample in fitted)
    same = sum(after is before for before, after in zip(samples, fitted, strict=True))
    return {"cut": len(samples) - dropped - same, "dropped": dropped}


@runtime_checkable
class DropsWeights(Protocol):
    """A sampler that can do without its weights until it gets the next ones."""

    def drop_weights(self) -> None:
        """Free the weights. Until ``update_weights`` nothing is sampled."""
        ...


@dataclass
class Engine:
    """The open models of a run."""

    problems: TokenizedProblems
    loss: LossConfig
    model: nn.Module
    sampler: Sampler
    teachers: Teachers | None = None  # of models of their own; None where none is needed
    reward_scale: float | None = None  # lambda of G-OPD; None without a ``[reference]``
    policy_teacher: PolicyTeacher | None = None  # None without ``[teacher.policy]``
    policy_overflow: Rule = "error"
    policy_room: int = 0  # tokens that a policy teacher may read
    teacher_specs: Mapping[TeacherId, BackendSpec] = field(default_factory=dict)
    reference: nn.Module | None = None  # the frozen policy of the replay channel's loss
    pairs: Sequence[Pair] = ()  # the preference pairs of a file
    environments: "Environments | None" = None
    context: int = 0  # longest sequence in tokens that the engines read
    latent: LatentWeights | None = None  # behind a student that stays rounded
    adapter: Adapter | None = None  # of a LoRA student

    @property
    def stored(self) -> Any:
        """What a checkpoint stores as the student: the model, or its adapter."""
        return self.model if self.adapter is None else self.adapter

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
        """Return the samples with their teacher's scores, without those that have no hint."""
        if self.teachers is not None and self.loss.compares_with_teacher:
            fitted = self.fit(samples)
            kept = [sample for sample in fitted if sample is not None]
            rollouts = [sample.rollout for sample in kept]
            problems = [sample.problem for sample in kept]
            size, by_student = self.loss.asked_of_teacher
            shared, padding_ids = min(self.head_sizes), None
            if shared < self.vocab_size:
                padding_ids = sum(int(lacking(one.token_ids, shared).sum()) for one in rollouts)
            self.teachers.take_metrics()  # of checks and evaluations, which are no part of a step
            scores = self.teachers.score(
                rollouts,
                problems,
                size,
                students_choice(self.model, rollouts, size, shared) if by_student else None,
                self.reads_hidden_states,
            )
            self._check_ids(scores)
            if self.reward_scale is not None:
                scores = self.teachers.extrapolate(rollouts, problems, scores, self.reward_scale)
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
        routing = self.teachers.routing
        fitted: list[Sample | None] = []
        for sample in samples:
            left: Sample | None = sample
            for teacher in routing.readers(sample.problem):
                rule = routing.teachers[teacher].on_overflow
                if left is None or rule == "error":
                    continue
                room = self.teachers.room(teacher, left.rollout)
                if room is not None:
                    left = fit(left, left.rollout.start, room, rule)
            fitted.append(left)
        return fitted

    def _check_ids(self, scores: Sequence[Scores]) -> None:
        vocab_size = self.vocab_size
        for index, one in enumerate(scores):
            wrong = alien_id(one, vocab_size)
            if wrong is not None:
                tables = ", ".join(f"[{teacher.table}]" for teacher in given(self.teachers).scorers)
                raise InvalidAnswer(
                    f"{tables}: the scores of rollout {index} list id {wrong}, and the student's "
                    f"head has {vocab_size} entries, of which padding explains at most "
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
        return Scored(scored, without_hint=without_hint, **counts)

    def begin_update(self) -> None:
        """Let the sampler free weights that ``end_step`` replaces: gradients take their room."""
        if isinstance(self.sampler, DropsWeights):
            self.sampler.drop_weights()

    def end_step(self, step: int) -> None:
        """Send the new weights to a teacher that follows the policy, and to the sampler."""
        if self.policy_teacher is not None:
            self.policy_teacher.end_step(step)
        self.sampler.update_weights(self.model)

    @property
    def tokenizer_pairs(self) -> dict[str, str]:
        """Digests of both tokenizers, by table of the teachers that have their own."""
        scorers = {} if self.teachers is None else self.teachers.scorers
        return {
            teacher.table: scorer.pair.digest
            for teacher, scorer in scorers.items()
            if isinstance(scorer, OwnTokenizerScorer)
        }

    @cached_property
    def data_digests(self) -> dict[str, str]:
        return data_digests(self.problems.problem_set, self.pairs)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the student."""
        moving = {} if self.policy_teacher is None else self.policy_teacher.state_dict()
        headers = teacher_headers(self.teachers, self.teacher_specs)
        return moving | {IDENTITY: {"data": self.data_digests, "teachers": headers}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Other data, pairs or tapes are refused."""
        tapes = {} if self.teachers is None else self.teachers.tapes
        alone = {one.table: tape.header for one, tape in tapes.items() if tape.live is None}
        check_identity(state.get(IDENTITY, {}), self.data_digests, alone)
        if self.policy_teacher is not None:
            moving = {name: value for name, value in state.items() if name != IDENTITY}
            self.policy_teacher.load_state_dict(moving)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.environments is not None:
            self.environments.close()
        self.sampler.close()
        if self.teachers is not None:
            self.teachers.close()
