"""Batches ahead of their steps: whose weights sample them, after a resume too, what goes wrong."""

import copy
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from prime_composer.backends.errors import check_wanted
from prime_composer.backends.protocols import Limits
from prime_composer.local.ahead import Ahead
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.collect import Clock, Collected, Collector, Weights
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.opening import open_engine
from prime_composer.local.outcome import RunStopped
from prime_composer.local.signals import StopRequest
from prime_composer.local.sources import load_sources
from prime_composer.local.student import Student
from prime_composer.local.tracker import read_metrics
from prime_composer.local.watch import WatchFailed
from prime_composer.recipe.loading import parse_recipe
from prime_composer.step.batch import Batch
from prime_composer.tiny_models.cache import prepare_models
from tests.command import numbers
from tests.local.helpers import Silent, collect, failing, run, weights
from tests.studies.beside import Beside

Raw = Callable[..., dict[str, Any]]
BESIDE = {"backend": "tests.studies.beside:Beside", "url": "http://beside"}
OF_STEP = ("loss", "grad_norm", "rollout/reward", "rollout/tokens", "eval/reverse_kl")


@pytest.fixture(scope="module")
def ahead(tiny_recipe: Raw) -> Callable[..., dict[str, Any]]:
    """Return the tiny recipe with batches that are collected ahead."""

    def raw(steps: int, **changes: Any) -> dict[str, Any]:
        own = {f"rollout__{key}": value for key, value in BESIDE.items()}
        plain = {"rollout__ahead": steps, "teacher__backend": "transformers", "checkpoint__keep": 3}
        long = {"trainer__steps": 6, "trainer__lr": 1e-2}
        return tiny_recipe(**(own | plain | long | changes))

    return raw


def one_after_the_other(
    raw: dict[str, Any], behind: int, resumed: int = 0
) -> tuple[list[dict[str, float]], Any]:
    """Return steps' metrics and final weights of a run in one thread, which keeps all weights.

    Step t trains on what the weights after step max(t - 1 - behind, first) have sampled. ``first``
    is 0, and ``resumed`` in the steps after it.
    """
    recipe = parse_recipe(raw)
    problems = load_sources(recipe)
    rows = []
    with open_engine(recipe, problems, prepare_models(recipe, problems), lambda _: None) as engine:
        student = Student(recipe, engine)
        evaluator = Evaluator(engine, recipe)
        weights = [copy.deepcopy(engine.model)]
        for step in range(1, recipe.trainer.steps + 1):
            old = weights[max(step - 1 - behind, resumed if step > resumed else 0)]
            engine.sampler.update_weights(old)
            batch, metrics = collect(replace(engine, model=old), recipe, step)
            row = metrics | student.update(batch, step)
            weights.append(copy.deepcopy(engine.model))
            if step % recipe.eval.every == 0 or step == recipe.trainer.steps:
                engine.sampler.update_weights(engine.model)
                row |= evaluator.student()
            rows.append(row)
        return rows, engine.model.state_dict()


TOPK = {"type": "topk_reverse_kl", "k": 8}
BY_STUDENT = {**TOPK, "chosen_by": "student"}


SAMPLED = {"type": "sampled_reverse_kl"}


@pytest.mark.parametrize(
    ("steps", "loss", "changes"),
    [
        (8, SAMPLED, {"reference": {"start": True, "backend": "transformers"}}),
        (2, BY_STUDENT, {"student__quantize": {"bits": 4, "group": 8}}),
        (1, TOPK, {"student__lora": {"rank": 4}}),
    ],
)
def test_batches_are_as_stale_as_a_loop_in_one_thread(
    steps: int, loss: dict[str, Any], changes: dict[str, Any], ahead: Any, tmp_path: Path
) -> None:
    raw = ahead(steps, loss=loss, **changes)
    run(raw, tmp_path / "run")
    rows, final = one_after_the_other(raw, steps)
    records = read_metrics(tmp_path / "run")[1:]
    for record, row in zip(records, rows, strict=True):
        assert {key: record[key] for key in row if key in record} == row
        assert row.keys() & OF_STEP
    assert [record["rollout/staleness"] for record in records] == [
        min(steps, step) for step in range(6)
    ]
    if "student__lora" not in changes:  # a checkpoint has the adapter alone
        trained = weights(tmp_path / "run")
        assert all(torch.equal(trained[name], value) for name, value in final.items())
    stale = [record["sampler/mismatch_kl"] for record in records]
    assert stale[0] < 1e-9 < 1e-5 < min(stale[1:])


