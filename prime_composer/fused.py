"""Elementwise work on a GPU as one kernel, by ``torch.compile``."""

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = {"cuda"}  # types of devices


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Of a reduction that it computes in another order, in each process.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    return torch.compile(function, dynamic=True)


def fused(function: F) -> F:
    """Let a function of tensors read and write a GPU's memory once, where it can.

    One operation after the other, each would read and write its block, and the host would start
    them more slowly than they compute. On a CPU a block is in the cache, and nothing is compiled.
    ``TORCHDYNAMO_DISABLE=1`` is torch's own switch.
    """

    @wraps(function)
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        work = _compiled(function) if first.device.type in COMPILED else function
        return work(first, *rest, **named)

    return cast(F, call)
