"""Prepare this process for transformers and vLLM on a machine whose PyTorch is built for the CPU.

Everything here changes the whole process. On a CUDA build only ``set_vllm_environment``,
``keep_process_groups`` and ``keep_graphs`` (before each engine) have an effect. ``import_vllm``
calls the others in this order:

- ``hide_cuda_packages``: before transformers is imported
- ``set_vllm_environment``, ``use_one_thread``: before vLLM is imported
- ``inspect_models_in_process``, ``keep_process_groups``: after vLLM is imported
"""

import ctypes
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from prime_composer.backends.errors import how_to_install

OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")

THREADS_VARIABLE = "PRIME_COMPOSER_THREADS"
"""Environment variable: threads of a large model's run on a CPU. The command line sets it to the
number of cores, unless OMP_NUM_THREADS is set. Unset: the threads that PyTorch has."""

LARGE_MODEL = 10_000_000  # Parameters. In a smaller one waking a thread takes as long as its share

_set_num_threads = torch.set_num_threads  # vLLM replaces it by a function that does nothing


def built_for_cpu() -> bool:
    """Return whether PyTorch is a build without CUDA, ROCm or XPU."""
    return (
        torch.version.cuda is None
        and torch.version.hip is None
        and getattr(torch.version, "xpu", None) is None
    )


def hide_cuda_packages() -> None:
    """Make ``find_spec`` return None for packages whose CUDA build breaks transformers' import.

    A CPU-only vLLM installs a torchvision from the default package index, which is a CUDA build. It
    cannot load beside a CPU PyTorch ("operator torchvision::nms does not exist"), and transformers
    imports it wherever it is installed.

    TODO(vllm): remove once PyPI's vLLM for the CPU depends on CPU builds.
    """
    if not built_for_cpu():
        return
    modules: dict[str, Any] = sys.modules
    for name in {*OPTIONAL_PACKAGES} - modules.keys():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not version.endswith("+cpu"):
            modules[name] = None
            # datasets notes at its import that torchcodec is there.
            if name == "torchcodec" and "datasets" in modules:
                modules["datasets"].config.TORCHCODEC_AVAILABLE = False


def set_vllm_environment(multiprocessing: bool) -> None:
    """Set defaults for vLLM's environment variables; values that are already set stay."""
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if not multiprocessing:
        # The engine shares this process, so that the trainer's weights and the seed reach it.
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if built_for_cpu():
        # Log-probs would compile one small kernel, which needs a C++ compiler and 20 s.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def use_one_thread() -> None:
    """Use one OpenMP thread on a CPU build, unless OMP_NUM_THREADS is set.

    vLLM's OpenMP threads spin while they wait: several each are up to 12 times slower than one.
    vLLM makes ``torch.set_num_threads`` a no-op when it starts, so this must run before.
    """
    if built_for_cpu() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def all_cores(model: nn.Module) -> Iterator[None]:
    """Within the block, compute with the threads that ``THREADS_VARIABLE`` allows.

    A small model keeps the thread that it has. Engines of this process compute in the thread that
    calls them, so trainer and engines take turns with the same threads. These sleep soon after
    their last work (the command line sets GOMP_SPINCOUNT): spinning for ever takes the cores from
    whatever else runs. Sums over several threads round differently, so a run's numbers belong to a
    number of threads.
    """
    wanted = os.environ.get(THREADS_VARIABLE, "")
    if not wanted or not built_for_cpu() or not _is_large(model):
        yield
        return
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"{THREADS_VARIABLE} = {wanted!r}: set it to a number of threads")
    with use_threads(int(wanted)):
        yield


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Within the block, compute with this number of threads, on a CPU build."""
    if not built_for_cpu():
        yield
        return
    before = torch.get_num_threads()
    _set_num_threads(number)
    try:
        yield
    finally:
        _set_num_threads(before)


def return_freed_memory(model: nn.Module) -> None:
    """Give the memory that a large model's tensors have left back to the system, where it is glibc.

    glibc keeps what is free in pieces that the trainer's tensors do not fit into.
    """
    libc: Any = ctypes.CDLL(None)
    if _is_large(model) and built_for_cpu() and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _is_large(model: nn.Module) -> bool:
    size = sum(parameter.numel() for parameter in model.parameters())
    return size >= LARGE_MODEL


def inspect_models_in_process() -> None:
    """Let vLLM inspect a model's architecture in this process, on a CPU build.

    ``hide_cuda_packages`` does not reach vLLM's own subprocess for it.

    TODO(vllm): remove with ``hide_cuda_packages``.
    """
    if not built_for_cpu():
        return
    from vllm.model_executor.models import registry

    module: Any = registry
    module._run_in_subprocess = lambda function: function()


def missing_for(architecture: str) -> str | None:
    """Return the package that vLLM's class of an architecture imports and that is not usable here.

    ``hide_cuda_packages`` hides it; vLLM itself only says to look at its logs.
    """
    import_vllm()
    from vllm.model_executor.models.registry import ModelRegistry

    known: Any = ModelRegistry.models.get(architecture)
    try:
        if known is not None:
            known.load_model_cls()
    except ModuleNotFoundError as error:
        return error.name
    return None


def keep_process_groups() -> None:
    """Stop a closing engine from destroying the process groups of the whole process.

    Other engines in this process still use them, and possibly the trainer.

    TODO(vllm): remove once closing an engine leaves the groups of other engines alone.
    """
    from vllm.v1.engine import core

    module: Any = core
    module.cleanup_dist_env_and_memory = lambda *_, **__: None


def keep_graphs() -> None:
    """Keep the CUDA graphs of the engines that are open, before another one starts.

    To estimate its memory, an engine captures graphs and then drops those of the whole process.
    Whoever had captured them fails at its next batch: "CUDA graph capturing detected at an
    inappropriate time".

    TODO(vllm): remove once an engine drops its own graphs alone.
    """
    from vllm.compilation import breakable_cudagraph, cuda_graph

    for owner in (cuda_graph.CUDAGraphWrapper, breakable_cudagraph.BreakableCUDAGraphWrapper):
        owner._all_instances = WeakSet()


def import_vllm(multiprocessing: bool = False) -> Any:
    """Return the vllm module, imported so that it works on a CPU build too."""
    set_vllm_environment(multiprocessing)
    hide_cuda_packages()
    use_one_thread()
    if built_for_cpu():
        # It logs, before vLLM has set up its logging, that Triton has no CPU backend.
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ImportError(
                "The recipe asks for backend 'vllm' and vLLM is not installed: "
                f"{how_to_install()}, or choose backend = 'transformers'."
            ) from error
        inspect_models_in_process()
        keep_process_groups()
    return vllm


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global random states of torch, Python and NumPy after the block.

    An engine seeds them when it starts, and draws from torch's when it samples.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
