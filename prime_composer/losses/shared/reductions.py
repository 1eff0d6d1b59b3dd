"""Masked reductions, used by all losses. A position outside the mask never counts."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from prime_composer.contract import Mean


def masked_sum(
    values: Float[Tensor, " seq"],
    mask: Bool[Tensor, " seq"],
    weights: Float[Tensor, " seq"] | None = None,
) -> Float[Tensor, ""]:
    """Return the sum of ``weights * values`` over ``mask``. An empty mask gives 0 with a graph.

    NaN and inf of masked positions stay out of the value. A backward may have 0 * inf all the same,
    so a loss masks its *inputs* first.
    """
    if weights is not None:
        values = values * torch.where(mask, weights, 1.0)
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Shaped[Tensor, " seq"], mask: Bool[Tensor, " seq"]) -> Float[Tensor, ""]:
    """Return the mean over ``mask``, 0 for an empty mask, in prime-rl's order of summation."""
    count = mask.sum()
    return Mean(values[mask].sum() / torch.clamp_min(count, 1), count)


def summed_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks of a distributed run. Every rank has to call it.

    A rank without a token has no device to go by, so all reduce on one kind.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    on_cuda = torch.cuda.is_available() and dist.get_backend() != "gloo"
    total = values.to("cuda" if on_cuda else "cpu", copy=True)
    dist.all_reduce(total)
    return total
