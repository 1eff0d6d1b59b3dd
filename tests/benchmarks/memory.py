"""Print how much memory a command takes, with its children, and where it was when it grew.

    python -m tests.benchmarks.memory prime-rl rl --config recipes/smollm2.toml

Each line of the command's output comes with two numbers in MB: what is taken at that moment, and
the peak so far. It is the sum over all processes of their proportional set size (PSS): pages that
several processes share count once. The kernel's counter is read every 0.3 s.
"""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.load.processes import tree_of

INTERVAL = 0.3
"""Seconds between two readings. One of a process with 5 GB takes some milliseconds."""


def pss_mb(process: int) -> float:
    """Return a process's proportional set size in MB; 0 where it has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 / 1e6 if match else 0.0


class Meter:
    """Reads the memory of a process tree in a thread, until ``stop`` is set."""

    def __init__(self, root: int):
        self.root = root
        self.now = self.peak = 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.stop.wait(INTERVAL):
            self.now = sum(map(pss_mb, tree_of(self.root)))
            self.peak = max(self.peak, self.now)


def main() -> int:
    # A signal to the whole group is for the command, whose last lines are still to come.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    command = subprocess.Popen(
        sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    meter = Meter(command.pid)
    assert command.stdout is not None
    for line in command.stdout:
        print(f"{meter.now:6,.0f} {meter.peak:6,.0f}  {line}", end="", flush=True)
    status = command.wait()
    meter.stop.set()
    meter.thread.join()
    print(f"peak: {meter.peak:,.0f} MB of all processes (PSS)")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
