"""What has to happen before transformers or vLLM is imported on a machine whose PyTorch is built for the CPU.

A CPU-only vLLM installs together with a torchvision from the default package index, which is a CUDA build. It cannot
load beside a CPU PyTorch ("operator torchvision::nms does not exist"), and transformers imports it wherever it finds
it. None of these packages is needed for text, so they are declared absent; on a CUDA PyTorch nothing is touched.

Can go once PyPI's vLLM for the CPU depends on CPU builds, or transformers survives a torchvision that does not load.
"""

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch

OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def built_for_cpu() -> bool:
    """Whether PyTorch is a build without CUDA, ROCm or XPU."""
    return (
        torch.version.cuda is None
        and torch.version.hip is None
        and getattr(torch.version, "xpu", None) is None
    )


def hide_cuda_packages() -> None:
    """Make ``find_spec`` answer None for packages whose CUDA build would break an import; call it before transformers.

    Packages that are already imported, or that are marked as CPU builds (version "...+cpu"), stay visible.
    """
    if not built_for_cpu():
        return
    for name in OPTIONAL_PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in sys.modules and not version.endswith("+cpu"):
            sys.modules[name] = None


def quiet_vllm_environment(multiprocessing: bool) -> None:
    """Defaults of vLLM's environment variables; what the user has set stays."""
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if not multiprocessing:
        # The engine lives in this process, so that the trainer's weights and the seed reach it.
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if built_for_cpu():
        # The log-probs path is one small compiled kernel: not worth a C++ compiler and 20 s on a CPU.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def use_one_thread_unless_told() -> None:
    """One OpenMP thread on a CPU build, unless OMP_NUM_THREADS says otherwise.

    vLLM's OpenMP threads spin while they wait: two engines and a trainer with several threads each run up to 12 times
    slower than with one. vLLM makes ``torch.set_num_threads`` a no-op when it starts, so this has to come before.
    """
    if built_for_cpu() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def import_vllm(multiprocessing: bool = False):
    """The vllm module, imported so that it works on a CPU build too.

    Args:
        multiprocessing: engines get a process of their own, as in a server; otherwise they live in this one.

    Raises:
        ImportError: vLLM is missing; the message names the pip line.
    """
    quiet_vllm_environment(multiprocessing)
    hide_cuda_packages()
    use_one_thread_unless_told()
    if built_for_cpu():
        # It says, before vLLM has set up its logging, that Triton has no CPU backend.
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ImportError(
                "The recipe asks for backend 'vllm' and vLLM is not installed: pip install 'prime-composer[local]' on "
                "a CPU machine, 'prime-composer[gpu]' on a GPU machine, or choose backend = 'transformers'."
            ) from error
        if built_for_cpu():
            import vllm.model_executor.models.registry as registry

            # vLLM looks at an architecture for the first time in a subprocess, to keep CUDA out of this one. The guard
            # does not reach that subprocess, and on a CPU build there is no CUDA to keep out.
            registry._run_in_subprocess = lambda inspect: inspect()
        import vllm.v1.engine.core as core

        # Closing an engine destroys the process group and the model-parallel groups of the whole process, which every
        # other engine in it still uses, and the trainer maybe too. They hold no memory worth the name: they stay.
        core.cleanup_dist_env_and_memory = lambda: None
    return vllm


@contextmanager
def preserved_rng() -> Iterator[None]:
    """The global random states of torch, Python and NumPy are the same after the block as before it.

    An engine seeds them when it starts and draws from torch's when it samples; the trainer's must not notice.
    """
    import numpy as np

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
