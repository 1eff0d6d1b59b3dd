"""A schedule's state across prime-rl's own resume: one line of JSON per optimiser step, beside prime-rl's checkpoints.

prime-rl saves model, optimiser and progress; a loss with a state (TAID) would start anew after a resume. The line of step
n holds the state of a run that is about to train step n, so that a resume from any checkpoint finds its own.
"""

import functools
import inspect
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_composer.losses.base import Loss
from prime_composer.upstream.versions import UnknownSurface
from prime_composer.upstream.registration import current, say

FILE = "prime_composer_loss.jsonl"


class Journal:
    """The states of one loss.

    Args:
        folder: prime-rl's output directory, which all its processes see.
        start_step: the step that this run begins with.
    """

    def __init__(self, folder: Path, start_step: int):
        self.path = folder / FILE
        self.start_step = start_step

    def restore(self, loss: Loss) -> bool:
        """Give ``loss`` the state of the first step, if it was kept."""
        found = None
        for line in (
            self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ()
        ):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a process that died while writing
                continue
            if record["step"] == self.start_step and record["type"] == loss.config.type:
                found = record[
                    "state"
                ]  # the newest one: a run may have been resumed from an older step before
        if found is not None:
            loss.load_state_dict(found)
        return found is not None

    def keep(self, steps: int, loss: Loss) -> None:
        """Write the state after ``steps`` optimiser steps of this run; one process of all does it."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        record = {
            "step": self.start_step + steps,
            "type": loss.config.type,
            "state": loss.state_dict(),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def hook_data(module: ModuleType) -> None:
    """``DataLoader`` is made with the run's directory and its first step (38494ccb data.py:176, 559b4477 data.py:165); a
    loss with a state takes up its journal there. To go when prime-rl's custom losses can save a state."""
    original = module.DataLoader.__init__
    signature = inspect.signature(original)
    missing = {"output_dir", "start_step"} - set(signature.parameters)
    if missing:
        raise UnknownSurface(
            f"DataLoader lost {', '.join(sorted(missing))}; it has {', '.join(signature.parameters)}."
        )

    @functools.wraps(original)
    def journalled(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        registered = current()
        if registered is None or registered.loss.state is None:
            return
        registered.journal = journal = Journal(Path(given["output_dir"]), given["start_step"])
        kind = registered.loss.config.type
        if journal.restore(registered.loss):
            say(f"{kind} goes on with its state of step {journal.start_step}")
        elif journal.start_step > 1:
            say(
                f"{kind} starts its schedule anew at step {journal.start_step}: {journal.path} has no state of that step"
            )

    module.DataLoader.__init__ = journalled
