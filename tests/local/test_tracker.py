"""Metrics: what is written, what a resumed run drops, what a crash may cut off."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_composer.cli.figures import draw_report
from prime_composer.local.tracker import METRICS_FILE, Tracker, read_metrics
from prime_composer.recipe.schema import LoggingConfig

QUIET = LoggingConfig(tensorboard=False)


def write(run_dir: Path, steps: int) -> None:
    with Tracker(run_dir, QUIET) as tracker:
        for step in range(steps):
            tracker.log(step, {"loss": step / 2})


def test_tracker_resumed_drops_newer_records(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with Tracker(tmp_path, QUIET, resume_step=2) as tracker:
        tracker.log(3, {"loss": 9.0})
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (3, 9.0),
    ]


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
        ([0, 1], "has no numbers of the steps 2 to 3 (a crash", [0, 1]),
        ([0, "{", 2, 2, "5", "\0\0"], "has no numbers of the steps 1, 3", [0, 2]),
        ([1, 2, 3], "has no numbers of step 0", [1, 2, 3]),
        ([], "has no numbers of the steps 0 to 3", []),
        (None, "is gone, and with it the numbers of the steps 0 to 3", []),
    ],
    ids=["whole", "end", "middle", "start", "empty", "gone"],
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


def test_tracker_amends_the_record_of_a_step(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with Tracker(tmp_path, QUIET, resume_step=2) as tracker:
        tracker.amend(2, {"eval/accuracy": 0.5})
        tracker.log(3, {"loss": 9.0})
    assert read_metrics(tmp_path)[2:] == [
        {"step": 2, "loss": 1.0, "eval/accuracy": 0.5},
        {"step": 3, "loss": 9.0},
    ]


LIMITED = """
import resource, sys
from pathlib import Path
from prime_composer.local.tracker import Tracker
from tests.local.test_tracker import QUIET
resource.setrlimit(resource.RLIMIT_FSIZE, (60, resource.RLIM_INFINITY))
with Tracker(Path(sys.argv[1]), QUIET) as tracker:
    tracker.log(1, {"loss": 1.0})
    for _ in range(2):
        try:
            tracker.log(2, {"loss": 0.123456789012345678})
        except OSError as error:
            print(error.errno, error.filename)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    tracker.log(2, {"loss": 2.0})
"""


@pytest.mark.slow
def test_tracker_writes_a_record_whole_or_not_at_all(tmp_path: Path) -> None:
    """The kernel takes half of a line and then refuses; the half does not stay."""
    import subprocess

    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == f"27 {tmp_path}/metrics.jsonl\n" * 2, done.stderr
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


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    with Tracker(tmp_path, LoggingConfig()) as tracker:
        for step, value in ((1, 0.25), (2, 0.125)):
            tracker.log(step, {"loss": value, "bad": float("nan")})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 0.25),
        (2, 0.125),
    ]
    assert events.Tags()["scalars"] == ["loss"]


def test_steps_that_are_finished_again_are_in_tensorboard_once(tmp_path: Path) -> None:
    """As after an outer step of islands that failed."""
    with Tracker(tmp_path, LoggingConfig(tensorboard=True)) as tracker:
        for step in range(5):
            tracker.log(step, {"loss": float(step)})
        tracker.rewind(2)
        tracker.log(3, {"loss": 9.0})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 9.0)]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == expected
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


def test_wandb_gets_every_record_and_is_finished(tmp_path: Path, wandb: list[Any]) -> None:
    with Tracker(tmp_path, WANDB) as tracker:
        tracker.log(1, {"loss": 0.5})
    assert (wandb[0]["project"], wandb[0]["name"], wandb[0]["id"]) == ("p", tmp_path.name, None)
    assert wandb[1:] == [(1, {"loss": 0.5}), "finished"]


def test_resumed_run_continues_its_own_wandb_run(tmp_path: Path, wandb: list[Any]) -> None:
    for run_dir in (tmp_path / "one", tmp_path / "two"):
        run_dir.mkdir()
        Tracker(run_dir, WANDB).close()
    for _ in range(2):
        Tracker(tmp_path / "one", WANDB, resume_step=0).close()
    settings = [entry for entry in wandb if entry != "finished"]
    assert [entry["id"] for entry in settings] == [None, None, "run-1", "run-1"]
    assert settings[2]["resume"] == settings[3]["resume"] == "allow"


def test_run_resumed_with_wandb_opens_a_wandb_run(tmp_path: Path, wandb: list[Any]) -> None:
    write(tmp_path, 2)
    Tracker(tmp_path, WANDB, resume_step=1).close()
    Tracker(tmp_path, WANDB, resume_step=1).close()
    assert [entry["id"] for entry in wandb if entry != "finished"] == [None, "run-1"]


def test_missing_wandb_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        Tracker(tmp_path, WANDB)


def test_a_run_without_an_evaluation_yet_can_be_drawn(tmp_path: Path) -> None:
    write(tmp_path, 3)
    draw_report([tmp_path], tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000
