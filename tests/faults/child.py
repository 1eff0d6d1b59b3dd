"""Run commands in processes that have the libraries loaded already."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tests.conftest  # noqa: F401  (variables that the server reads once)
from tests.fork_server import ENGINE, Fork, ForkServer

COMMAND = f"""
import resource, sys
from tests.faults.watched import install
install()
from prime_composer.cli.commands import main
resource.setrlimit(resource.RLIMIT_AS, ({12 * 2**30}, {12 * 2**30}))
sys.exit(main())
"""
"""``prime-rl`` with an address space of 12 GiB: nonsense must not take the machine with it. Its
environment may say which changes of files are watched (``tests.faults.watched``)."""


@dataclass
class Done:
    """How a command ended."""

    status: int  # exit status; -n for the signal n
    output: str  # what it wrote to standard output, then to standard error
    timed_out: bool = False  # whether it was killed because its time was over

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


def server() -> ForkServer:
    """Return a server of processes that have loaded what a run needs, and a tiny model."""
    return ForkServer("torch", *ENGINE, "tests.faults.watched", "tests.faults.warmed")


def run(
    server: ForkServer,
    words: Sequence[object],
    cwd: Path,
    limit: float = 120.0,
    meanwhile: Callable[[Fork], object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run a command to its end."""
    process = server.start("-c", COMMAND, *words, cwd=cwd, env=env)
    timed_out = False
    try:
        if meanwhile is not None:
            meanwhile(process)
        process.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        process.kill()
        out, err = process.communicate()
    return Done(process.wait(), out + err, timed_out)
