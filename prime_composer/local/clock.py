"""Measure the parts of a step."""

import time


class Clock:
    """Measures the seconds of a step, as metrics ``time/<part>`` and ``time/step``."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """End a part that began with the last call, or with the clock."""
        now = time.perf_counter()
        self.laps[f"time/{part}"] = now - self._last
        self.laps["time/step"] = now - self._start
        self._last = now
