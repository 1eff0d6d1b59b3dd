"""Ask vLLM's engine for the rows of a request, a few of its steps' work at a time.

The engine serves first what came first: all sequences at once would keep later requests waiting.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from copy import copy
from functools import cache, lru_cache
from typing import Any, TypeVar

from prime_composer.scoring.wire import NAME, Field, ScoreRequest, SequenceRows
from prime_composer.scoring.worker import RowsRequest

T = TypeVar("T")

_process = secrets.token_hex(8)
_numbers = itertools.count()  # For names in the engine, which API servers may share

AHEAD = 2  # Engine steps of a request at once: one runs and one waits

LEAST_TOKENS = 64  # What a sequence counts at least, because of what the API server does for each


class NoRows(RuntimeError):
    """The engine's processes gave no rows. Another try would not change it."""


class Room:
    """What may be there at once, in bytes or tokens. Who asks for more waits, in order."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Wait until there is room for ``size``, and have it."""
        size = min(size, self._size)
        async with self._turn:
            while self._free < size:
                self._left.clear()
                await self._left.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._left.set()


async def all_rows(
    engine: Any, config: Any, score_request: ScoreRequest, rows_requests: list[RowsRequest]
) -> tuple[list[SequenceRows], str | None]:
    """Return the response of each sequence, in order, and the fingerprint of the engine."""
    block_size: int = config.cache_config.block_size
    longest = max(len(sequence.token_ids) for sequence in score_request.sequences)
    room = Room(AHEAD * max(longest, config.scheduler_config.max_num_batched_tokens))
    fingerprints: set[str] = set()

    async def one(token_ids: list[int], rows_request: RowsRequest) -> SequenceRows:
        cached = rows_request.start > block_size and rows_request.start % block_size > 0
        async with room.taken(max(LEAST_TOKENS, len(token_ids))):
            rows, fingerprint = await sequence_rows(engine, token_ids, rows_request, cached=cached)
        fingerprints.add(fingerprint)
        return rows

    work = [
        one(sequence.token_ids, rows_request)
        for sequence, rows_request in zip(score_request.sequences, rows_requests, strict=True)
    ]
    rows = [await work[0]] if len(work) == 1 else await all_of(work)
    return rows, "+".join(sorted(fingerprints)) or None


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def sequence_rows(
    engine: Any, token_ids: list[int], rows_request: RowsRequest, *, cached: bool
) -> tuple[SequenceRows, str]:
    """Return one sequence's response, and the fingerprint of the process that computed it.

    With ``cached`` the prefix cache may have the prompt. Where it had more, rows are missing, and
    the sequence is computed once more without it.
    """
    for skips_cache in (False, True) if cached else (True,):
        # A copy is not checked again, and vLLM makes a shallow one instead of a deep one.
        params = copy(plugin_sampling_params())
        params.skip_reading_prefix_cache = skips_cache
        params.extra_args = rows_request.mark()
        name = f"{NAME}-{_process}-{next(_numbers)}"
        found = None
        # With its type, vLLM takes the prompt as it is.
        prompt = {"type": "token", "prompt_token_ids": token_ids}
        async for output in engine.generate(prompt, params, name):
            found = output.prompt_logprobs
        tensors = found[-1] if found else None
        if tensors is None or str(getattr(tensors[0], "dtype", "")) != "torch.uint8":
            raise NoRows(
                "The scoring plugin of prime_composer is not active in the engine's processes; "
                f"set VLLM_PLUGINS={NAME} for all of them."
            )
        description, data = tensors[0].numpy().tobytes(), tensors[1].numpy().data
        if description:
            rows = SequenceRows(rows_request.n, fields_of(description), data)
            return rows, tensors[2].numpy().tobytes().decode()
    raise NoRows("vLLM left rows of the prompt out, without a cache")


@cache
def plugin_sampling_params() -> Any:
    """Return what all requests of the plugin have in common, checked by vLLM once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@lru_cache
def fields_of(description: bytes) -> list[Field]:
    """Return the arrays of a response (``worker.Progress.payload``)."""
    fields = json.loads(description)
    if isinstance(fields, dict):
        raise NoRows(
            f"vLLM's worker could not compute the rows: {fields['type']}: {fields['text']}"
        )
    return [Field(*one) for one in fields]
