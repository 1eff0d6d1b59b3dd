"""Run commands in processes that have the libraries loaded already: a second each, not eight.

A fork server loads them once. Its children are real processes, which signals and SIGKILL reach.
"""

import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is loaded, here and in the children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LOADED = (
    "tests.faults.server",  # first: it hides what transformers cannot import
    "prime_composer.cli.commands",
    "prime_composer.cli.runs",
    "prime_composer.local.train",
    "prime_composer.local.plan",
    "prime_composer.backends.transformers",
    "prime_composer.backends.vllm_server",
    "tests.faults.child",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.figure",
    "httpx",
)
MOST_MEMORY = 12 * 2**30
"""Address space of a child, in bytes: a recipe of nonsense must not take the machine with it."""


@dataclass
class Done:
    """How a command ended.

    Attributes:
        status: exit status; -n for the signal n.
        output: what it wrote to standard output and standard error.
        timed_out: whether it was killed because its time was over.
    """

    status: int
    output: str
    timed_out: bool = False

    @property
    def has_traceback(self) -> bool:
        """Whether the user saw a traceback."""
        return "Traceback" in self.output

    @property
    def message(self) -> str:
        """The last lines, in which a command says why it ended."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        found = [line for line in lines if line.startswith("prime-rl ")]
        return (found or lines or [""])[-1]


def context() -> Any:
    """Return the multiprocessing context whose server has the libraries loaded."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(LOADED))
    return made


def command(words: Sequence[str], output: str, cwd: str) -> None:
    """Run ``prime-rl WORDS`` as this process, and exit as it would."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
    sys.argv = ["prime-rl", *words]
    from prime_composer.cli.commands import main

    try:
        status = main(list(words))
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(
    made: Any,
    words: Sequence[object],
    cwd: Path,
    limit: float = 120.0,
    meanwhile: Callable[[Any], object] | None = None,
) -> Done:
    """Run a command to its end.

    Args:
        made: what ``context`` returned.
        words: the words after ``prime-rl``.
        cwd: its working directory; its output is ``output.txt`` in it.
        limit: seconds after which it is killed.
        meanwhile: called with the process once it runs; it may send signals.
    """
    output = cwd / "output.txt"
    process = made.Process(target=command, args=([str(word) for word in words], output, str(cwd)))
    process.start()
    end = time.monotonic() + limit
    try:
        if meanwhile is not None:
            meanwhile(process)
        process.join(max(0.0, end - time.monotonic()))
        timed_out = process.is_alive()
    finally:
        process.kill()
        process.join()
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Done(process.exitcode, text, timed_out)
