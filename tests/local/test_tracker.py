"""Metrics: what is written, what a resumed run drops, what a crash may cut off."""

import errno
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_composer.local.tracker import METRICS_FILE, Tracker, read_metrics
from prime_composer.recipe.schema import LoggingConfig
from tests.local.test_checkpoint import files_of_at_most

QUIET = LoggingConfig(tensorboard=False)


def write(run_dir: Path, steps: int) -> None:
    with Tracker(run_dir, QUIET) as tracker:
        for step in range(steps):
            tracker.log(step, {"loss": step / 2})


def test_read_metrics_leaves_out_a_cut_last_line(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert len(read_metrics(tmp_path)) == 2
    path.write_text('{"step"\n' + path.read_text())
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: not a JSON record"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("damage", "said", "kept"),
    [
        ([0, 1, 2, 3], None, [0, 1, 2, 3]),
        ([0, "{", 2, 2, "5", "\0\0"], "lacks the numbers of 2 of the steps 0 to 3", [0, 2]),
        (None, "lacks the numbers of 4 of the steps 0 to 3", []),
    ],
    ids=["whole", "middle", "gone"],
)
def test_tracker_says_which_records_are_lost(
    damage: list[Any] | None, said: str | None, kept: list[int], tmp_path: Path
) -> None:
    """A run goes on without them: a crash of the machine must not end it for good."""
    if damage is not None:
        lines = [f'{{"step": {line}}}' if isinstance(line, int) else line for line in damage]
        (tmp_path / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines))
    texts: list[str] = []
    with Tracker(tmp_path, QUIET, resume_step=3, warn=texts.append) as tracker:
        tracker.log(4, {"loss": 1.0})
    assert [said in text and text.startswith("warning: ") for text in texts] == [True] * bool(said)
    assert [record["step"] for record in read_metrics(tmp_path)] == [*kept, 4]


def test_tracker_writes_a_record_whole_or_not_at_all(tmp_path: Path) -> None:
    """The kernel takes half of a line and then refuses; the half does not stay."""
    with Tracker(tmp_path, QUIET) as tracker:
        tracker.log(1, {"loss": 1.0})
        for _ in range(2):
            with pytest.raises(OSError) as caught, files_of_at_most(60):
                tracker.log(2, {"loss": 0.123456789012345678})
            named = caught.value.errno, str(caught.value.filename)
            assert named == (errno.EFBIG, str(tmp_path / METRICS_FILE))
        tracker.log(2, {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_full_disk_ends_tensorboard_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    with Tracker(tmp_path, LoggingConfig(), warn=texts.append) as tracker:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tracker._tensorboard.file_writer, "add_summary", full)
        tracker.log(1, {"loss": 0.5})
        tracker.log(2, {"loss": 0.5})
    (text,) = texts
    assert text.startswith("warning: TensorBoard's files end before step 1: No space left")
    assert len(read_metrics(tmp_path)) == 2


def test_tensorboard_has_the_same_numbers_once(tmp_path: Path) -> None:
    """Also of steps that are finished again, as after an outer step of islands that failed."""
    with Tracker(tmp_path, LoggingConfig()) as tracker:
        for step in range(5):
            tracker.log(step, {"loss": float(step), "bad": float("nan")})
        tracker.rewind(2)
        tracker.log(3, {"loss": 9.0})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 9.0)]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == expected
    assert events.Tags()["scalars"] == ["loss"]
    assert [(one["step"], one["loss"]) for one in read_metrics(tmp_path)] == expected


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace W&B and return its calls in order. New runs are named run-1, run-2, ..."""
    seen: list[Any] = []
    ids = itertools.count(1)

    def init(**settings: Any) -> SimpleNamespace:
        seen.append(settings)
        return SimpleNamespace(
            id=settings["id"] or f"run-{next(ids)}",
            log=lambda metrics, step: seen.append((step, metrics)),
            finish=lambda: seen.append("finished"),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return seen


WANDB = LoggingConfig(tensorboard=False, wandb={"project": "p"})


def test_resumed_run_continues_its_own_wandb_run(tmp_path: Path, wandb: list[Any]) -> None:
    """Each new run has one of its own, and so has one that was begun without W&B."""
    for name in ("one", "two", "without"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        Tracker(tmp_path / name, WANDB).close()
    write(tmp_path / "without", 2)
    for name in ("one", "one", "without", "without"):
        Tracker(tmp_path / name, WANDB, resume_step=int(name == "without")).close()
    settings = [entry for entry in wandb if entry != "finished"]
    ids = [None, None, "run-1", "run-1", None, "run-3"]
    assert [entry["id"] for entry in settings] == ids
    assert settings[2]["resume"] == settings[3]["resume"] == "allow"
