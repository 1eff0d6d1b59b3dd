"""Measure the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures the seconds of a step, as metrics ``time/PHASE`` and ``time/step``."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.laps: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs in the block. A phase that comes twice is added up."""
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - began
        self.laps["time/step"] = now - self._start