@pytest.fixture(scope="module")
def whole(ahead: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run six steps, two ahead, without an interruption."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    run(ahead(2), run_dir)
    return run_dir


def assert_goes_on(run_dir: Path, whole: Path, done: int) -> None:
    """Check a run that was resumed after ``done`` steps of six, two ahead.

    Each step is there, and batches after ``done`` are as stale as at a start.
    """
    records, expected = numbers(run_dir), numbers(whole)
    assert records[: done + 1] == expected[: done + 1]
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == [*range(7)]
    assert [one["rollout/staleness"] for one in records[done + 1 :]] == [0, 1, 2, 2, 2][: 6 - done]


def test_resumed_run_samples_what_was_in_flight_anew(
    whole: Path, ahead: Any, tmp_path: Path
) -> None:
    """Killed after its second step."""
    cut = tmp_path / "cut"
    checkpoint = cut / "checkpoints" / "step_000002"
    shutil.copytree(whole / "checkpoints" / checkpoint.name, checkpoint)
    shutil.copy(whole / "metrics.jsonl", cut)
    run(ahead(2), cut, resume=True)
    assert_goes_on(cut, whole, done=2)
    rows, final = one_after_the_other(ahead(2), 2, resumed=2)
    for record, row in zip(read_metrics(cut)[1:], rows, strict=True):
        assert {key: record[key] for key in row if key in record} == row
    assert all(torch.equal(weights(cut)[name], value) for name, value in final.items())


def test_error_of_a_batch_ends_the_run_at_its_step(
    whole: Path, ahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 5 is lost while step 3 trains. Steps 3 and 4 have theirs already."""
    gone = ValueError("the student's server at http://h:1 is away.")
    failing(monkeypatch, Collector, "sample", 5, gone)
    with pytest.raises(RunStopped, match="^the student's server at http://h:1 is away; step 4 is"):
        run(ahead(2, checkpoint__every=3), tmp_path / "run")
    assert list_checkpoints(tmp_path / "run")[-1].step == 4
    monkeypatch.undo()
    run(ahead(2, checkpoint__every=3), tmp_path / "run", resume=True)
    assert_goes_on(tmp_path / "run", whole, done=4)


class Away(Beside):
    """A server that is away for batches after ``from_step``, as one that is waited for."""

    calls = itertools.count()
    blocked = threading.Event()
    away_at: int | None = None

    def generate(self, prompts: Any, params: Any, seed: int) -> Any:
        if threading.current_thread().name.startswith("ahead") and next(Away.calls) == Away.away_at:
            self.status("waiting for the student's server")
            Away.blocked.set()
            for _ in range(400):
                check_wanted()
                time.sleep(0.05)
        return super().generate(prompts, params, seed)


def test_signal_while_a_batch_waits_for_its_server_loses_nothing(
    whole: Path, ahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 4 waits, and keeps step 2 from its evaluation.

    The thread is given up. What it was to sample is sampled later, after the evaluation that is
    left to do.
    """
    monkeypatch.setattr(Away, "calls", itertools.count())
    monkeypatch.setattr(Away, "away_at", 3)  # of batch 4
    monkeypatch.setattr(Away, "blocked", threading.Event())
    raw = ahead(2, rollout__backend="tests.local.test_ahead:Away")
    display = Silent()

    def interrupt() -> None:
        Away.blocked.wait(60)
        for _ in range(1200):
            if display.steps[-1:] >= [1]:
                break
            time.sleep(0.05)
        time.sleep(1.0)  # the next step trains, and then waits
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(raw, tmp_path / "run", display)
    thread.join()
    assert (outcome.interrupted, outcome.signum, outcome.steps) == (True, signal.SIGINT, 2)
    assert not [one for one in threading.enumerate() if one.name.startswith("ahead")]
    Away.away_at = None
    run(raw, tmp_path / "run", resume=True)
    assert_goes_on(tmp_path / "run", whole, done=2)


def test_sampler_that_stops_taking_weights_is_seen_when_due(
    ahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with the weights that it should have, and not with those that train."""
    monkeypatch.setattr(Beside, "update_weights", stopping_after(2, Beside.update_weights))
    raw = ahead(1, checks__every=2, eval__every=0, checkpoint__every=0)
    with pytest.raises(RunStopped, match="the sampler's log-probs are not those") as caught:
        run(raw, tmp_path / "run")
    assert isinstance(caught.value.__cause__, WatchFailed)


def stopping_after(step: int, original: Any) -> Any:
    """Return an ``update_weights`` that ignores copies of the student after that many of them."""
    copies: list[Any] = []

    def update(self: Any, model: Any) -> None:
        is_copy = not next(model.parameters()).requires_grad
        if is_copy and all(one is not model for one in copies):
            copies.append(model)
        if not is_copy or len(copies) <= step:
            original(self, model)

    return update


def test_run_that_is_over_begins_no_batch_after_it(
    ahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither after the last step, nor after the evaluation by which ``trainer.until`` ends it."""
    collected: list[int] = []
    original = Collector.problems

    def noting(self: Collector, step: int) -> Any:
        collected.append(step)
        return original(self, step)

    monkeypatch.setattr(Collector, "problems", noting)
    run(ahead(8, trainer__steps=3), tmp_path / "short")
    assert collected == [1, 2, 3]
    collected.clear()
    until = {"metric": "eval/accuracy", "plateau": 1}
    monkeypatch.setattr(Evaluator, "student", lambda self: {"eval/accuracy": 0.5})
    monkeypatch.setattr(Evaluator, "teachers", lambda self: {})
    outcome = run(ahead(1, trainer__until=until), tmp_path / "until")
    assert outcome.steps == 2 and collected == [1, 2, 3]


def test_weights_that_were_not_taken_are_sent_again() -> None:
    """A sync that failed counts as none: later batches would be of older weights than they say."""
    sampler = Mock(limits=Limits())
    sampler.update_weights.side_effect = [ValueError("the sampler is away"), None]

    def collect(step: int, weights: Weights, clock: Clock) -> Collected:
        return Collected(Batch([]), {}, {})

    ahead = Ahead(1, 7, nn.Linear(1, 1), sampler, collect, StopRequest())
    try:
        with pytest.raises(ValueError, match="the sampler is away"):
            ahead.take(1)
        ahead.settle()
        assert sampler.update_weights.call_count == 2
    finally:
        ahead.stop()
