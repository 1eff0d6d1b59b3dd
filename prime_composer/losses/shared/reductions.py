"""The only reductions in the house. A position outside the mask never counts, whatever stands there."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def masked_sum(
    values: Float[Tensor, " seq"],
    mask: Bool[Tensor, " seq"],
    weights: Float[Tensor, " seq"] | None = None,
) -> Float[Tensor, ""]:
    """Sum of ``weights * values`` over ``mask``; ``weights`` None means 1. An empty mask gives 0 with a graph.

    ``torch.where`` stops NaN and inf of masked positions in the value. It stops them in the gradient only if they did
    not already arise in a function of the masked entries (0 * inf in a backward), so a loss masks its *inputs* first.
    """
    if weights is not None:
        values = values * torch.where(mask, weights, 1.0)
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Shaped[Tensor, " seq"], mask: Bool[Tensor, " seq"]) -> Float[Tensor, ""]:
    """Mean over ``mask``, 0 for an empty mask: the reduction of prime-rl's metrics, in its order of summation."""
    return values[mask].sum() / torch.clamp_min(mask.sum(), 1)
