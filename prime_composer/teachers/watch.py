"""Compare a teacher's scores of a known request with its first ones.

Every response of a server is checked by itself (``backends.answers``). A server that serves
another model passes that: its numbers are those of a right model. A request whose scores are known
shows it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.contract import Scores

COMPARED_IDS = 64
"""Largest number of ids per position that are compared, the most probable ones."""

LOWEST = -1000.0
"""What a log-prob counts as at least."""


def differences(one: Scores, other: Scores) -> Float[Tensor, " n"]:
    """Return the largest distance of two scorings at each position, in nats, [n].

    Of each, at most ``COMPARED_IDS`` ids are compared. An id that the other one does not list is
    compared with the other's least probable entry, which bounds it. Scorings of different lengths,
    or of which one alone has a support, are infinitely far apart. A NaN stays.
    """
    own, other_own = one.ref_logprobs, other.ref_logprobs
    supports = [scores.token_ids.shape[1] > 0 for scores in (one, other)]
    if own.shape != other_own.shape or supports[0] != supports[1]:
        return torch.full(own.shape or (1,), torch.inf, dtype=torch.float64)
    largest = (_finite(own) - _finite(other_own)).abs()
    if not all(supports):
        return largest
    for a, b in ((one, other), (other, one)):
        ids, other_ids = a.token_ids[:, :COMPARED_IDS], b.token_ids[:, :COMPARED_IDS]
        logprobs = _finite(a.teacher_logprobs[:, :COMPARED_IDS])
        other_logprobs = _finite(b.teacher_logprobs[:, :COMPARED_IDS])
        same = ids.unsqueeze(2) == other_ids.unsqueeze(1)  # [n, k, k of the other]
        values = torch.where(same, other_logprobs.unsqueeze(1), 0.0).sum(dim=2)
        bound = other_logprobs.min(dim=1, keepdim=True).values
        gap = torch.where(
            same.any(dim=2), (logprobs - values).abs(), (logprobs - bound).clamp_min(0.0)
        )
        largest = largest.maximum(gap.amax(dim=1))
    return largest


def largest_difference(one: Scores, other: Scores) -> float:
    """Return the largest distance between two scorings of the same tokens, in nats."""
    # A tensor's maximum keeps a NaN, which is beyond every limit.
    return float(differences(one, other).max())


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.double().clamp_min(LOWEST)
