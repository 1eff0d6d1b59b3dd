"""Runs that a signal, a server, the disk or a check ends, and how they come back."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local import checkpoint as checkpoint_module
from prime_composer.local import disk
from prime_composer.local import run as module
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.collect import Collector
from prime_composer.local.disk import NoRoom
from prime_composer.local.outcome import RunStopped
from prime_composer.local.tracker import Tracker, read_metrics
from prime_composer.local.train import train
from prime_composer.local.watch import WatchFailed
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.tiny_models.cache import prepare_models
from tests.command import numbers
from tests.local.helpers import Silent, failing, run
from tests.local.test_train import assert_same_run, assert_same_weights

Raw = Callable[..., dict[str, Any]]


class ServerGone(ValueError):
    """What a backend raises when a server stays away."""


def steps_of(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run_dir)]


def test_train_error_after_the_update_saves_that_step(
    whole: Path,
    tiny_recipe: Raw,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 2 is whole when its new weights cannot be sent; its evaluation comes at the resume."""
    raw = tiny_recipe(checkpoint__every=0)
    # The preflight sends two.
    failing(monkeypatch, TransformersSampler, "update_weights", 4, ServerGone("away"))
    with pytest.raises(RunStopped, match="away; step 2 is saved"):
        run(raw, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2
    assert "eval/accuracy" not in read_metrics(tmp_path / "run")[-1]
    monkeypatch.undo()
    run(raw, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)


FULL = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
AWAY = (Collector, "sample", 4, ServerGone("the teacher is away"))
CHANGED = (Collector, "sample", 4, WatchFailed("another model now.", safe_step=2))
ERRORS: dict[str, tuple[list[Any], dict[str, int], str, list[int]]] = {
    "full disk behind an error": (
        [AWAY, (checkpoint_module.torch, "save", 2, FULL)],
        {},
        "^the teacher is away; step 3 could not be saved either: .*No space left on device.*"
        "step 2 is saved in .*/run/checkpoints/step_000002",
        [2],
    ),
    "full disk at the metrics of step 4": (
        [(Tracker, "log", 5, FULL, True)], {}, "^metrics.jsonl: No space left.*step 2 is saved", [2]
    ),
    "in the first step": (
        [(Collector, "sample", 1, ServerGone("away"))], {}, "away; no earlier step is saved", []
    ),
    # Step 3 may have been scored by another teacher, and step 2 has not.
    "another teacher": (
        [CHANGED],
        {"every": 1, "keep": 9},
        "another model now; step 2 is saved in .*step_000002$",
        [1, 2, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_train_error_names_the_step_that_is_safe(
    case: str, tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error stays the one that is named."""
    errors, checkpoint, words, saved = ERRORS[case]
    for error in errors:
        failing(monkeypatch, *error)
    raw = tiny_recipe(trainer__steps=6, checkpoint={"every": 2} | checkpoint)
    with pytest.raises(RunStopped, match=words) as caught:
        run(raw, tmp_path / "run")
    assert (caught.value.checkpoint is None) == (saved == [])
    assert steps_of(tmp_path / "run") == saved


def test_train_signal_while_a_server_is_away_leaves_a_checkpoint(
    whole: Path,
    tiny_recipe: Raw,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait of step 4 would be longer than the time that a scheduler grants."""
    raw, statuses, waits = tiny_recipe(), [], []
    open_engine, sample = module.open_engine, Collector.sample

    def opened(recipe: Any, problems: Any, paths: Any, status: Any, student: Any) -> Any:
        statuses.append(status)
        return open_engine(recipe, problems, paths, status, student)

    def sampled(self: Collector, problems: Any, step: int) -> Any:
        if step == 4 and not waits:
            waits.append(step)
            statuses[-1]("waiting for the teacher's server")
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the wait went on")
        return sample(self, problems, step)

    monkeypatch.setattr(module, "open_engine", opened)
    monkeypatch.setattr(Collector, "sample", sampled)
    outcome = run(raw, tmp_path / "run")
    assert (outcome.interrupted, outcome.steps) == (True, 3)
    assert steps_of(tmp_path / "run") == [2, 3]
    run(raw, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_train_without_room_stops_before_the_first_step(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written and nothing of an earlier run is deleted."""
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**4)
    )
    raw = tiny_recipe()
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    begun: list[str] = []
    tmp_path.joinpath("run").mkdir()
    with pytest.raises(NoRoom, match=r"the checkpoints of this run need .* \(2 of .* at once\)"):
        train(
            recipe, problems, paths, tmp_path / "run", Silent(), begin=lambda: begun.append("begun")
        )
    assert not begun and not list((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_train_continues_a_finished_run_for_more_steps(tiny_recipe: Raw, tmp_path: Path) -> None:
    """At a constant rate the weights and losses are those of one long run."""
    raw = tiny_recipe(trainer__steps=4, trainer__schedule="constant")
    longer = tiny_recipe(trainer__steps=6, trainer__schedule="constant")
    run(raw, tmp_path / "run")
    run(longer, tmp_path / "run", resume=True)
    run(longer, tmp_path / "long")
    assert numbers(tmp_path / "run")[5:] == numbers(tmp_path / "long")[5:]
    assert_same_weights(tmp_path / "run", tmp_path / "long")
