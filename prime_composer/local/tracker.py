"""Log metrics to ``metrics.jsonl``, and to TensorBoard and W&B where the recipe enables them."""

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

from prime_composer.recipe.schema import LoggingConfig

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_run_id.txt"


class Tracker:
    """Writes one record per step; on resume, drops records newer than the checkpoint.

    Args:
        run_dir: the run directory.
        config: the recipe's ``[logging]``.
        resume_step: the checkpoint's step; None for a fresh run.

    Raises:
        ValueError: ``[logging.wandb]`` is set and W&B is not installed.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig, resume_step: int | None = None):
        wandb: Any = None if config.wandb is None else import_wandb()
        path = run_dir / METRICS_FILE
        if resume_step is not None:
            kept = [record for record in read_metrics(run_dir) if record["step"] <= resume_step]
            rewritten = path.with_suffix(".tmp")
            rewritten.write_text(
                "".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8"
            )
            os.replace(rewritten, path)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = self._wandb = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        if config.wandb is not None:
            # A resumed run continues its own W&B run. W&B ignores steps that it has already; the
            # resumed run only repeats their numbers.
            id_file = run_dir / WANDB_ID_FILE
            continues = resume_step is not None and id_file.exists()
            self._wandb = wandb.init(
                project=config.wandb.project,
                name=config.wandb.name or run_dir.name,
                dir=str(run_dir),
                id=id_file.read_text(encoding="utf-8") if continues else None,
                resume="allow",
            )
            id_file.write_text(self._wandb.id, encoding="utf-8")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one record, and flush it so that a crash of this process does not lose it."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        """Close the file and the other loggers."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def import_wandb() -> Any:
    """Return the wandb module.

    Raises:
        ValueError: it is not installed; the message names the pip line.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError("[logging.wandb] needs Weights & Biases: pip install wandb") from None


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every record of a run, in order. A last line cut short by a crash is left out.

    Raises:
        ValueError: there is no metrics file, or another line is not JSON.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{run_dir}: no {METRICS_FILE} there; is it a run directory?") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a JSON record") from None
    return records
