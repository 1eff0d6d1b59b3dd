"""Sums over the pairs of a preference pack, and the loss of their margins.

Segment 2i is the chosen and 2i + 1 the rejected response of pair i.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import Count, LossInputs, LossOutputs, given
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.modifiers import segment_starts
from prime_composer.losses.shared.reductions import masked_sum


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a pack, in order. The arrays are as long as the pack, and most rows are empty."""

    # True where both responses have a token of the mask, [seq]. Any other pair trains nothing.
    complete: Bool[Tensor, " seq"]
    weights: Float[Tensor, " seq"]  # mean ``loss_weights`` of the pair's tokens, [seq]
    lengths: Float[Tensor, "2 seq"]  # tokens of the mask, chosen then rejected, [2, seq]
    _row: Tensor
    _side: Tensor

    def sums(self, values: Float[Tensor, " seq"]) -> Float[Tensor, "2 seq"]:
        """Return the sums over each response, chosen then rejected, of values that are masked."""
        return _sums(values, self._row, self._side)


def pairs_of(inputs: LossInputs, dtype: torch.dtype) -> Pairs:
    """Return the pairs of a pack, without a host synchronization: rows are counted, not read."""
    mask, segments = inputs.loss_mask, given(inputs.segment_ids)
    row = segment_starts(segments // 2).long().cumsum(0) - 1
    side = segments % 2
    given_weights = inputs.loss_weights
    weights = torch.ones_like(mask, dtype=dtype) if given_weights is None else given_weights
    weights = weights.to(dtype)
    lengths = _sums(mask.to(dtype), row, side)
    total = _sums(torch.where(mask, weights, 0.0), row, side).sum(0)
    return Pairs(
        complete=(lengths > 0).all(0),
        weights=total / lengths.sum(0).clamp(min=1),
        lengths=lengths,
        _row=row,
        _side=side,
    )


def logistic_loss(
    pairs: Pairs, margin: Float[Tensor, " seq"], prefers_chosen: Bool[Tensor, " seq"]
) -> LossOutputs:
    """Return the sum over pairs of -w log sigmoid(margin), and the metrics of preference losses."""
    per_pair = -F.logsigmoid(margin)
    loss = masked_sum(per_pair, pairs.complete, pairs.weights)
    with torch.no_grad():
        metrics: dict[str, Tensor] = {
            "loss": token_mean(per_pair, pairs.complete),
            "margin": token_mean(margin, pairs.complete),
            "accuracy": token_mean(prefers_chosen, pairs.complete),
            "pairs": Count(pairs.complete.sum().to(margin.dtype)),
        }
    return LossOutputs(loss=loss, metrics=metrics)


def _sums(values: Tensor, row: Tensor, side: Tensor) -> Tensor:
    return torch.stack(
        [
            torch.zeros_like(values).index_add(0, row, torch.where(side == s, values, 0.0))
            for s in (0, 1)
        ]
    )
