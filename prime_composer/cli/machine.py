"""Look at this machine, and set what torch reads from the environment when it is imported."""

import os
from importlib.util import find_spec
from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Check for the driver; asking torch would import it."""
    return Path("/proc/driver/nvidia/version").exists()


SPINS = "100000"
"""How often a thread of GNU's OpenMP looks for work before it falls asleep, about 2 ms. To wake it
takes 0.2 ms here, longer than most operations of a model; one that never sleeps takes a core from
whatever else is running."""


def set_environment() -> None:
    """Set what torch reads from the environment when it is imported; the user's own values stay.

    On a CPU, torch and vLLM keep to one OpenMP thread: with several spinning threads each,
    generation was up to twelve times slower. Where a large model gets all cores
    (``cpu_guard.all_cores``), its threads soon fall asleep. torch's warning about NUMA binding
    would break the progress bar.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not has_nvidia_gpu() and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        os.environ.setdefault("PRIME_COMPOSER_THREADS", str(usable_cores()))


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, and its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def shared_by(processes: int) -> dict[str, str]:
    """Return the environment of each of several processes that compute at the same time."""
    threads = os.environ.get("PRIME_COMPOSER_THREADS", "")
    if not threads.isdecimal():
        return dict(os.environ)
    return os.environ | {"PRIME_COMPOSER_THREADS": str(max(1, int(threads) // processes))}


def choose_engine(engine: str) -> tuple[str, str]:
    """Return the engine to use, and the reason. "auto" is prime-rl where it and a GPU are there."""
    if engine != "auto":
        return engine, "as asked"
    if find_spec("prime_rl") is None:
        return "local", "prime-rl is not installed here"
    if not has_nvidia_gpu():
        return (
            "local",
            "prime-rl is installed, but this machine has no NVIDIA GPU, which its trainer needs",
        )
    return "prime-rl", "prime-rl is installed and there is a GPU; --engine local for one process"
