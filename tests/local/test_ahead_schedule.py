"""The thread that collects ahead, with a student of one number: how many steps it has trained."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from prime_composer.backends.cpu_guard import use_threads
from prime_composer.backends.errors import NotWanted, check_wanted
from prime_composer.backends.protocols import Limits
from prime_composer.local.ahead import Ahead
from prime_composer.local.collect import Clock, Collected, Weights
from prime_composer.local.signals import StepAbandoned, StopRequest
from prime_composer.step.batch import Batch

LAST = 7


class Follower:
    """A sampler that notes which weights it got, by which thread."""

    limits = Limits()

    def __init__(self) -> None:
        self.has: float | None = None
        self.sent: list[tuple[str, float]] = []
        self.lost = 0

    def generate(self, prompts: Any, params: Any, seed: int) -> Any: ...

    def close(self) -> None: ...

    def update_weights(self, model: nn.Module) -> None:
        self.sent.append((threading.current_thread().name[:5], float(model.weight)))
        if self.lost:
            self.lost -= 1
            raise ValueError("the sampler is away")
        self.has = float(model.weight)


class Trainer:
    """A run without anything but its schedule.

    Args:
        steps: how many steps ahead.
        done: finished steps.
        collects: called with each step before its batch is there.
    """

    def __init__(
        self, steps: int, done: int = 0, collects: Callable[[int], None] = lambda step: None
    ):
        self.model, self.sampler, self.stop = nn.Linear(1, 1, bias=False), Follower(), StopRequest()
        self.collects = collects
        self.train_to(done)
        self.ahead = Ahead(steps, LAST, self.model, self.sampler, self.collect, self.stop)

    def close(self) -> None:
        self.ahead.stop()

    def collect(self, step: int, weights: Weights, clock: Clock) -> Collected:
        assert self.sampler.has == float(weights.model.weight) == weights.step
        self.collects(step)
        return Collected(Batch([]), {"step": float(step), "at": self.sampler.has}, clock.laps)

    def train_to(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.fill_(step)

    def run(self, first: int, last: int) -> list[tuple[float, float, float]]:
        """Return each step, what its batch was sampled by, and its staleness."""
        rows = []
        for step in range(first, last + 1):
            metrics = self.ahead.take(step).metrics
            rows.append((metrics["step"], metrics["at"], metrics["rollout/staleness"]))
            self.train_to(step)
        return rows

    def batch(self, step: int) -> dict[str, float]:
        """Return what a batch that was begun has."""
        return self.ahead._pending[step].result().metrics


def rows(steps: int, first: int = 1, done: int = 0) -> list[tuple[float, float, float]]:
    """Return step, weights and staleness of a run that started, or was resumed, after ``done``."""
    return [
        (step, max(step - 1 - steps, done), min(steps, step - 1 - done))
        for step in range(first, LAST + 1)
    ]


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_batch_is_sampled_so_many_steps_before(steps: int) -> None:
    with closing(Trainer(steps)) as trainer:
        assert trainer.run(1, LAST) == rows(steps)
        sent = range(max(LAST - steps, 1))
        assert trainer.sampler.sent == [("ahead", float(step)) for step in sent]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("done", range(1, LAST))
def test_batches_after_a_resume_are_as_after_a_start(steps: int, done: int) -> None:
    """The weights after the last finished step sample the first ones."""
    with closing(Trainer(steps, done)) as resumed:
        assert resumed.run(done + 1, LAST) == rows(steps, done + 1, done)


def test_weights_that_were_not_taken_are_sent_again() -> None:
    with closing(Trainer(1)) as trainer:
        trainer.sampler.lost = 1
        with pytest.raises(ValueError, match="the sampler is away"):
            trainer.ahead.take(1)
        trainer.ahead.settle()
        assert trainer.sampler.sent == [("ahead", 0.0), ("ahead", 0.0)]
        assert trainer.batch(2) == {"step": 2, "at": 0, "rollout/staleness": 1}


def test_sampler_gets_the_weights_of_a_step_once() -> None:
    """For an evaluation, with nothing under way; the next batch does not send them again."""
    with closing(Trainer(1)) as trainer:
        trainer.run(1, 2)
        trainer.ahead.settle()
        trainer.ahead.serve(2)
        assert trainer.sampler.sent[-2:] == [("ahead", 1.0), ("MainT", 2.0)]
        assert trainer.run(3, LAST) == rows(1, first=3)
        assert [step for _, step in trainer.sampler.sent] == [0, 1, 2, 3, 4, 5]


@contextmanager
def waiting(trainer: Trainer) -> Iterator[threading.Event]:
    """Let the thread wait for a server, from its first batch on."""
    asked = threading.Event()

    def away(step: int) -> None:
        trainer.stop.wait_begins()
        asked.set()
        while True:
            check_wanted()

    trainer.collects = away
    with closing(trainer):
        yield asked


def test_signal_gives_up_the_wait_for_a_server_alone() -> None:
    """It comes before the wait, or in it. While the student trains, the thread raises nothing."""
    trainer = Trainer(1)
    with waiting(trainer) as asked, trainer.stop.may_interrupt():
        trainer.stop.signum = 2
        with pytest.raises(StepAbandoned):
            trainer.ahead.take(1)
        assert asked.is_set() and trainer.stop.background_waits
    assert isinstance(trainer.ahead._pending[1].exception(), NotWanted)
    assert not trainer.stop.waiting


def test_thread_computes_with_the_threads_of_the_run() -> None:
    seen = []
    with use_threads(3):  # vLLM, where another test has imported it, leaves PyTorch's own idle
        trainer = Trainer(1, collects=lambda step: seen.append(torch.get_num_threads()))
        with closing(trainer):
            trainer.run(1, 2)
    assert set(seen) == {3}
