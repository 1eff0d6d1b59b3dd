"""Requests for the teacher's log-probs, to the endpoint that prime-rl itself uses."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from prime_composer.backends.vllm_logprobs import read_answer, top_k_of

IN_FLIGHT = 32
"""Most requests of this process between being sent and being parsed.

v0.6 scores all samples of a batch at once, later versions one rollout at a time. An answer takes
about 80 bytes x tokens x K. At 2,048 tokens and K = 32 this many are 0.17 GB, where a batch of 256
is 1.4 GB. They still are 65,000 tokens, several of a vLLM's prefill steps of 8,192 or 16,384, so
that servers do not run idle.
"""


class Scores(list[float]):
    """log q of each token, 0.0 for the first (prime-rl's convention), with the top-K support.

    prime-rl passes it on as the list that its own request would return. A slice keeps its part of
    the support, so that prime-rl's self-distillation can cut the hint off.

    Args:
        values: log q of each token, n numbers.
        token_ids: NumPy int32 [n, k], most probable first.
        logprobs: NumPy float32 [n, k]; NaN where nothing was scored.
    """

    def __init__(self, values: Sequence[float], token_ids: Any, logprobs: Any):
        super().__init__(values)
        self.token_ids = token_ids
        self.logprobs = logprobs

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return Scores(super().__getitem__(index), self.token_ids[index], self.logprobs[index])


def parse(token_ids: Sequence[int], content: bytes, k: int) -> Scores:
    """Return the scores in an answer of ``/inference/v1/generate``.

    Raises:
        ValueError: the answer is something else, or does not fit the tokens or K.
    """
    return Scores(*top_k_of(token_ids, read_answer(content), k))


class Requests:
    """Requests of this process: at most ``in_flight`` at a time, and one answer parsed at a time.

    Answers are parsed in one thread, off the event loop. Parsing holds the GIL, so more threads
    would not be faster, but the loop would have to wait for each of them in turn.

    Args:
        in_flight: most requests between being sent and being parsed.
        parse: reads one answer.
    """

    def __init__(
        self,
        in_flight: int = IN_FLIGHT,
        parse: Callable[[Sequence[int], bytes, int], Scores] = parse,
    ):
        self._in_flight = in_flight
        self._parse = parse
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._thread = ThreadPoolExecutor(1, "prime_composer_parse")

    async def score(self, client: Any, model: str, token_ids: Sequence[int], k: int) -> Scores:
        """Return the log-probs of ``token_ids`` under ``model``, and its top K.

        Args:
            client: the openai client that prime-rl made; its authentication, retries and timeouts
                apply.
            model: name of the model on the server.
            token_ids: the sequence.
            k: size of the support, 0 for none.

        Raises:
            ValueError: the server refuses K, or its answer is not scores of these tokens.
        """
        import httpx

        base = str(client.base_url).rstrip("/").removesuffix("/v1")
        body = {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "top_p": 1.0,
                "prompt_logprobs": max(k, 1),
                # Else vLLM's API server decodes each of the tokens x (K + 1) ids by itself, for a
                # decoded_token that is not used.
                "detokenize": False,
            },
        }
        loop = asyncio.get_running_loop()
        # A semaphore belongs to one event loop.
        places = self._places.setdefault(loop, asyncio.Semaphore(self._in_flight))
        async with places:
            try:
                response = await client.post(
                    f"{base}/inference/v1/generate", cast_to=httpx.Response, body=body
                )
            except Exception as error:
                if getattr(error, "status_code", None) == 400 and "logprobs" in str(error):
                    raise ValueError(
                        f"The teacher at {base} refuses prompt_logprobs = {k}: start it with "
                        f"--max-logprobs {k} or more (vLLM's default is 20). Its answer: {error}"
                    ) from error
                raise
            return await loop.run_in_executor(
                self._thread, self._parse, token_ids, response.content, k
            )
