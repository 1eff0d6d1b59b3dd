"""Transformers behind a queue: a sampler outside the package, complete.

The model lives in a thread of its own, as an engine in another process would. Put this folder on
PYTHONPATH and name the sampler in a recipe:

    [rollout]
    backend = "my_sampler:QueueSampler"
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import nn

from prime_composer.backends.protocols import Limits, Rollout, SamplingParams
from prime_composer.samplers.registry import BackendSpec
from prime_composer.samplers.transformers import TransformersSampler


class QueueSampler:
    """Samples in a thread that takes one request after the other."""

    serves = False
    within_positions = False

    def __init__(self, spec: BackendSpec, status: Callable[[str], None]):
        self._requests: queue.SimpleQueue[tuple[Callable[..., Any], Future[Any]] | None]
        self._requests = queue.SimpleQueue()
        status(f"my_sampler loads {spec.model}")
        self._engine = TransformersSampler(
            spec.model, dtype=spec.dtype, max_model_len=spec.max_model_len
        )
        self._thread = threading.Thread(target=self._work, name="my_sampler", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        return self._ask(lambda: self._engine.generate(prompts, params, seed))

    def update_weights(self, model: nn.Module) -> None:
        self._ask(lambda: self._engine.update_weights(model))

    def close(self) -> None:
        self._requests.put(None)
        self._thread.join()
        self._engine.close()

    def _ask(self, request: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._requests.put((request, answer))
        return answer.result()

    def _work(self) -> None:
        while (item := self._requests.get()) is not None:
            request, answer = item
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)
