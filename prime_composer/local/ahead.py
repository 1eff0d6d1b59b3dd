"""Collect batches ahead of their steps, in a thread of their own.

With N steps ahead, step t trains on what the student sampled after step max(t - 1 - N, 0), however
long anything takes: a run is a function of its recipe and its seed.

The thread has sampler, environments and teachers to itself. Whoever else asks them waits until it
has finished (``settle``), or gives up what is under way (``stop``). It sends the sampler its
weights between two batches. They are a copy, since the student goes on to train.

No batch is stored. A run that is resumed after step t samples the next ones by the weights after
step t, as it does at its start.
"""

import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from prime_composer.backends.cpu_guard import use_threads
from prime_composer.backends.errors import wanted_until
from prime_composer.backends.protocols import Sampler
from prime_composer.local.collect import Clock, Collected, Weights
from prime_composer.local.signals import StopRequest

TICK = 0.25  # Seconds between two looks at whether the thread waits for a server

STALENESS = "rollout/staleness"  # Steps from the weights that sample a batch to those it trains


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
        self._pending: dict[int, Future[Collected]] = {}  # by step
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
                weights = self._weights_after(step - 1)
                self._pending[later] = self._thread.submit(self._run, later, weights)
        self._wait_for([self._pending[step]])
        return self._pending[step].result()

    def settle(self) -> None:
        """Wait until every batch that was begun is there, or cannot be had."""
        self._wait_for(self._pending.values())

    def serve(self, step: int) -> None:
        """Send the sampler the student's weights, with nothing under way."""
        self._send(self._weights_after(step))

    def stop(self) -> None:
        """Give up what is under way. Stopping twice is harmless."""
        self._unwanted.set()
        self._thread.shutdown(cancel_futures=True)

    def _begin_thread(self) -> None:
        self._stop.background = threading.get_ident()

    def _run(self, step: int, weights: Weights) -> Collected:
        self._stop.background_waits = False
        clock = Clock()
        with wanted_until(self._unwanted), use_threads(self._threads):
            with clock.phase("sync"):
                self._send(weights)
            collected = self._collect(step, weights, clock)
        collected.metrics[STALENESS] = float(step - 1 - weights.step)
        return collected

    def _send(self, weights: Weights) -> None:
        if weights is not self._sent:
            self._sampler.update_weights(weights.model)
            self._sent = weights

    def _weights_after(self, step: int) -> Weights:
        if self._now is None or self._now.step != step:
            self._now = Weights(step, copy.deepcopy(self._model).requires_grad_(False))
        return self._now

    def _wait_for(self, pending: Iterable[Future[Collected]]) -> None:
        while wait([*pending], timeout=TICK).not_done:
            if self._stop.background_waits:
                self._stop.wait_begins()
