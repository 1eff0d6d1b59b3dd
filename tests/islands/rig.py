"""A lighthouse and islands as processes of this machine, which end with their test."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from prime_composer.local.tracker import METRICS_FILE, parse_records
from tests.command import toml
from tests.conftest import TINY_RECIPE, changed
from tests.fork_server import Fork, ForkServer
from tests.local.helpers import tiny_models, weights

SECONDS = 120.0
"""Time for whatever is waited for."""

KILLED = -signal.SIGKILL


def tables(**changes: Any) -> dict[str, Any]:
    """Return a recipe of two islands with an outer step after every second step."""
    diloco = {"replicas": 2, "every": 2, "wait": 60.0, "timeout": 10.0}
    base = TINY_RECIPE | {"diloco": diloco, "eval": {"every": 4, "size": 4, "kl_size": 4}}
    return changed(base, **{"trainer__steps": 8, "checkpoint__every": 2} | changes)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, and return their results or errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(100.0) or future.result() for future in futures]


class Rig:
    """Starts processes in a folder with the recipe ``r.toml``; islands run in its ``out``."""

    def __init__(self, forks: ForkServer, folder: Path, raw: dict[str, Any]):
        self.forks, self.folder = forks, folder
        tiny_models(raw)
        (folder / "r.toml").write_text(toml(raw))
        self._port = 20000 + 2 * random.randrange(5000)
        self._forks: list[Fork] = []

    def light(self, **plan: Any) -> Fork:
        return self._start(plan, "lighthouse", "--config", "r.toml", "--port", str(self._port))

    def island(self, index: int, *words: str, **plan: Any) -> Fork:
        """Start an island with the faults of a plan."""
        url = f"http://127.0.0.1:{self._port}"
        own = ["--island", str(index), "--lighthouse", url, "--output-dir", "out", *words]
        return self._start(plan, "rl", "--config", "r.toml", "--engine", "local", *own)

    def islands(self, count: int, **plan: Any) -> list[Fork]:
        """Start the first islands, with one plan for all of them."""
        return [self.island(index, **plan) for index in range(count)]

    def records(self, index: int) -> list[dict[str, Any]]:
        path = self.run_dir(index) / METRICS_FILE
        return parse_records(path) if path.exists() else []

    def together(self, index: int) -> dict[int, float]:
        """Return how many islands took part in each outer step that an island has logged."""
        return {one["step"]: one["islands/together"] for one in self.records(index)
                if "islands/together" in one}  # fmt: skip

    def run_dir(self, index: int) -> Path:
        return self.folder / "out" / f"island_{index}"

    def saved(self, index: int) -> list[str]:
        """Return the names of an island's checkpoints."""
        return sorted(path.name for path in (self.run_dir(index) / "checkpoints").iterdir())

    def assert_equal_weights(self, *islands: int) -> None:
        first, *others = (weights(self.run_dir(index)) for index in islands)
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)

    def close(self) -> None:
        """Kill what is left."""
        for fork in self._forks:
            fork.kill()
            fork.wait(SECONDS)
            for stream in fork._streams:
                stream.close()

    def _start(self, plan: dict[str, Any], *words: str) -> Fork:
        command = ("-m", "tests.islands.child", json.dumps(plan), *words)
        self._forks.append(self.forks.start(*command, cwd=self.folder))
        return self._forks[-1]


def until(condition: Callable[[], bool], *forks: Fork) -> None:
    """Wait for a condition, while processes run."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        for fork in forks:
            assert fork.poll() is None, fork.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def text_so_far(fork: Fork) -> str:
    """Return what a process has written to standard output."""
    return os.pread(fork._streams[0].fileno(), 10**6, 0).decode(errors="replace")


def ended(fork: Fork, status: int = 0) -> str:
    """Wait for the end of a process, compare its exit status, and return what it wrote."""
    fork.wait(SECONDS)
    text = "".join(fork.communicate())
    assert fork.returncode == status, text
    return text


def digests(text: str) -> dict[int, tuple[int, str]]:
    """Return what a child printed after outer steps: step -> finished steps, digest of weights."""
    lines = [line.split() for line in text.splitlines() if line.startswith("after ")]
    return {int(step[:-1]): (int(finished), digest) for _, step, _, finished, digest in lines}
