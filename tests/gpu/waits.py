"""Notice a wait for the GPU: the host reads a number, or the size of a result, from the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
"""Operations that would wait on a GPU. Indexing by a mask is another one."""


class Waited(AssertionError):
    """An operation would wait on a GPU."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        by_mask = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name in WAITING or by_mask:
            raise Waited(f"{name} would wait for the GPU")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """Raise where the host waits for the device. On a CPU: for what would wait on a GPU."""
    if device != "cuda":
        with _Watch():
            yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
