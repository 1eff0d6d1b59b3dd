"""Several teachers: a rollout is scored by one of them, or by a mixture of their probabilities."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.alignment import make_scores
from prime_composer.backends.protocols import PluginServer, Rollout, Scorer, TeacherScores
from prime_composer.problems.config import Problem
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId


@dataclass(frozen=True)
class Teachers:
    """The open scorers of a recipe's teachers.

    Attributes:
        scorers: one per teacher.
        routing: which teachers score a problem's rollouts, and with which weights.
    """

    scorers: Mapping[TeacherId, Scorer]
    routing: Routing

    @property
    def give_any_ids(self) -> bool:
        """Whether every teacher gives any K, and hidden states."""
        return all(map(gives_any_ids, self.scorers.values()))

    def score(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        support_size: int | Literal["full"],
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[TeacherScores]:
        """Return one ``TeacherScores`` per rollout, in order.

        A teacher is only sent the rollouts in which it has a weight.

        Args:
            rollouts: what to score.
            problems: the problem of each rollout.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            candidate_ids: ids to score instead of the teachers' own top K, one [n, K] tensor per
                rollout from ``Rollout.start`` on.
            hidden: return hidden states too.
        """
        weights = [self.routing.of(problem) for problem in problems]
        scores: list[dict[TeacherId, TeacherScores]] = [{} for _ in rollouts]
        for teacher, scorer in self.scorers.items():
            indices = [index for index, shares in enumerate(weights) if teacher in shares]
            if indices:
                teacher_scores = scorer.score(
                    [rollouts[index] for index in indices],
                    support_size,
                    candidate_ids=candidate_ids and [candidate_ids[index] for index in indices],
                    hidden=hidden,
                )
                for index, rollout_scores in zip(indices, teacher_scores, strict=True):
                    scores[index][teacher] = rollout_scores
        return [
            mix(
                rollout.token_ids[rollout.start :],
                list(by_teacher.values()),
                [shares[teacher] for teacher in by_teacher],
                sequence=index,
                start=rollout.start,
                same_ids=candidate_ids is not None,
            )
            for index, (rollout, shares, by_teacher) in enumerate(
                zip(rollouts, weights, scores, strict=True)
            )
        ]

    def extrapolate(
        self, rollouts: Sequence[Rollout], scores: Sequence[TeacherScores], scale: float
    ) -> list[TeacherScores]:
        """Return the scores with the sampled token's log q extrapolated from the reference's log r.

        Args:
            rollouts: what was scored.
            scores: the teachers' scores of these rollouts.
            scale: lambda.
        """
        own = self.scorers[REFERENCE].score(rollouts, 0)
        return [
            extrapolate(one, reference, scale) for one, reference in zip(scores, own, strict=True)
        ]

    def close(self) -> None:
        """Close every scorer."""
        for scorer in self.scorers.values():
            scorer.close()


def gives_any_ids(scorer: Scorer) -> bool:
    """Return whether a teacher gives any K, and hidden states: all but a server without plugin."""
    return not isinstance(scorer, PluginServer) or scorer.plugin() is not None


def extrapolate(scores: TeacherScores, reference: TeacherScores, scale: float) -> TeacherScores:
    """Return scores with lambda log q + (1 - lambda) log r in place of the sampled token's log q.

    With them the advantage of ``sampled_reverse_kl`` is that of G-OPD,

        A = lambda (log q - log r) - (log p - log r)

    The result belongs to no distribution: it may exceed 0, and the support is the teacher's still.
    Where q = r, it is log q for every lambda, also for a token that both exclude.

    Source: G-OPD (2026), https://arxiv.org/abs/2602.12125.

    Args:
        scores: the teacher's.
        reference: the reference's, of the same tokens.
        scale: lambda.
    """
    log_q, log_r = scores.ref_logprobs, reference.ref_logprobs.to(scores.ref_logprobs.dtype)
    extrapolated = scale * log_q + (1 - scale) * log_r
    return replace(scores, ref_logprobs=torch.where(log_q == log_r, log_q, extrapolated))


def mix(
    token_ids: Int[Tensor, " n"],
    scores: Sequence[TeacherScores],
    weights: Sequence[float],
    *,
    sequence: int | None = None,
    start: int = 0,
    trained: bool = True,
    same_ids: bool = False,
) -> TeacherScores:
    """Return the mixture q(v) = sum_i w_i q_i(v) of several teachers' scores of the same tokens.

    The sampled token's q is exact, in ``ref_logprobs`` and in the support. For any other id of the
    support, only the teachers that list the id in their own top K contribute. What the others hold
    there is at most their K-th probability, and stays in the tail:

        q^(v) = sum_{i: v in S_i} w_i q_i(v)
             <=  q(v)  <=  q^(v) + sum_{i: v not in S_i} w_i min_{u in S_i} q_i(u)

    The head is therefore a lower bound. It is exact where the teachers' top K agree or are the
    whole vocabulary. The support is the K ids of the largest q^.

    Consequences for a loss. q^ and its tail are a distribution, but not that of q over these
    outcomes. With K < V, a loss on the support pulls toward a target that differs from q by the
    bound above, under each normalization: ``tail`` moves the unknown mass out of S, ``renorm``
    spreads it over S. Its value is no bound of the divergence from q. ``head_tail_reverse_kl`` is
    unbiased for a single teacher only. ``sampled_reverse_kl`` and k = "full" are exact.

    Args:
        token_ids: the sampled tokens, [n].
        scores: one per teacher, of the same n and K.
        weights: one per teacher; they add up to 1.
        sequence: index of the sequence in its batch, for messages.
        start: position of the first of these tokens in the sequence, for messages.
        trained: all of these tokens train (``answers.check_scores``).
        same_ids: the teachers scored the same ids, in one order, which the result keeps. Its
            log-probs are then exact.

    Returns:
        Scores of the same n and K, in the dtype of the teachers', with the hidden states of all. A
        single teacher's are returned as they are.

    Raises:
        InvalidAnswer: the teachers' scores do not mix to log-probs of one distribution.
    """
    if len(scores) == 1:
        return scores[0]
    dtype = scores[0].teacher_logprobs.dtype
    log_weights = [math.log(weight) for weight in weights]
    ref_logprobs = torch.stack(
        [s.ref_logprobs.double() + log for s, log in zip(scores, log_weights, strict=True)]
    ).logsumexp(dim=0)
    k = max(s.token_ids.shape[1] for s in scores)
    mixture = functools.partial(
        make_scores,
        ref_logprobs.to(dtype),
        sampled=token_ids,
        k=k,
        vocab_size=None,
        origin="The mixture of teachers",
        sequence=sequence,
        start=start,
        trained=trained,
        ranked=False,  # the sampled token's q is whole, that of other ids a lower bound
    )
    hidden = tuple(
        replace(share, weight=share.weight * weight)
        for one, weight in zip(scores, weights, strict=True)
        for share in one.hidden
    )
    ids = torch.cat([s.token_ids for s in scores], dim=1)
    if k == 0:
        return replace(mixture(ids, scores[0].teacher_logprobs), hidden=hidden)
    if same_ids:
        shares = [
            s.teacher_logprobs.double() + log for s, log in zip(scores, log_weights, strict=True)
        ]
        total = torch.stack(shares).logsumexp(dim=0)
        return replace(mixture(scores[0].token_ids, total.to(dtype)), hidden=hidden)
    logprobs = torch.cat(
        [s.teacher_logprobs.double() + log for s, log in zip(scores, log_weights, strict=True)],
        dim=1,
    )
    ids, order = ids.sort(dim=1, stable=True)
    logprobs = logprobs.gather(1, order)
    # Equal ids are adjacent now, at most one per teacher. The first of them collects the others.
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    total = logprobs.clone()
    for step in range(1, len(scores)):
        same = ids[:, step:] == ids[:, :-step]
        total[:, :-step] = torch.where(
            same, torch.logaddexp(total[:, :-step], logprobs[:, step:]), total[:, :-step]
        )
    total = torch.where(ids == token_ids.unsqueeze(1), ref_logprobs.unsqueeze(1), total)
    # Duplicates rank below every id, also below ids that all teachers give no probability (-inf).
    lowest = torch.finfo(total.dtype).min
    ranked = total.clamp(min=lowest).masked_fill(~first, float("-inf"))
    chosen = ranked.topk(k, dim=1).indices
    mixed = mixture(ids.gather(1, chosen), total.gather(1, chosen).to(dtype))
    return replace(mixed, hidden=hidden)
