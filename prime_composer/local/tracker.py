"""Where metrics go: ``metrics.jsonl`` always, TensorBoard and W&B where the recipe asks."""

import json
import math
import os
from pathlib import Path
from typing import Any

from prime_composer.recipe.schema import LoggingConfig

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_run_id.txt"


class Tracker:
    """Writes one record per step, and takes back what came after the checkpoint that a run resumes from.

    Args:
        run_dir: the run directory.
        config: the recipe's ``[logging]``.
        resume_step: the last step that the checkpoint holds; later records are dropped. None for a fresh run.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig, resume_step: int | None = None):
        wandb = None
        if config.wandb is not None:
            try:
                import wandb
            except ImportError:
                raise ValueError(
                    "[logging.wandb] needs Weights & Biases: pip install wandb"
                ) from None
        path = run_dir / METRICS_FILE
        if resume_step is not None:
            kept = [record for record in read_metrics(run_dir) if record["step"] <= resume_step]
            spare = path.with_suffix(".tmp")
            spare.write_text(
                "".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8"
            )
            os.replace(spare, path)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = self._wandb = None
        if config.tensorboard:
            # torch's own writer would import tensorflow where it is installed; tensorboard's protocol is the same.
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        if wandb is not None:
            # A resumed run goes on in its own W&B run, which ignores the steps that it holds already: the resumed run
            # only repeats their numbers.
            known = run_dir / WANDB_ID_FILE
            again = resume_step is not None and known.exists()
            self._wandb = wandb.init(
                project=config.wandb.project,
                name=config.wandb.name or run_dir.name,
                dir=str(run_dir),
                id=known.read_text(encoding="utf-8") if again else None,
                resume="allow",
            )
            known.write_text(self._wandb.id, encoding="utf-8")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one record, and make it safe against a crash of this process."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every record of a run, in order. A last line cut short by a crash is left out.

    Raises:
        ValueError: there is no metrics file, or a line in the middle is no JSON.
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
