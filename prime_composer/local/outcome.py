"""How a run on this machine ended, and what it has left."""

from dataclasses import dataclass, field
from pathlib import Path

from prime_composer.local.checkpoint import Checkpoint, list_checkpoints


class RunStopped(ValueError):
    """An error that is not the recipe's ended a run after its start.

    Attributes:
        step: the step to continue from; 0 where no checkpoint is there.
        checkpoint: the checkpoint of that step; None where there is none.
    """

    def __init__(self, message: str, checkpoint: Checkpoint | None):
        super().__init__(message)
        self.step = 0 if checkpoint is None else checkpoint.step
        self.checkpoint = checkpoint


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
