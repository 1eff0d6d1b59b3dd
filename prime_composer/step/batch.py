"""Records of one training step: samples, and the batch that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores
from prime_composer.problems.config import Problem


@dataclass(frozen=True, eq=False)
class Sample:
    """One rollout of a step, with everything that is computed from it."""

    rollout: Rollout  # of the student, with GKD's lambda below 1 also of the data or the teacher
    problem: Problem  # that the rollout answers
    text: str = ""  # the completion, without special tokens
    reward: float = 0.0  # 1.0 or 0.0; between them for a graded metric; an environment's own
    advantage: float | None = None  # reward minus the group's mean; None where no loss reads it
    scores: Scores | None = None  # the teacher's log-probs; None where the loss needs no teacher
    weight: float | None = None  # factor of each of its tokens, by the loss's ``balance``
    first: bool = True  # of its rollout, which is several where a conversation branched

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return self.rollout.token_ids.shape[0]

    @property
    def trained(self) -> int:
        """How many of them train."""
        return int(self.rollout.loss_mask.sum())


def with_scores(sample: Sample, scores: Scores) -> Sample | None:
    """Return a sample without the tokens that the teacher has no score of; None without any."""
    if scores.scored is None:
        return replace(sample, scores=scores)
    if bool(scores.scored[sample.rollout.trained].all()):
        return replace(sample, scores=replace(scores, scored=None))
    rollout = sample.rollout
    mask = rollout.loss_mask.clone()
    mask[rollout.start :] &= scores.scored
    if not mask.any():
        return None
    left = replace(rollout, loss_mask=mask)
    own = replace(scores, scored=None).rows(slice(left.start - rollout.start, None))
    return replace(sample, rollout=left, scores=own)


@dataclass(frozen=True, eq=False)
class Batch:
    """The rollouts of one step that train.

    ``of_teacher``: the scores are a teacher's log-probs, and not extrapolated ones.
    """

    samples: Sequence[Sample]
    temperature: float = 1.0
    of_teacher: bool = True

    @cached_property
    def tokens(self) -> int:
        """Trained tokens of the samples: the divisor of the step's loss."""
        return sum(sample.trained for sample in self.samples)
