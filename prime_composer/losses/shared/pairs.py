"""Sums over the pairs of a preference pack.

Segment 2i is the chosen and 2i + 1 the rejected response of pair i.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import LossInputs, given
from prime_composer.losses.shared.modifiers import segment_starts


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a pack, in order. The arrays are as long as the pack, and most rows are empty.

    Attributes:
        complete: True where both responses have a token of the mask, [seq]. Any other pair trains
            nothing.
        weights: mean ``loss_weights`` of the pair's tokens, [seq].
        lengths: tokens of the mask, chosen then rejected, [2, seq].
    """

    complete: Bool[Tensor, " seq"]
    weights: Float[Tensor, " seq"]
    lengths: Float[Tensor, "2 seq"]
    _row: Tensor
    _side: Tensor

    def sums(self, values: Float[Tensor, " seq"]) -> Float[Tensor, "2 seq"]:
        """Return the sum of ``values`` over the tokens of each response, chosen then rejected.

        Args:
            values: per token, 0 outside the mask, [seq].
        """
        return _sums(values, self._row, self._side)


def pairs_of(inputs: LossInputs, dtype: torch.dtype) -> Pairs:
    """Return the pairs of a pack, without a host synchronization: rows are counted, not read."""
    mask, segments = inputs.loss_mask, given(inputs.segment_ids)
    row = segment_starts(segments // 2).long().cumsum(0) - 1
    side = segments % 2
    weights = (
        torch.ones_like(mask, dtype=dtype)
        if inputs.loss_weights is None
        else inputs.loss_weights.to(dtype)
    )
    lengths = _sums(mask.to(dtype), row, side)
    total = _sums(torch.where(mask, weights, 0.0), row, side).sum(0)
    return Pairs(
        complete=(lengths > 0).all(0),
        weights=total / lengths.sum(0).clamp(min=1),
        lengths=lengths,
        _row=row,
        _side=side,
    )


def _sums(values: Tensor, row: Tensor, side: Tensor) -> Tensor:
    return torch.stack(
        [
            torch.zeros_like(values).index_add(0, row, torch.where(side == s, values, 0.0))
            for s in (0, 1)
        ]
    )
