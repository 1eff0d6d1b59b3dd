"""Types of a loss's metrics: how a trainer joins those of a step's micro-batches and ranks."""

from typing import Any

import torch
from torch import Tensor


class _Metric(Tensor):
    """A detached tensor with a type of its own. Operations on it return plain tensors."""

    # torch annotates the stub of this attribute as a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, value: Tensor, *args: Any) -> Any:
        return Tensor._make_subclass(cls, value.detach())


class Mean(_Metric):
    """Metric that is a mean over some things, such as the tokens that a modifier has left.

    Args:
        value: the mean, 0 where there are none.
        count: their number, 0-dim. None: all tokens of the micro-batch.
    """

    count: Tensor | None

    def __init__(self, value: Tensor, count: Tensor | None = None):
        self.count = None if count is None else count.detach()


class PairMean(Mean):
    """Metric of preference pairs. Without a ``count`` it is a mean over all of the micro-batch."""


class Count(_Metric):
    """Metric that is a number of things: micro-batches add up."""
