"""A loss's state across prime-rl's own resume: one line of JSON per step, beside its checkpoints.

prime-rl saves model, optimizer and progress. A loss with a state (TAID's schedule) would start anew
after a resume. The line of step n holds the state of a run that is about to train step n. It is
written when the batch of step n is asked for, right after the checkpoint of step n - 1. So the last
step of a run has no line after it.
"""

import json
import os
from pathlib import Path
from typing import Any

from prime_composer.losses.bound import Objective
from prime_composer.upstream.log import log

FILE = "prime_composer_loss.jsonl"


class Journal:
    """The states of one objective."""

    def __init__(self, folder: Path, start_step: int):
        self.path = folder / FILE
        self.start_step = start_step

    def restore(self, objective: Objective) -> None:
        """Give ``objective`` the state of the first step, and log which one it was given.

        A run that was extended after its last step has no line of its first step. It takes the line
        of the step before, so its schedule repeats one step.
        """
        name = objective.config.type
        record = self._newest(name)
        if record is not None and self.start_step - record["step"] <= 1:
            objective.load_state_dict(record["state"])
            exact = record["step"] == self.start_step
            repeated = "" if exact else ", and repeats that step's schedule"
            log(f"{name} goes on with its state of step {record['step']}{repeated}")
        elif self.start_step > 1:
            log(
                f"{name} starts its schedule anew at step {self.start_step}: {self.path} has no "
                "state of that step or the one before"
            )

    def keep(self, step: int, objective: Objective) -> None:
        """Write the state of a run that is about to train ``step``; only rank 0 writes."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        record = {
            "step": step,
            "type": objective.config.type,
            "state": objective.state_dict(),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _newest(self, name: str) -> dict[str, Any] | None:
        """Return the line that was written last among those up to the first step.

        Steps may repeat: a run that was resumed from an older step has replaced the later ones.
        Where that line is too old, the line of the first step itself counts, which an earlier run
        wrote: its checkpoint is still there.
        """
        newest = exact = None
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # a process died while it wrote this line
                continue
            if record["type"] == name and record["step"] <= self.start_step:
                newest = record
                exact = record if record["step"] == self.start_step else exact
        if newest is not None and self.start_step - newest["step"] > 1:
            return exact
        return newest
