"""The command line with faults: ``python -m tests.islands.child PLAN WORDS``, PLAN a JSON object.

slow: seconds that each update takes longer. gate: {"step": n, "file": path}: step n waits until the
file is there. explode: the step whose update leaves weights that are far too large. kill_after: the
step after which the process kills itself. unreachable: no state of another island can be fetched.
proxy: the environment's HTTP proxy. machine: the network namespace that the process runs in.
kill_in: the outer step, from 0, in the middle of whose all-reduces the process kills itself.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from prime_composer.cli.commands import main
from prime_composer.local.islands import board, island, lighthouse, outer
from prime_composer.local.run import Run

HEARTBEAT_MS = 1500
"""Shorter than the lighthouse's own, and so is the age of a card that is alive."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def move_to(machine: str) -> None:
    """Let this process see the network of a namespace alone (``os.setns`` of Python 3.12)."""
    with open(f"/var/run/netns/{machine}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0


def disturb(plan: dict[str, Any]) -> None:
    """Patch the package as the plan says."""
    lighthouse.HEARTBEAT_MS = HEARTBEAT_MS
    board.ALIVE_SECONDS = 2.5
    update, end_step = Run.update, Run.end_step

    def slow_update(self: Run, batch: Any, step: int) -> dict[str, float]:
        time.sleep(plan.get("slow", 0.0))
        gate = plan.get("gate", {"step": 0})
        while step == gate["step"] and not Path(gate["file"]).exists():
            time.sleep(0.05)
        if step == plan.get("explode"):
            self.student.optimizer.register_step_post_hook(
                lambda *_: [parameter.data.mul_(1e9) for parameter in self.student.trained]
            )
        return update(self, batch, step)

    def last_end_step(self: Run, step: int, *rest: Any) -> None:
        end_step(self, step, *rest)
        assert self.island is not None
        if self.island.is_outer(step):
            digest = island.digest_of(self.student.trained)
            print(f"after {step}: step {self.student.steps} {digest}", flush=True)
        if step == plan.get("kill_after"):
            die()

    Run.update, Run.end_step = slow_update, last_end_step
    if "machine" in plan:
        move_to(plan["machine"])
    if "proxy" in plan:
        os.environ["http_proxy"] = plan["proxy"]
    if plan.get("unreachable"):
        from torchft.checkpointing import HTTPTransport

        def refused(*_: Any, **__: Any) -> None:
            raise OSError("Connection refused")

        HTTPTransport.recv_checkpoint = refused
    if "kill_in" in plan:
        torchft = outer.import_torchft()
        allreduce, calls = torchft.Manager.allreduce, []

        def dying(self: Any, *words: Any, **how: Any) -> Any:
            if self.current_step() == plan["kill_in"]:
                calls.append(1)
            if len(calls) == 3:  # two tensors are on their way
                time.sleep(0.2)
                die()
            return allreduce(self, *words, **how)

        torchft.Manager.allreduce = dying


if __name__ == "__main__":
    disturb(json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
