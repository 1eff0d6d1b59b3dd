"""Log metrics to ``metrics.jsonl``, and to TensorBoard and W&B where the recipe enables them."""

import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_composer.backends.errors import naming_file
from prime_composer.local.disk import describe_error, replace_text
from prime_composer.problems.metrics import TITLES
from prime_composer.recipe.schema import LoggingConfig

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_run_id.txt"


class Tracker:
    """Writes one record per step; on resume, drops records newer than the checkpoint."""

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        resume_step: int | None = None,
        warn: Callable[[str], None] = print,
    ):
        self.last_step = -1 if resume_step is None else resume_step
        self._warn, self._path = warn, run_dir / METRICS_FILE
        self._tensorboard: Any = None
        self._wandb: Any = None
        wandb: Any = None if config.wandb is None else import_wandb()
        if resume_step is not None:
            self._restore(resume_step)
        # Without a buffer: a record that the disk has no room for is not written again later.
        self._file = self._path.open("ab", buffering=0)
        if config.tensorboard:
            self._tensorboard = writer_after(run_dir, resume_step)
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

    def _restore(self, resume_step: int) -> None:
        """Keep the records up to the checkpoint, and say where some are lost."""
        records = parse_records(self._path, damaged_too=True) if self._path.exists() else []
        kept = {one["step"]: one for one in records if one["step"] <= resume_step}
        if lost := resume_step + 1 - len(kept):
            self._warn(
                f"warning: {self._path} lacks the numbers of {lost} of the steps 0 to "
                f"{resume_step} (a crash of the machine loses what was not yet on the disk); the "
                "run goes on without them"
            )
        self._write([kept[step] for step in sorted(kept)])

    def amend(self, step: int, metrics: dict[str, float]) -> None:
        """Add numbers to the record of a step that a run before this one has logged."""
        records = parse_records(self._path)
        amended = [record for record in records if record["step"] == step]
        if not amended:
            amended = [{"step": step}]
            records += amended
        amended[-1] |= metrics
        self._replace(records)

    def rewind(self, step: int) -> None:
        """Drop the records after a step that is finished again; W&B keeps its first numbers."""
        self._replace([one for one in parse_records(self._path) if one["step"] <= step])
        self.last_step = min(step, self.last_step)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = writer_after(self._path.parent, step)

    def _replace(self, records: Sequence[dict[str, Any]]) -> None:
        self._file.close()
        self._write(records)
        self._file = self._path.open("ab", buffering=0)

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        """Write the whole file again."""
        replace_text(self._path, "".join(json.dumps(record) + "\n" for record in records))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one record, whole or not at all. A crash of this process does not lose it."""
        line = (json.dumps({"step": step, **metrics}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(end)
            error.filename = str(self._path)
            raise
        self.last_step = step
        if self._tensorboard is not None:
            self._log_to_tensorboard(step, metrics)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def _log_to_tensorboard(self, step: int, metrics: dict[str, float]) -> None:
        """Add a step's numbers; an error ends TensorBoard's files and not the run."""
        try:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)
        except OSError as error:
            self._warn(
                f"warning: TensorBoard's files end before step {step}: {describe_error(error)}"
            )
            self._tensorboard = None

    def sync(self) -> None:
        """Wait until every record is on the disk, so that no checkpoint is newer than they are."""
        with naming_file(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                self._warn(
                    f"warning: TensorBoard's files are not complete: {describe_error(error)}"
                )
        if self._wandb is not None:
            self._wandb.finish()


def writer_after(run_dir: Path, step: int | None) -> Any:
    """Return a writer of TensorBoard's files, which then leaves out what they have after a step."""
    from torch.utils.tensorboard import SummaryWriter

    purge = None if step is None else step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)


def import_wandb() -> Any:
    """Return the wandb module. Where it is not installed, the ``ValueError`` has the pip line."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError("[logging.wandb] needs Weights & Biases: pip install wandb") from None


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every record of a run, in order. A last line cut short by a crash is left out."""
    path = Path(run_dir) / METRICS_FILE
    try:
        return parse_records(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{run_dir}: no {METRICS_FILE} there; is it a run directory?") from None


def parse_records(path: Path, damaged_too: bool = False) -> list[dict[str, Any]]:
    """Return the records of a metrics file, in order, without a last line cut by a crash."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            if number < len(lines) and not damaged_too:
                raise ValueError(f"{path}:{number}: not a JSON record") from None
            continue
        records.append(record)
    return records


def past_evaluations(logged: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return what a resumed run has measured before, by step, from its records."""
    return {
        record["step"]: {
            name: value for name, value in record.items() if name.startswith(("eval/", "teacher/"))
        }
        for record in logged
        if is_evaluated(record)
    }


def is_evaluated(record: Mapping[str, Any]) -> bool:
    """Return whether a step ended with an evaluation, of a score or of the KL alone."""
    return any(f"eval/{name}" in record for name in (*TITLES, "truncated", "reverse_kl"))
