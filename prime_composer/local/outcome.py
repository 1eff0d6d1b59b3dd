"""How a run on this machine ended, and what it has left."""

from dataclasses import dataclass, field
from pathlib import Path

from prime_composer.local.checkpoint import Checkpoint, list_checkpoints


class RunStopped(ValueError):
    """An error that is not the recipe's ended a run after its start, for a ``reason``.

    ``checkpoint`` is the one to continue from, and ``verified`` a step before it whose answers are
    verified, where its own are in doubt.
    """

    def __init__(self, reason: str, checkpoint: Checkpoint | None, verified: int | None = None):
        state = "no earlier step is saved"
        if checkpoint is not None:
            state = f"step {checkpoint.step} is saved in {checkpoint.path}"
        super().__init__(f"{reason}; {state}")
        self.reason, self.checkpoint, self.verified = reason, checkpoint, verified


@dataclass
class Outcome:
    """How a run ended."""

    run_dir: Path
    steps: int  # finished
    interrupted: bool  # a signal ended the run before its last step
    # what was measured after each step; step 0 is before training
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    signum: int | None = None  # number of the signal that came; None without one
    best: int | None = None  # the evaluation by which ``trainer.until`` ended the run

    @property
    def student(self) -> Path | None:
        """The newest checkpoint, a directory of the model or its adapter; None without one."""
        checkpoints = list_checkpoints(self.run_dir)
        return checkpoints[-1].path if checkpoints else None
