"""The memory and descriptors of processes, from ``/proc``."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MB = 2**20


def memory(pids: Sequence[int]) -> float:
    """Return the resident memory of processes together, in MB; what has ended counts nothing."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def descriptors(pids: Sequence[int]) -> int:
    """Return the number of open descriptors of processes together."""
    count = 0
    for pid in pids:
        try:
            count += len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


def tree_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                pids += [int(child) for child in task.read_text().split()]
    return pids


@dataclass
class Level:
    """A number over time: where it was after the warm-up, and where it ended."""

    start: float  # median of the first fifth of the samples
    warm: float  # median of the samples between two and three fifths
    end: float  # median of the last fifth

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Level":
        """Return the level of samples that were taken at equal times."""
        n = len(samples)
        parts = (samples[: n // 5], samples[2 * n // 5 : 3 * n // 5], samples[4 * n // 5 :])
        return cls(*(median(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.start:.0f} -> {self.warm:.0f} -> {self.end:.0f}"
