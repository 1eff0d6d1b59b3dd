"""Metrics: what is written, what a resumed run takes back, what a crash may cut off."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_composer.recipe import LoggingConfig
from prime_composer.report import draw_report, loss_parts, series
from prime_composer.tracker import METRICS_FILE, Tracker, read_metrics

QUIET = LoggingConfig(tensorboard=False)


def write(run_dir: Path, steps: int) -> None:
    with Tracker(run_dir, QUIET) as tracker:
        for step in range(steps):
            tracker.log(step, {"loss": step / 2})


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with Tracker(tmp_path, QUIET, resume_step=2) as tracker:
        tracker.log(3, {"loss": 9.0})
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.0)]


def test_a_last_line_that_a_crash_cut_short_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert len(read_metrics(tmp_path)) == 2
    path.write_text('{"step"\n' + path.read_text())
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: not a JSON record"):
        read_metrics(tmp_path)


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    with Tracker(tmp_path, LoggingConfig()) as tracker:
        for step, value in ((1, 0.25), (2, 0.125)):
            tracker.log(step, {"loss": value, "bad": float("nan")})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 0.125)]
    assert events.Tags()["scalars"] == ["loss"]


def test_wandb_gets_every_record_and_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = SimpleNamespace(log=lambda metrics, step: seen.append((step, metrics)), finish=lambda: seen.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: seen.append(settings) or run))
    with Tracker(tmp_path, LoggingConfig(tensorboard=False, wandb={"project": "p"})) as tracker:
        tracker.log(1, {"loss": 0.5})
    assert (seen[0]["project"], seen[0]["name"]) == ("p", tmp_path.name)
    assert seen[1:] == [(1, {"loss": 0.5}), "finished"]


def test_a_missing_wandb_is_one_message_with_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        Tracker(tmp_path, LoggingConfig(tensorboard=False, wandb={"project": "p"}))


def test_the_report_takes_each_number_from_its_own_records(tmp_path: Path) -> None:
    records = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "loss": 2.0, "x/kl_in_support": 1.5, "x/kl_mass": 0.5}]
    assert series(records, "eval/accuracy") == ([0], [0.1])
    assert series(records, "loss") == ([1], [2.0])
    assert loss_parts(records) == ["loss", "x/kl_in_support", "x/kl_mass"]


def test_a_run_without_an_evaluation_yet_can_be_drawn(tmp_path: Path) -> None:
    write(tmp_path, 3)
    draw_report([tmp_path], tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000
