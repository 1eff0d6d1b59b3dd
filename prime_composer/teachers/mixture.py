"""Several teachers: a rollout is scored by one of them, or by a mixture of their probabilities."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.backends.answers import check_scores
from prime_composer.backends.protocols import Rollout, Scorer
from prime_composer.contract import Scores
from prime_composer.problems.config import Problem
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId
from prime_composer.teachers.own_prompt import OwnPromptScorer
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.tape.scorer import NotOnTape, TapedScorer, live_of


@dataclass(frozen=True)
class Teachers:
    """The open scorers of a recipe's teachers."""

    scorers: Mapping[TeacherId, Scorer]
    routing: Routing  # which teachers score a problem's rollouts, and with which weights

    @property
    def give_any_ids(self) -> bool:
        """Whether every teacher gives any K, and hidden states."""
        return all(scorer.gives_any_ids for scorer in self.scorers.values())

    @property
    def watched(self) -> Mapping[TeacherId, Scorer]:
        """The scorers as the known requests are put to them: in the teachers' own tokens, past
        their tapes. A tape that alone answers is left out."""
        live = {teacher: live_of(scorer) for teacher, scorer in self._behind_prompts.items()}
        return {teacher: scorer for teacher, scorer in live.items() if scorer is not None}

    @property
    def tapes(self) -> dict[TeacherId, TapedScorer]:
        return {
            teacher: scorer
            for teacher, scorer in self._behind_prompts.items()
            if isinstance(scorer, TapedScorer)
        }

    @property
    def _behind_prompts(self) -> dict[TeacherId, Scorer]:
        """The scorers behind those that write the teachers' own prompts."""
        return {
            teacher: scorer.scorer if isinstance(scorer, OwnPromptScorer) else scorer
            for teacher, scorer in self.scorers.items()
        }

    def room(self, teacher: TeacherId, rollout: Rollout) -> int | None:
        """Return how many tokens of a rollout, with its prompt, a teacher can read; None: all."""
        scorer = self.scorers[teacher]
        if isinstance(scorer, OwnPromptScorer):
            return scorer.room(rollout)
        limit = scorer.limits.max_model_len
        return None if limit is None else limit - 1  # a scorer on vLLM reads one token less

    def prompt(self, teacher: TeacherId, prompt: Sequence[int]) -> Sequence[int]:
        """Return what a teacher reads where the student reads a problem's prompt."""
        scorer = self.scorers[teacher]
        return scorer.prompts(prompt) if isinstance(scorer, OwnPromptScorer) else prompt

    def score(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        support_size: int | Literal["full"],
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Return one ``Scores`` per rollout of a problem, in order, as ``protocols.Scorer`` says.

        A teacher is only sent the rollouts in which it has a weight.
        """
        weights = [self.routing.of(problem) for problem in problems]
        scores: list[dict[TeacherId, Scores]] = [{} for _ in rollouts]
        for teacher, scorer in self.scorers.items():
            indices = [index for index, shares in enumerate(weights) if teacher in shares]
            if indices:
                with _naming_question([problems[index] for index in indices]):
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
                same_ids=candidate_ids is not None,
            )
            for index, (rollout, shares, by_teacher) in enumerate(
                zip(rollouts, weights, scores, strict=True)
            )
        ]

    def extrapolate(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        scores: Sequence[Scores],
        scale: float,
    ) -> list[Scores]:
        """Return the scores with the sampled token's log q extrapolated from the reference's log r.

        ``scale`` is lambda.
        """
        with _naming_question(problems):
            own = self.scorers[REFERENCE].score(rollouts, 0)
        return [
            extrapolate(one, reference, scale) for one, reference in zip(scores, own, strict=True)
        ]

    def take_metrics(self) -> dict[str, float]:
        """Return what teachers measured since the last call: tapes, and those with a tokenizer of
        their own.

        Of several, each has its name in front.
        """
        own = {teacher: taped.take_metrics() for teacher, taped in self.tapes.items()}
        for teacher, scorer in self.scorers.items():
            if isinstance(scorer, OwnTokenizerScorer):
                own[teacher] = scorer.take_metrics() | own.get(teacher, {})
        return {
            name if len(own) == 1 else f"{teacher.name or teacher.table}/{name}": value
            for teacher, metrics in own.items()
            for name, value in metrics.items()
        }

    def close(self) -> None:
        for scorer in self.scorers.values():
            scorer.close()


@contextmanager
def _naming_question(problems: Sequence[Problem]) -> Iterator[None]:
    """Within the block, add the question to the error of a rollout that a tape lacks."""
    try:
        yield
    except NotOnTape as error:
        asked = problems[error.index].question[:60]
        what = f"{error.what}, an answer to {asked!r}"
        raise NotOnTape(what, error.index, error.remedy) from None


def extrapolate(scores: Scores, reference: Scores, scale: float) -> Scores:
    """Return scores with lambda log q + (1 - lambda) log r in place of the sampled token's log q.

    With them the advantage of ``sampled_reverse_kl`` is that of G-OPD,

        A = lambda (log q - log r) - (log p - log r)

    The result belongs to no distribution: it may exceed 0, and the support is the teacher's still.
    Where q = r, it is log q for every lambda, also for a token that both exclude.

    Source: G-OPD (2026), https://arxiv.org/abs/2602.12125.
    """
    log_q, log_r = scores.ref_logprobs, reference.ref_logprobs.to(scores.ref_logprobs.dtype)
    extrapolated = scale * log_q + (1 - scale) * log_r
    return replace(scores, ref_logprobs=torch.where(log_q == log_r, log_q, extrapolated))


def mix(
    token_ids: Int[Tensor, " n"],
    scores: Sequence[Scores],
    weights: Sequence[float],
    *,
    sequence: int | None = None,
    trained: bool = True,
    same_ids: bool = False,
) -> Scores:
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
        scores: one per teacher, of the same n and K. An id that a teacher does not know is as one
            that it does not list. One that none of them knows is not known of the mixture.
        weights: one per teacher; they add up to 1.
        sequence: index of the sequence in its batch, for messages.
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
    shares = [_known_share(s, log) for s, log in zip(scores, log_weights, strict=True)]
    if same_ids:
        ids, total = scores[0].token_ids, torch.stack(shares).logsumexp(dim=0)
    else:
        ids, total = _joined(token_ids, ref_logprobs, [_known_ids(s) for s in scores], shares)
    known = total > -math.inf if any(s.known is not None for s in scores) else None
    own_scored = [s.scored for s in scores if s.scored is not None]
    mixed = Scores(
        ref_logprobs.to(dtype),
        ids,
        total.to(dtype),
        tuple(
            replace(share, weight=share.weight * weight)
            for one, weight in zip(scores, weights, strict=True)
            for share in one.hidden
        ),
        known,
        scores[0].start,
        scored=torch.stack(own_scored).all(dim=0) if own_scored else None,
    )
    scored = slice(None) if mixed.scored is None else mixed.scored
    check_scores(
        [(mixed.rows(scored), token_ids[scored], sequence)],
        k=ids.shape[1],
        vocab_size=None,
        origin="The mixture of teachers",
        ranked=False,  # the sampled token's q is whole, that of other ids a lower bound
        trained=trained,
    )
    return mixed


def _known_share(scores: Scores, log_weight: float) -> Float[Tensor, "n k"]:
    """Return log(w q) of one teacher's support in float64, -inf where it does not know the id."""
    share = scores.teacher_logprobs.double() + log_weight
    return share if scores.known is None else share.masked_fill(~scores.known, -math.inf)


def _known_ids(scores: Scores) -> Int[Tensor, "n k"]:
    """Return the ids of a support, with ids of no vocabulary for those that are not known."""
    if scores.known is None:
        return scores.token_ids
    return torch.where(scores.known, scores.token_ids, -1 - torch.arange(scores.k))


def _joined(
    token_ids: Int[Tensor, " n"],
    ref_logprobs: Float[Tensor, " n"],
    supports: Sequence[Int[Tensor, "_ _k"]],
    shares: Sequence[Float[Tensor, "_ _k"]],
) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Return the K ids of the largest q^, and log q^."""
    k = max(ids.shape[1] for ids in supports)
    ids, logprobs = torch.cat([*supports], dim=1), torch.cat([*shares], dim=1)
    if k == 0:
        return ids, logprobs
    ids, order = ids.sort(dim=1, stable=True)
    logprobs = logprobs.gather(1, order)
    # Equal ids are adjacent now, at most one per teacher. The first of them collects the others.
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    total = logprobs.clone()
    for step in range(1, len(supports)):
        same = ids[:, step:] == ids[:, :-step]
        total[:, :-step] = torch.where(
            same, torch.logaddexp(total[:, :-step], logprobs[:, step:]), total[:, :-step]
        )
    total = torch.where(ids == token_ids.unsqueeze(1), ref_logprobs.unsqueeze(1), total)
    # Duplicates rank below every id, also below ids that all teachers give no probability (-inf).
    lowest = torch.finfo(total.dtype).min
    ranked = total.clamp(min=lowest).masked_fill(~first, float("-inf"))
    chosen = ranked.topk(k, dim=1).indices
    return ids.gather(1, chosen), total.gather(1, chosen)
