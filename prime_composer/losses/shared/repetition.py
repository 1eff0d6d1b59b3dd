"""Find the repeated end of a response: the text of a model that does not stop any more."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PERIODS_AT_ONCE = 16  # Periods that are compared in one pass: memory for 16 rows of the pack


@torch.no_grad()
def repeated_end(
    token_ids: Int[Tensor, " seq"],
    mask: Bool[Tensor, " seq"],
    segment_ids: Int[Tensor, " seq"] | None,
    period: int,
    copies: int,
    tokens: int,
) -> Bool[Tensor, " seq"]:
    """Return the sampled tokens that repeat those before them, up to the end of their sequence.

    A sequence x_1 ... x_n ends in a repetition of period p if x_t = x_{t-p} for all of its last m
    tokens, where m is as large as possible. The repetition is m + p tokens long. It counts from
    ``copies`` p and ``tokens`` on, and the m tokens after its first copy are the result, of the
    period whose m is the largest. Only tokens of the mask belong to it, and one without the mask
    ends it. Nothing is copied to the host. ``segment_ids`` is non-decreasing; None is one sequence.
    """
    seq, device = token_ids.shape[0], token_ids.device
    if segment_ids is None:
        segment_ids = torch.zeros_like(token_ids)
    places = torch.arange(seq, device=device)
    end = torch.searchsorted(segment_ids, segment_ids, right=True) - 1  # of its sequence
    counted = mask.long().cumsum(0)
    left = counted[end] - counted + mask.long()  # sampled tokens from t on
    result = torch.zeros_like(mask)
    for first in range(1, min(period, seq - 1) + 1, PERIODS_AT_ONCE):
        last = min(first + PERIODS_AT_ONCE - 1, period, seq - 1)
        p = torch.arange(first, last + 1, device=device).unsqueeze(-1)
        earlier = (places - p).clamp(min=0)
        equal = (token_ids == token_ids[earlier]) & (segment_ids == segment_ids[earlier])
        equal &= mask & mask[earlier] & (places >= p)
        differs = ~equal & (left > 0)
        in_end = equal & (_next_place(differs) > end)
        before = torch.where(differs, places, -1).cummax(-1).values
        length = left + places - before - 1 + p
        result |= (in_end & (length >= (copies * p).clamp(min=tokens))).any(0)
    return result


def _next_place(hits: Bool[Tensor, "... seq"]) -> Int[Tensor, "... seq"]:
    """Return the first place from each one on where ``hits`` is True; ``seq`` without one."""
    seq = hits.shape[-1]
    places = torch.where(hits, torch.arange(seq, device=hits.device), seq)
    return places.flip(-1).cummin(-1).values.flip(-1)
