"""Ask a teacher again what it has answered before: its server may serve another model now.

Every response of a server is checked by itself (``backends.answers``). A server that serves
another model passes that: its numbers are those of a right model. A request whose scores are known
shows it. Whoever asks a teacher keeps one such request, in the one-machine run and inside prime-rl.
It is sent whenever the server may be another one: the scoring plugin names each start of the engine
and each load of weights in its responses, and a server without it names none.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import permutations

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores

COMPARED_IDS = 64  # Most ids per position that are compared, the most probable ones

LOWEST = -1000.0  # What a log-prob counts as at least

ASKED_EVERY = 256  # Most sequences between two known requests inside prime-rl

KNOWN_TOKENS = range(16, 65)  # Of that request: the beginning of the first long enough sequence

HALF_PRECISION = 0.5  # Nats by which half precision may move a log-prob

SHARE_APART = 0.1
"""Share of the positions that may be further apart in two responses of a right server inside
prime-rl. A model with experts may choose others, where other requests are in its batch."""


@dataclass
class KnownRequest:
    """A request to a teacher whose weights never change, and its first scores."""

    rollout: Rollout
    scores: Scores  # the first ones, with which later ones are compared
    limit: float = HALF_PRECISION  # nats by which a log-prob may differ
    share: float = 0.0  # of the positions that may differ by more
    sign: Hashable = None  # what named the server's start when it last gave these; None: nothing
    scored: int = 0  # sequences that the teacher has scored since it was due

    def is_due(self, sign: Hashable, scored: int = 0) -> bool:
        """Return whether to send it: the server may be another one, or has scored a lot since.

        ``scored`` are sequences since the last call.
        """
        self.scored += scored
        due = sign is None or sign != self.sign or self.scored >= ASKED_EVERY
        if due:  # others that are scored meanwhile need not send it as well
            self.scored = 0
        return due

    def change(self, again: Scores, sign: Hashable) -> str:
        """Say how later scores differ from the first ones; empty where they are right.

        ``sign`` is what named the server's start before it was asked.
        """
        apart = differences(self.scores, again)
        # A NaN is beyond every limit.
        share = float((~(apart <= self.limit)).double().mean())
        if share > self.share:
            return (
                "scores the tokens of the run's start with other numbers than then: up to "
                f"{float(apart.max()):.2g} nat apart, and at {share:.0%} of the positions by more "
                f"than {self.limit:g}. It serves another model now, or in another way"
            )
        self.sign = sign
        return ""


def known_rollout(token_ids: Tensor, start: int) -> Rollout:
    """Return the rollout of a known request, whose tokens from ``start`` on are scored."""
    return Rollout.not_sampled(token_ids, start, "length")


def server_starts(part: object) -> int | None:
    """Return how many starts the server of a scorer or sampler has named; None where it names none.

    What computes in this process is never exchanged.
    """
    return getattr(part, "starts", 0)


def differences(one: Scores, other: Scores) -> Float[Tensor, " n"]:
    """Return the largest distance of two scorings at each position, in nats, [n].

    Of each, at most ``COMPARED_IDS`` ids are compared. An id that the other one does not list is
    compared with the other's least probable entry, which bounds it. Ids that are not known count as
    not listed. Scorings of different lengths, or of which one alone has a support, are infinitely
    far apart. A NaN stays.
    """
    own, other_own = one.ref_logprobs, other.ref_logprobs
    supports = [scores.token_ids.shape[1] > 0 for scores in (one, other)]
    if own.shape != other_own.shape or supports[0] != supports[1]:
        return torch.full(own.shape or (1,), torch.inf, dtype=torch.float64)
    largest = (_finite(own) - _finite(other_own)).abs()
    if not all(supports):
        return largest
    for (ids, logprobs, known), (other_ids, other_logprobs, other_known) in permutations(
        map(_support, (one, other))
    ):
        same = ids.unsqueeze(2) == other_ids.unsqueeze(1)  # [n, k, k of the other]
        same &= other_known.unsqueeze(1)
        values = torch.where(same, other_logprobs.unsqueeze(1), 0.0).sum(dim=2)
        bound = other_logprobs.masked_fill(~other_known, torch.inf).amin(dim=1, keepdim=True)
        gap = torch.where(
            same.any(dim=2), (logprobs - values).abs(), (logprobs - bound).clamp_min(0.0)
        )
        largest = largest.maximum(torch.where(known, gap, 0.0).amax(dim=1))
    return largest


def largest_difference(one: Scores, other: Scores) -> float:
    """Return the largest distance between two scorings of the same tokens, in nats."""
    # A tensor's maximum keeps a NaN, which is beyond every limit.
    return float(differences(one, other).max())


def _support(scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, log-probs and which ids are known, of those that are compared."""
    ids = scores.token_ids[:, :COMPARED_IDS]
    known = torch.ones_like(ids, dtype=torch.bool) if scores.known is None else scores.known
    return (
        ids,
        _finite(scores.teacher_logprobs[:, :COMPARED_IDS]),
        known[:, :COMPARED_IDS],
    )


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.double().clamp_min(LOWEST)
