"""The command line with faults: ``python -m tests.islands.child PLAN WORDS``, PLAN a JSON object.

slow: seconds that each update takes longer. gate: {"step": n, "file": path}: step n waits until the
file is there. explode: the step whose update leaves weights that are far too large. kill_after: the
step after which the process kills itself. kill_in: the outer step, from 0, in the middle of whose
all-reduces it does. proxy: the environment's HTTP proxy.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from prime_composer.cli.commands import main
from prime_composer.local.islands import island, join, outer
from prime_composer.local.run import TrainingRun


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disturb(plan: dict[str, Any]) -> None:
    """Patch the package as the plan says."""
    join.HEARTBEAT_MS, join.JOIN_MS, join.PAUSES = 1500, 800, {"joining": 0.2, "running": 0.4}
    update, end_step = TrainingRun.update, TrainingRun.end_step

    def slow_update(self: TrainingRun, batch: Any, step: int) -> dict[str, float]:
        print(f"update {step}", flush=True)
        time.sleep(plan.get("slow", 0.0))
        gate = plan.get("gate", {"step": 0})
        while step == gate["step"] and not Path(gate["file"]).exists():
            time.sleep(0.05)
        if step == plan.get("explode"):
            self.student.optimizer.register_step_post_hook(
                lambda *_: [parameter.data.mul_(1e9) for parameter in self.student.trained]
            )
        return update(self, batch, step)

    def last_end_step(self: TrainingRun, step: int, *rest: Any) -> None:
        end_step(self, step, *rest)
        if self.island is not None and self.island.is_outer(step):
            digest = island.tensors_digest(self.student.trained)
            print(f"after {step}: step {self.student.steps} {digest}", flush=True)
        if step == plan.get("kill_after"):
            die()

    TrainingRun.update, TrainingRun.end_step = slow_update, last_end_step
    if "proxy" in plan:
        os.environ["http_proxy"] = plan["proxy"]
    manager = outer.import_torchft().Manager
    allreduce, calls = manager.allreduce, []

    def dying(self: Any, *words: Any, **how: Any) -> Any:
        calls.extend([1] * (self.current_step() == plan.get("kill_in")))
        if len(calls) == 3:  # two tensors are on their way
            time.sleep(0.2)
            die()
        return allreduce(self, *words, **how)

    manager.allreduce = dying


if __name__ == "__main__":
    disturb(json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
