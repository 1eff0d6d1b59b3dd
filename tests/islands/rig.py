"""A lighthouse and islands as processes of this machine, which end with their test."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prime_composer.local.tracker import METRICS_FILE, parse_records
from tests.command import toml
from tests.conftest import TINY_RECIPE, changed
from tests.fork_server import Fork, ForkServer
from tests.local.helpers import weights

SECONDS = 120.0
"""Time for whatever is waited for."""


def tables(**changes: Any) -> dict[str, Any]:
    """Return a recipe of two islands with an outer step after every second step."""
    diloco = {"replicas": 2, "every": 2, "wait": 60.0, "timeout": 10.0}
    base = TINY_RECIPE | {"diloco": diloco, "eval": {"every": 4, "size": 4, "kl_size": 4}}
    return changed(base, **{"trainer__steps": 8, "checkpoint__every": 2} | changes)


def free_ports() -> int:
    """Return a port that is free, as the next one is."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, and return their results or errors."""
    results: list[Any] = [None] * len(calls)

    def keep(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=keep, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
        assert not thread.is_alive()
    return results


class Rig:
    """Starts processes in a folder with the recipe ``r.toml``, and ends them.

    Attributes:
        folder: the working directory. Islands run in ``out``.
        host: address of the lighthouse.
    """

    def __init__(self, forks: ForkServer, folder: Path, raw: dict[str, Any]):
        self.forks, self.folder = forks, folder
        (folder / "r.toml").write_text(toml(raw))
        self.host, self._port = "127.0.0.1", free_ports()
        self._forks: list[Fork] = []

    @property
    def url(self) -> str:
        """URL of the lighthouse."""
        return f"http://{self.host}:{self._port}"

    def light(self, **plan: Any) -> Fork:
        """Start the lighthouse."""
        own = ["--host", self.host, "--port", str(self._port)]
        return self._start(plan, "lighthouse", "--config", "r.toml", *own)

    def island(self, index: int, *words: str, **plan: Any) -> Fork:
        """Start an island with the faults of a plan."""
        own = ["--island", str(index), "--lighthouse", self.url, "--output-dir", "out", *words]
        return self._start(plan, "rl", "--config", "r.toml", "--engine", "local", *own)

    def records(self, index: int) -> list[dict[str, Any]]:
        """Return what an island has logged."""
        path = self.run_dir(index) / METRICS_FILE
        return parse_records(path) if path.exists() else []

    def run_dir(self, index: int) -> Path:
        return self.folder / "out" / f"island_{index}"

    def close(self) -> None:
        """Kill what is left, and see that nobody listens any more."""
        for fork in self._forks:
            fork.kill()
            fork.wait(SECONDS)
            for stream in fork._streams:
                stream.close()
        for port in (self._port, self._port + 1):
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0

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
    stream = fork._streams[0]
    return os.pread(stream.fileno(), 10**6, 0).decode(errors="replace")


def ended(fork: Fork, status: int = 0) -> str:
    """Wait for the end of a process, compare its exit status, and return what it wrote."""
    fork.wait(SECONDS)
    out, err = fork.communicate()
    assert fork.returncode == status, out + err
    return out + err


def digests(text: str) -> dict[int, tuple[int, str]]:
    """Return what a child printed after outer steps: step -> finished steps, digest of weights."""
    lines = [line.split() for line in text.splitlines() if line.startswith("after ")]
    return {int(step[:-1]): (int(finished), digest) for _, step, _, finished, digest in lines}


def assert_equal_weights(rig: Rig, *islands: int) -> None:
    first = weights(rig.run_dir(0))
    for index in islands:
        own = weights(rig.run_dir(index))
        assert all(torch.equal(first[name], own[name]) for name in first), index


def kill_and_take_over(
    one: Rig, places: Sequence[dict[str, Any]] = ({}, {}), **of_return: Any
) -> None:
    """Kill island 1 between outer steps, and see both end as one after it has come back.

    Args:
        one: 12 steps, with an outer step after every second one that an island may take alone.
        places: plan of the first island and of the lighthouse; of the second.
        of_return: plan of the second one when it is started again.
    """
    first, second = places
    one.light(**first)
    go = one.folder / "go"
    stays = one.island(0, gate={"step": 8, "file": str(go)}, **first)
    ended(one.island(1, kill_after=3, **second), KILLED)
    until(lambda: len(one.records(0)) > 7, stays)  # steps 0 to 7
    assert [row["islands/together"] for row in one.records(0) if row["step"] in (2, 6)] == [2, 1]
    back = one.island(1, "--resume", **second, **of_return)
    until(lambda: "next outer step" in text_so_far(back), back, stays)
    go.touch()
    ours, theirs = digests(ended(stays)), digests(ended(back))
    assert {*theirs} == {10, 12}
    assert all(ours[step] == theirs[step] for step in theirs)
    assert_equal_weights(one, 0, 1)
    assert one.records(0)[-1]["islands/together"] == 2


KILLED = -signal.SIGKILL
OpenRig = Callable[..., Rig]
