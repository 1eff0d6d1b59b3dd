"""Several teachers: each rollout is scored by one of them, or by a mixture of them in probability space."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.protocols import Rollout, Scorer, TeacherScores
from prime_composer.problems.config import Problem


@dataclass
class Teachers:
    """The scorers of a recipe's teachers, and who scores what.

    Attributes:
        scorers: by role, "teacher" or "teachers.NAME".
        mixture: the shares of the roles that score a problem's rollouts, which add up to 1.
    """

    scorers: Mapping[str, Scorer]
    mixture: Callable[[Problem], Mapping[str, float]]

    def score(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        support_size: int | Literal["full"],
    ) -> list[TeacherScores]:
        """One ``TeacherScores`` per rollout, in order; ``problems`` are the rollouts' own. A teacher that has no share in
        a rollout is not asked about it."""
        shares = [self.mixture(problem) for problem in problems]
        found: list[dict[str, TeacherScores]] = [{} for _ in rollouts]
        for role, scorer in self.scorers.items():
            mine = [index for index, share in enumerate(shares) if role in share]
            if mine:
                scores = scorer.score([rollouts[index] for index in mine], support_size)
                for index, one in zip(mine, scores, strict=True):
                    found[index][role] = one
        return [
            mix(rollout.token_ids, list(scores.values()), [share[role] for role in scores])
            for rollout, share, scores in zip(rollouts, shares, found, strict=True)
        ]

    def close(self) -> None:
        for scorer in self.scorers.values():
            scorer.close()


def mix(
    token_ids: Int[Tensor, " seq"], scores: Sequence[TeacherScores], weights: Sequence[float]
) -> TeacherScores:
    """The mixture q(v) = sum_i w_i q_i(v) of several teachers' scores of the same tokens.

    The sampled token's q is exact, in ``ref_logprobs`` and in the support. On any other id of the support a teacher counts
    that has the id in its own top K; what the others hold there is at most their K-th probability, and stays in the tail:

        q^(v) = sum_{i: v in S_i} w_i q_i(v)  <=  q(v)  <=  q^(v) + sum_{i: v not in S_i} w_i min_{u in S_i} q_i(u)

    so the head is a lower bound, exact where the teachers' top K agree or are the whole vocabulary. The support is the K ids
    of the largest q^.

    What a loss has of it: q^ and its tail are a distribution, but not q's own over these outcomes. With K < V a loss on the
    support therefore pulls to a target that differs from q by the bound above under each normalisation (``tail`` moves the
    unknown out of S, ``renorm`` spreads it over S), its value is no bound of the divergence from q, and
    ``head_tail_reverse_kl`` is unbiased for one teacher alone. ``sampled_reverse_kl`` and k = "full" are exact.

    Args:
        token_ids: the rollout's tokens.
        scores: one per teacher, of the same K.
        weights: one per teacher, which add up to 1.
    """
    if len(scores) == 1:
        return scores[0]
    kind = scores[0].teacher_logprobs.dtype
    logs = [math.log(weight) for weight in weights]
    own = torch.stack(
        [s.ref_logprobs.double() + log for s, log in zip(scores, logs, strict=True)]
    ).logsumexp(dim=0)
    k = max(s.token_ids.shape[1] for s in scores)
    ids = torch.cat([s.token_ids for s in scores], dim=1)
    if k == 0:
        return TeacherScores(own.to(kind), ids, scores[0].teacher_logprobs)
    held = torch.cat(
        [s.teacher_logprobs.double() + log for s, log in zip(scores, logs, strict=True)], dim=1
    )
    ids, order = ids.sort(dim=1, stable=True)
    held = held.gather(1, order)
    # Equal ids stand side by side now, at most one of each teacher: the first of them collects the others.
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    total = held.clone()
    for step in range(1, len(scores)):
        same = ids[:, step:] == ids[:, :-step]
        total[:, :-step] = torch.where(
            same, torch.logaddexp(total[:, :-step], held[:, step:]), total[:, :-step]
        )
    total = torch.where(ids == token_ids.unsqueeze(1), own.unsqueeze(1), total)
    # Below every id stand its doubles, also where all teachers say that it cannot come (-inf).
    ranked = total.clamp(min=torch.finfo(total.dtype).min).masked_fill(~first, -torch.inf)
    where = ranked.topk(k, dim=1).indices
    return TeacherScores(own.to(kind), ids.gather(1, where), total.gather(1, where).to(kind))
