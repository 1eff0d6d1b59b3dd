"""Collect batches ahead of their steps, in a thread of their own.

With N steps ahead, step t trains on what the student sampled after step max(t - 1 - N, 0), however
long anything takes: a run is a function of its recipe and its seed.

The thread has sampler, environments and teachers to itself. Whoever else asks them waits until it
has finished (``settle``), or gives up what is under way (``stop``). It sends the sampler its
weights between two batches. They are a copy, since the student goes on to train.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from prime_composer.backends.cpu_guard import use_threads
from prime_composer.backends.errors import wanted_until
from prime_composer.backends.protocols import Sampler
from prime_composer.local.ahead.batches import Weights
from prime_composer.local.collect import Clock, Collected
from prime_composer.local.signals import StopRequest

TICK = 0.25
"""Seconds between two looks at whether the thread waits for a server."""

STALENESS = "rollout/staleness"
"""Steps between the weights that sampled a batch and those that train on it."""


@dataclass(eq=False)
class Pending:
    """A batch that is collected before its step."""

    sampled_at: int  # finished steps of the weights that sample it
    weights: Weights | None  # these weights, until the batch is there
    collected: Future[Collected]  # the batch to come

    @property
    def is_there(self) -> bool:
        """Whether the batch was collected, without an error."""
        return self.collected.done() and self.weights is None


class Ahead:
    """Batches that are collected ahead of their steps."""

    def __init__(
        self,
        steps: int,
        last: int,
        model: nn.Module,
        sampler: Sampler,
        collect: Callable[[int, Weights, Clock], Collected],
        stop: StopRequest,
    ):
        self._steps, self._last, self._model = steps, last, model
        self._sampler, self._collect, self._stop = sampler, collect, stop
        self._pending: dict[int, Pending] = {}
        self._now: Weights | None = None
        self._sent: Weights | None = None
        self._unwanted = threading.Event()
        self._threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "ahead", initializer=self._begin_thread)

    def take(self, step: int) -> Collected:
        """Return the batch of a step, and begin those of up to ``steps`` steps later."""
        self._pending = {later: one for later, one in self._pending.items() if later >= step}
        for later in range(step, min(step + self._steps, self._last) + 1):
            if later not in self._pending:
                self._begin(later, self._weights_after(step - 1))
        pending = self._pending[step]
        self._wait_for([pending])
        collected = pending.collected.result()
        staleness = {STALENESS: float(step - 1 - pending.sampled_at)}
        return replace(collected, metrics=collected.metrics | staleness)

    def settle(self) -> None:
        """Wait until every batch that was begun is there, or cannot be had."""
        self._wait_for(self._pending.values())

    def serve(self, step: int) -> None:
        """Send the sampler the student's weights, with nothing under way."""
        self._send(self._weights_after(step))

    def stop(self) -> None:
        """Give up what is under way. Batches that are there stay. Stopping twice is harmless."""
        self._unwanted.set()
        self._thread.shutdown(cancel_futures=True)

    def state_dict(self, done: int, of_batch: Callable[[Collected], Any]) -> dict[int, Any]:
        """Return what a checkpoint needs: later batches, or the weights that are to sample them."""
        return {
            step: {
                "sampled_at": one.sampled_at,
                "batch": of_batch(one.collected.result()) if one.is_there else None,
                "weights": None if one.weights is None else one.weights.model.state_dict(),
            }
            for step, one in self._pending.items()
            if step > done
        }

    def load_state_dict(
        self, state: Mapping[int, Any], batch_of: Callable[[int, Any], Collected]
    ) -> None:
        """Restore what ``state_dict`` returned, and begin the batches that were not there."""
        stored: dict[int, Weights] = {}
        for step, one in sorted(state.items()):
            sampled_at = one["sampled_at"]
            if one["batch"] is None:
                if sampled_at not in stored:
                    stored[sampled_at] = Weights(sampled_at, self._copy())
                    stored[sampled_at].model.load_state_dict(one["weights"])
                self._begin(step, stored[sampled_at])
            else:
                there: Future[Collected] = Future()
                there.set_result(batch_of(step, one["batch"]))
                self._pending[step] = Pending(sampled_at, None, there)

    def _begin_thread(self) -> None:
        self._stop.background = threading.get_ident()

    def _begin(self, step: int, weights: Weights) -> None:
        pending = Pending(weights.step, weights, Future())
        pending.collected = self._thread.submit(self._run, step, pending)
        self._pending[step] = pending

    def _run(self, step: int, pending: Pending) -> Collected:
        """Collect a batch, in the thread."""
        weights = pending.weights
        assert weights is not None, "the batch is not there"
        self._stop.background_waits = False
        clock = Clock()
        with wanted_until(self._unwanted), use_threads(self._threads):
            with clock.phase("sync"):
                self._send(weights)
            collected = self._collect(step, weights, clock)
        pending.weights = None
        return collected

    def _send(self, weights: Weights) -> None:
        if weights is not self._sent:
            self._sampler.update_weights(weights.model)
            self._sent = weights

    def _weights_after(self, step: int) -> Weights:
        if self._now is None or self._now.step != step:
            self._now = Weights(step, self._copy())
        return self._now

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self._model).requires_grad_(False)

    def _wait_for(self, pending: Iterable[Pending]) -> None:
        futures = [one.collected for one in pending]
        while wait(futures, timeout=TICK).not_done:
            if self._stop.background_waits:
                self._stop.wait_begins()
