"""The open models of a run, and the scores that they give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import lm_head_weight
from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.protocols import Sampler
from prime_composer.contract import Scores, given
from prime_composer.local.identity import check_identity, data_digests, teacher_headers
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.losses import LossConfig
from prime_composer.recipe.routing import TeacherId
from prime_composer.samplers.registry import BackendSpec
from prime_composer.scoring.shared_vocabulary import MOST_PADDING, lacking
from prime_composer.step.batch import Sample, with_scores
from prime_composer.step.overflow import Rule, fit
from prime_composer.teachers.compatibility import alien_id
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.policy import PolicyTeacher, students_choice
from prime_composer.tiny_models.rounding import LatentWeights

if TYPE_CHECKING:
    from prime_composer.environments.runner import Environments

IDENTITY = "identity"  # Key of ``Engine.state_dict``


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
    student_spec: BackendSpec | None = None  # how the sampler was opened
    teacher_specs: Mapping[TeacherId, BackendSpec] = field(default_factory=dict)
    environments: "Environments | None" = None
    context: int = 0  # longest sequence in tokens that the engines read
    latent: LatentWeights | None = None  # behind a student that trains quantized
    adapter: LoraAdapter | None = None  # of a LoRA student

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

    def score(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples that train, with their teacher's scores, and what was measured.

        Left out are those that no teacher's window holds, and those without a hint.
        """
        if self.policy_teacher is not None:
            return self._score_with_policy(self.policy_teacher, samples)
        if self.teachers is None or not self.loss.compares_with_teacher:
            return list(samples), self._overflows(samples, samples, len(samples))
        fitted = self.fit(samples)
        kept = [sample for sample in fitted if sample is not None]
        metrics = self._overflows(samples, fitted, len(samples))
        rollouts = [sample.rollout for sample in kept]
        problems = [sample.problem for sample in kept]
        size, by_student = self.loss.asked_of_teacher
        shared = min(self.head_sizes)
        if shared < self.vocab_size:
            padding = sum(int(lacking(one.token_ids, shared).sum()) for one in rollouts)
            metrics["rollout/padding_ids"] = float(padding)
        self.teachers.take_metrics()  # of checks and evaluations, which are no part of a step
        scores = self.teachers.score(
            rollouts,
            problems,
            size,
            students_choice(self.model, rollouts, size, shared) if by_student else None,
            self.loss.reads_hidden_states,
        )
        self._check_ids(scores)
        if self.reward_scale is not None:
            scores = self.teachers.extrapolate(rollouts, problems, scores, self.reward_scale)
        scored = [with_scores(sample, own) for sample, own in zip(kept, scores, strict=True)]
        metrics |= self.teachers.take_metrics()
        return [sample for sample in scored if sample is not None], metrics

    def _overflows(
        self, samples: Sequence[Sample], fitted: Sequence[Sample | None], count: int
    ) -> dict[str, float]:
        """Return the shares of ``count`` rollouts that a teacher's window has cut, or left out."""
        teachers = () if self.teachers is None else self.teachers.routing.teachers.values()
        if {self.policy_overflow, *(teacher.on_overflow for teacher in teachers)} == {"error"}:
            return {}
        dropped = sum(sample is None for sample in fitted)
        same = sum(after is before for before, after in zip(samples, fitted, strict=True))
        return {
            "rollout/teacher_cut": (len(samples) - dropped - same) / count,
            "rollout/teacher_dropped": dropped / count,
        }

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

    def _score_with_policy(
        self, teacher: PolicyTeacher, samples: Sequence[Sample]
    ) -> tuple[list[Sample], dict[str, float]]:
        hinted = [
            (sample, teacher.prompt_of(sample, hint))
            for sample, hint in zip(samples, teacher.hints(samples), strict=True)
            if hint is not None
        ]
        fitted = [
            fit(sample, len(prompt), self.policy_room, self.policy_overflow)
            for sample, prompt in hinted
        ]
        metrics = self._overflows([sample for sample, _ in hinted], fitted, len(samples))
        if len(hinted) < len(samples):
            metrics["rollout/without_hint"] = (len(samples) - len(hinted)) / len(samples)
        kept = [
            (sample, prompt)
            for sample, (_, prompt) in zip(fitted, hinted, strict=True)
            if sample is not None
        ]
        if not kept:
            return [], metrics
        size, by_student = self.loss.asked_of_teacher
        scores = teacher.score(
            [sample.rollout for sample, _ in kept],
            [prompt for _, prompt in kept],
            size,
            chosen_by_student=by_student,
            hidden=self.loss.reads_hidden_states,
        )
        pairs = zip(kept, scores, strict=True)
        return [replace(sample, scores=own) for (sample, _), own in pairs], metrics

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
        return data_digests(self.problems.problem_set)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the student."""
        moving = {} if self.policy_teacher is None else self.policy_teacher.state_dict()
        headers = teacher_headers(self.teachers, self.teacher_specs)
        return moving | {IDENTITY: {"data": self.data_digests, "teachers": headers}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Other data or tapes are refused."""
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
