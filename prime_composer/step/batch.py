"""Records of one training step: samples, preference pairs, and the batch that holds both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores
from prime_composer.problems.config import Problem


@dataclass(frozen=True, eq=False)
class Sample:
    """One rollout of a step, with everything that is computed from it.

    Attributes:
        rollout: sampled by the student. With GKD's lambda below 1 also a solution of the data, or
            sampled by the teacher.
        problem: the problem that the rollout answers.
        text: the completion as text, without special tokens.
        reward: 1.0 for a correct answer, 0.0 for a wrong one; between them for a graded metric. An
            environment by id has its own.
        advantage: reward minus the mean reward of the rollout's group; None where no loss reads it.
        scores: the teacher's log-probs; None where the loss needs no teacher.
        sampled: its rollout's ``loss_mask`` before tokens without a score left it; None where none
            did.
        weight: factor of each of its tokens, by the loss's ``balance``; None without one.
        first: it is its rollout's first sample. A conversation of an environment that branched has
            several, with the same reward and advantage.
    """

    rollout: Rollout
    problem: Problem
    text: str = ""
    reward: float = 0.0
    advantage: float | None = None
    scores: Scores | None = None
    sampled: Bool[Tensor, " seq"] | None = None
    weight: float | None = None
    first: bool = True

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return self.rollout.token_ids.shape[0]


def with_scores(sample: Sample, scores: Scores) -> Sample | None:
    """Return a sample with its scores, without the tokens that the teacher has no score of.

    None where it has none of any.
    """
    if scores.scored is None:
        return replace(sample, scores=scores)
    if bool(scores.scored.all()):
        return replace(sample, scores=replace(scores, scored=None))
    rollout = sample.rollout
    mask = rollout.loss_mask.clone()
    mask[rollout.start :] &= scores.scored
    if not mask.any():
        return None
    left = replace(rollout, loss_mask=mask)
    own = replace(scores, scored=None).rows(slice(left.start - rollout.start, None))
    return replace(sample, rollout=left, scores=own, sampled=rollout.loss_mask)


@dataclass(frozen=True, eq=False)
class Pair:
    """A preference pair: two responses to one prompt."""

    chosen: Sample
    rejected: Sample

    @property
    def length(self) -> int:
        """Tokens of the longer response with its prompt."""
        return max(self.chosen.length, self.rejected.length)


@dataclass(frozen=True, eq=False)
class Batch:
    """The rollouts of one step that train, and the preference pairs of the replay channel.

    ``temperature`` is that with which the student sampled. ``of_teacher``: the scores are a
    teacher's log-probs, and not extrapolated ones.
    """

    samples: Sequence[Sample]
    pairs: Sequence[Pair] = ()
    temperature: float = 1.0
    of_teacher: bool = True

    @cached_property
    def tokens(self) -> int:
        """Trained tokens of the samples: the divisor of the step's loss."""
        masks = [sample.rollout.loss_mask for sample in self.samples]
        return int(torch.cat(masks).sum()) if masks else 0
