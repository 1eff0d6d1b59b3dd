"""Checkpoints that are whole or absent: written beside the old ones, flushed to disk, then renamed."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_composer.backends.hf_model import without_progress_bars

CHECKPOINTS = "checkpoints"
_TRAINER_FILE = "trainer.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: ``path`` holds the model in Hugging Face format, and the trainer's state beside it."""

    path: Path
    step: int

    def load(self) -> dict[str, Any]:
        """The trainer's state as ``save_checkpoint`` got it, with its "step"."""
        return torch.load(self.path / _TRAINER_FILE, map_location="cpu", weights_only=True)


def save_checkpoint(
    run_dir: Path, step: int, model: nn.Module, tokenizer: Any, state: dict[str, Any], keep: int
) -> Checkpoint:
    """Write the checkpoint of ``step``, atomically, and drop all but the newest ``keep``.

    A crash at any point leaves the older checkpoints as they were, and at most one ``.tmp`` directory, which the next
    save removes.
    """
    folder = run_dir / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("*.tmp"):
        shutil.rmtree(left_over)
    target = folder / f"step_{step:06d}"
    if target.exists():
        return Checkpoint(target, step)
    spare = folder / f"{target.name}.tmp"
    spare.mkdir()
    with without_progress_bars():
        model.save_pretrained(spare)
    tokenizer.save_pretrained(spare)
    torch.save({**state, "step": step}, spare / _TRAINER_FILE)
    for file in spare.iterdir():
        _flush(file)
    _flush(spare)
    os.rename(spare, target)
    _flush(folder)
    for old in list_checkpoints(run_dir)[:-keep]:
        # Renamed first: half deleted, it must no longer look complete.
        doomed = old.path.with_name(f"{old.path.name}.tmp")
        os.rename(old.path, doomed)
        shutil.rmtree(doomed)
    return Checkpoint(target, step)


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first."""
    steps = {
        path: path.name.removeprefix("step_")
        for path in (Path(run_dir) / CHECKPOINTS).glob("step_*")
    }
    found = [Checkpoint(path, int(step)) for path, step in steps.items() if step.isdigit()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
