"""Run the command line in child processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prime_composer.local.tracker import read_metrics
from tests.fork_server import ForkServer

CLI = ("-m", "prime_composer.cli")
"""The words after ``python`` for the command line, here and in a fork."""


def sets(*items: str) -> list[str]:
    """Return the words that change a recipe's keys."""
    return [word for item in items for word in ("--set", item)]


def prime_rl(
    *words: object, cwd: Path | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, in a new process."""
    command = [sys.executable, *CLI, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, check=check, timeout=300
    )


def toml(raw: dict[str, Any]) -> str:
    """Return a recipe as TOML text, with every table inline."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    return "\n".join(f"{key} = {value(item)}" for key, item in raw.items()) + "\n"


def interrupt_after(
    steps: int,
    words: list[object],
    cwd: Path,
    metrics: Path,
    forks: ForkServer,
    signum: int = signal.SIGINT,
) -> subprocess.CompletedProcess[str]:
    """Start a run, and send Ctrl-C or another signal after it has logged ``steps`` steps."""
    process = forks.start(*CLI, *words, cwd=cwd)
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > steps):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """Return the records of a run without what a clock measured, or what a tape had already."""
    return [
        {
            key: value
            for key, value in record.items()
            if not key.startswith("time/")
            and key != "tokens_per_second"
            and not key.endswith("tape/read")
        }
        for record in read_metrics(run_dir)
    ]
