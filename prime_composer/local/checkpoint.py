"""Write checkpoints that are complete or absent: written to disk beside the old ones, then
renamed."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prime_composer.backends.hf_model import without_progress_bars

CHECKPOINTS = "checkpoints"
_TRAINER_FILE = "trainer.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: directory with the model in Hugging Face format and the trainer's state.
        step: finished optimizer steps.
    """

    path: Path
    step: int

    def load(self) -> dict[str, Any]:
        """Return the trainer's state that was passed to ``save_checkpoint``, and its "step"."""
        return torch.load(self.path / _TRAINER_FILE, map_location="cpu", weights_only=True)


def save_checkpoint(
    run_dir: Path, step: int, model: Any, tokenizer: Any, state: dict[str, Any], keep: int
) -> Checkpoint:
    """Write the checkpoint of ``step`` atomically, and delete all but the newest ``keep``.

    A crash at any point leaves the older checkpoints as they were, and at most one ``.tmp``
    directory, which the next save removes.

    Args:
        run_dir: the run directory.
        step: finished optimizer steps.
        model: the student, a transformers model.
        tokenizer: its tokenizer.
        state: the trainer's state, as tensors and plain values.
        keep: checkpoints that remain, at least 1.
    """
    folder = run_dir / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob("*.tmp"):
        shutil.rmtree(unfinished)
    target = folder / f"step_{step:06d}"
    if target.exists():
        return Checkpoint(target, step)
    unfinished = folder / f"{target.name}.tmp"
    unfinished.mkdir()
    with without_progress_bars():
        model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    torch.save({**state, "step": step}, unfinished / _TRAINER_FILE)
    for file in unfinished.iterdir():
        _flush(file)
    _flush(unfinished)
    os.rename(unfinished, target)
    _flush(folder)
    for old in list_checkpoints(run_dir)[:-keep]:
        # Renamed first, so that a half-deleted checkpoint does not look complete.
        renamed = old.path.with_name(f"{old.path.name}.tmp")
        os.rename(old.path, renamed)
        shutil.rmtree(renamed)
    return Checkpoint(target, step)


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first."""
    steps = {
        path: path.name.removeprefix("step_")
        for path in (Path(run_dir) / CHECKPOINTS).glob("step_*")
    }
    checkpoints = [Checkpoint(path, int(step)) for path, step in steps.items() if step.isdigit()]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
