"""Elementwise work on a GPU as one kernel, by ``torch.compile``."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])

COMPILED = {"cuda"}  # types of devices


@cache
def _compiled(function: F) -> F:
    # Of a reduction that it computes in another order, in each process.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    return cast(F, torch.compile(function, dynamic=True))


def fused(function: F, device: torch.device) -> F:
    """Return a function whose operations on a GPU read and write memory once, where they can.

    One operation after the other, each would read and write its block, and the host would start
    them more slowly than they compute. On a CPU a block is in the cache, and nothing is compiled.
    ``TORCHDYNAMO_DISABLE=1`` is torch's own switch.
    """
    return _compiled(function) if device.type in COMPILED else function
