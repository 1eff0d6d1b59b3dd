"""Processes that take turns. One of its own gives a variant a peak of memory of its own."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


def peak_mib() -> float:
    """Return the most memory that this program has had, in MiB, by Linux.

    ``ru_maxrss`` starts at that of the process which started it.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def answer(first: float, step: Callable[[], Sequence[float]]) -> None:
    """Print a number. Then run a step per line of the input, and print its numbers."""
    print(first, flush=True)
    for _ in sys.stdin:
        print(*step(), flush=True)


class Child:
    """A process that calls ``answer``. ``first`` is the number that it began with."""

    def __init__(self, process: subprocess.Popen[str]):
        self._input, self._output = process.stdin, process.stdout
        (self.first,) = self._numbers()

    def _numbers(self) -> list[float]:
        line = self._output.readline()
        assert line, "the process has ended"
        return [float(number) for number in line.split()]

    def step(self) -> list[float]:
        """Let it run a step, and return its numbers."""
        self._input.write("\n")
        self._input.flush()
        return self._numbers()


@contextmanager
def children(module: str, each: Sequence[Sequence[str]]) -> Iterator[list[Child]]:
    """Start a process of a module for each list of words, and end them."""
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [
            stack.enter_context(subprocess.Popen([sys.executable, "-m", module, *words], **pipes))
            for words in each
        ]
        yield [Child(process) for process in started]
