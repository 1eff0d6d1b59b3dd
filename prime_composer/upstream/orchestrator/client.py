"""Requests for the teacher's log-probs: to the scoring plugin, or to prime-rl's own endpoint.

A teacher's server says by itself whether it has the plugin (``prime_composer.scoring``).
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from prime_composer.backends.answers import InvalidAnswer, check_scores
from prime_composer.backends.vllm_logprobs import (
    TEACHER,
    answer_bytes,
    asked_for,
    read_answer,
    top_k_of,
)
from prime_composer.recipe.urls import has_credentials, public_url, two_credentials
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR, lacking, out_of_vocabulary, readable
from prime_composer.scoring.wire import (
    ENVELOPE_BYTES,
    SCORE_PATH,
    VERSION,
    WITHOUT_PLUGIN,
    Answer,
    Facts,
    WireError,
    decode_answer,
    unpack_arrays,
)
from prime_composer.upstream.frozen import ASKED_EVERY, QUESTION_TOKENS, Numbers, check_again
from prime_composer.upstream.log import log

IN_FLIGHT = 32
"""Most requests of this process between being sent and being parsed.

v0.6 scores all samples of a batch at once, later versions one rollout at a time. An answer takes
about 80 bytes x tokens x K. At 2,048 tokens and K = 32 this many are 0.17 GB, where a batch of 256
is 1.4 GB. They still are 65,000 tokens, several of a vLLM's prefill steps of 8,192 or 16,384, so
that servers do not run idle.
"""


ABSENT = (400, 404, 405, 422, 501)
"""Statuses of a server that does not know the plugin's route."""


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


def parse(token_ids: Sequence[int], content: bytes, k: int, origin: str = TEACHER) -> Scores:
    """Return the scores in an answer of ``/inference/v1/generate``, checked (``check_scores``).

    Neither the teacher's vocabulary nor the tokens that train are known here. The trainer refuses
    ids beyond its own head, and a token that trains and that the teacher masks.

    Args:
        token_ids: the sequence.
        content: the answer's body.
        k: size of the support, 0 for none. The answer has the top 1 then, for the check.
        origin: who answered, for messages.

    Raises:
        InvalidAnswer: the answer is something else, does not fit the tokens or K, or its numbers
            are no log-probs.
    """
    asked = asked_for(k)
    top = top_k_of(token_ids, read_answer(content, origin), asked, origin)
    check_scores(
        np.array(top.own[1:]),
        top.token_ids[1:],
        top.logprobs[1:],
        sampled=np.array(token_ids[1:]),
        k=asked,
        vocab_size=None,
        origin=origin,
        sequence=None,
        start=1,
        trained=False,
    )
    return Scores(top.own, top.token_ids[:, :k], top.logprobs[:, :k])


def parse_binary(
    token_ids: Sequence[int], content: bytes, k: int, origin: str, facts: Facts
) -> Scores:
    """Return the scores in an answer of the scoring plugin, checked (``check_scores``).

    The head's size is known here, so that ids which it lacks are scored as ``shared_vocabulary``
    says.

    Args:
        token_ids: the sequence, with ids that the teacher's head may lack.
        content: the answer's body, about the ``readable`` sequence.
        k: size of the support, 0 for none.
        origin: who answered, for messages.
        facts: what the server said of itself at first.

    Raises:
        InvalidAnswer: as ``parse``, or another model answers.
    """
    asked, n = asked_for(k), len(token_ids) - 1
    try:
        answer: Answer = decode_answer(content, Answer)
        change = facts.change(answer.facts)
        if change:
            raise WireError(f"it is another model's: {change}")
        if len(answer.sequences) != 1:
            raise WireError(f"{len(answer.sequences)} sequences, where 1 was expected")
        arrays = unpack_arrays(answer.sequences[0], n)
        own, ids, logprobs = (arrays[name] for name in ("sampled", "top_ids", "top_logprobs"))
        if (own.dtype, ids.dtype, logprobs.dtype) != (np.float32, np.int32, np.float32):
            raise WireError(f"arrays of {own.dtype}, {ids.dtype} and {logprobs.dtype}")
    except KeyError as error:
        raise InvalidAnswer(f"{origin} gave a wrong answer: it has no {error}.") from None
    except WireError as error:
        raise InvalidAnswer(f"{origin} gave a wrong answer: {error}.") from None
    check_scores(
        own,
        ids,
        logprobs,
        sampled=np.array(readable(token_ids[1:], facts.vocab_size)),
        k=asked,
        vocab_size=facts.vocab_size,
        origin=origin,
        sequence=None,
        start=1,
        trained=False,
    )
    own = np.where(lacking(np.array(token_ids[1:]), facts.vocab_size), LOG_FLOOR, own)
    return Scores(
        [0.0, *own.tolist()],
        np.concatenate([np.zeros((1, k), np.int32), ids[:, :k]]),
        np.concatenate([np.full((1, k), np.nan, np.float32), logprobs[:, :k]]),
    )


@dataclass
class Question:
    """A sequence that a teacher has scored, to be scored again.

    Attributes:
        token_ids: the sequence.
        scores: the first answer.
        requests: how many other sequences this teacher has scored since.
    """

    token_ids: Sequence[int]
    scores: Scores
    requests: int = 0


def numbers_of(scores: Scores) -> Numbers:
    """Return the scores of all tokens but the first, which none predicts."""
    return Numbers(scores[1:], scores.token_ids[1:], scores.logprobs[1:])


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
        parse: Callable[[Sequence[int], bytes, int, str], Scores] = parse,
    ):
        self._in_flight = in_flight
        self._parse = parse
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._thread = ThreadPoolExecutor(1, "prime_composer_parse")
        self._questions: dict[tuple[str, str, int], Question] = {}
        self._plugins: dict[tuple[str, str], Facts | None] = {}
        self._told_of_padding: set[str] = set()

    async def score(
        self, client: Any, model: str, token_ids: Sequence[int], k: int, *, frozen: bool = False
    ) -> Scores:
        """Return the log-probs of ``token_ids`` under ``model``, and its top K.

        A frozen model also scores its first sequence's beginning again, every ``ASKED_EVERY``
        requests and after a request that was sent more than once. Its server may have been started
        again then, with another model.

        Args:
            client: the openai client that prime-rl made; its authentication, retries and timeouts
                apply.
            model: name of the model on the server.
            token_ids: the sequence.
            k: size of the support, 0 for none.
            frozen: its weights never change. The policy's own do.

        Raises:
            InvalidAnswer: the answer is not scores of these tokens, or too large for that. Or a
                frozen model scores its first sequence with other numbers.
            ValueError: the server refuses K, or the client has both a password and an API key.
        """
        base = str(client.base_url).rstrip("/").removesuffix("/v1")
        origin = f"The teacher at {public_url(base)}"
        if has_credentials(base) and client.api_key not in ("", "EMPTY"):
            raise ValueError(
                two_credentials(
                    f"The url of the teacher at {public_url(base)}", "of its api_key_var"
                )
            )
        scores, retried = await self._ask(client, base, origin, model, token_ids, k)
        if not frozen:
            return scores
        question = self._questions.get((base, model, k))
        if question is None:
            if len(token_ids) >= QUESTION_TOKENS.start:
                beginning = slice(QUESTION_TOKENS[-1])  # its scores depend on nothing behind it
                question = Question(token_ids[beginning], scores[beginning])
                self._questions[base, model, k] = question
            return scores
        question.requests += 1
        if retried or question.requests % ASKED_EVERY == 0:
            again, _ = await self._ask(client, base, origin, model, question.token_ids, k)
            check_again(numbers_of(question.scores), numbers_of(again), origin)
        return scores

    async def _ask(
        self, client: Any, base: str, origin: str, model: str, token_ids: Sequence[int], k: int
    ) -> tuple[Scores, bool]:
        """Return the scores of a sequence, and whether the request was sent more than once."""
        loop = asyncio.get_running_loop()
        # A semaphore belongs to one event loop.
        places = self._places.setdefault(loop, asyncio.Semaphore(self._in_flight))
        async with places:
            found = await self._ask_plugin(client, base, origin, model, token_ids, k)
            return found or await self._ask_json(client, base, origin, model, token_ids, k)

    async def _ask_plugin(
        self, client: Any, base: str, origin: str, model: str, token_ids: Sequence[int], k: int
    ) -> tuple[Scores, bool] | None:
        """Return what ``_ask`` returns; None where the server has no scoring plugin, or lost it.

        JSON has the same numbers, so a server that was started again without the plugin is asked
        for JSON from then on.
        """
        key = (base, model)
        question = {"version": VERSION, "sequences": [], "model": model}
        if key not in self._plugins:
            found = await discover(client, base, origin, question)
            if found is None and key not in self._plugins:  # the first one to know
                log(f"{origin} has no {WITHOUT_PLUGIN}")
            self._plugins.setdefault(key, found)
        facts = self._plugins[key]
        if facts is None:
            return None
        asked = asked_for(k)
        question |= {"kinds": ["sampled", "top_k"], "k": asked}
        read = readable(token_ids, facts.vocab_size)
        if read != list(token_ids):
            self._say_of_padding(origin, facts.vocab_size)
        # One sequence is within every server's limits.
        question["sequences"] = [{"token_ids": read, "start": 1}]
        limit = 2 * ENVELOPE_BYTES + len(token_ids) * (4 + 8 * asked)
        try:
            content, retried = await post(
                client, f"{base}{SCORE_PATH}", question, limit=limit, origin=origin
            )
        except Exception as error:
            if getattr(error, "status_code", None) not in (404, 405):
                raise
            if self._plugins[key] is not None:  # the first one to see it
                self._plugins[key] = None
                log(f"{origin} lost its {WITHOUT_PLUGIN}")
            return None
        scores = await asyncio.get_running_loop().run_in_executor(
            self._thread, parse_binary, token_ids, content, k, origin, facts
        )
        return scores, retried

    def _say_of_padding(self, origin: str, vocab_size: int) -> None:
        """Log once per teacher that the student samples ids which the teacher lacks."""
        if origin not in self._told_of_padding:
            self._told_of_padding.add(origin)
            log(
                f"{origin} has an output head of {vocab_size} ids, and the student sampled padding "
                f"beyond them: its log-prob counts as {LOG_FLOOR:.1f}, and the teacher reads id "
                f"{vocab_size - 1} in its place"
            )

    async def _ask_json(
        self, client: Any, base: str, origin: str, model: str, token_ids: Sequence[int], k: int
    ) -> tuple[Scores, bool]:
        """Return what ``_ask`` returns, from the endpoint that prime-rl itself uses."""
        body = {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "top_p": 1.0,
                "prompt_logprobs": asked_for(k),
                # Else vLLM's API server decodes each of the tokens x (K + 1) ids by itself, for a
                # decoded_token that is not used.
                "detokenize": False,
            },
        }
        try:
            content, retried = await post(
                client,
                f"{base}/inference/v1/generate",
                body,
                limit=answer_bytes(len(token_ids), asked_for(k)),
                origin=origin,
            )
        except Exception as error:
            if getattr(error, "status_code", None) == 400 and "out of vocabulary" in str(error):
                raise ValueError(out_of_vocabulary(origin, public_url(str(error)))) from error
            if getattr(error, "status_code", None) == 400 and "logprobs" in str(error):
                raise ValueError(
                    f"{origin} refuses prompt_logprobs = {k}: start it with "
                    f"--max-logprobs {k} or more (vLLM's default is 20). Its answer: "
                    f"{public_url(str(error))}"
                ) from error
            raise
        scores = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._parse, token_ids, content, k, origin
        )
        return scores, retried


async def discover(client: Any, base: str, origin: str, question: dict[str, Any]) -> Facts | None:
    """Return what a server's scoring plugin says of itself; None where it has none.

    Args:
        client: the openai client.
        base: the server's URL.
        origin: who answers, for messages.
        question: one without sequences.

    Raises:
        InvalidAnswer: the plugin is of another version.
    """
    try:
        content, _ = await post(
            client, f"{base}{SCORE_PATH}", question, limit=ENVELOPE_BYTES, origin=origin
        )
        answer: Answer = decode_answer(content, Answer)
    except WireError as error:
        if error.is_ours:
            raise InvalidAnswer(f"{origin} answered {SCORE_PATH} with {error}.") from None
        return None
    except InvalidAnswer:  # larger than any answer of the plugin
        return None
    except Exception as error:
        if getattr(error, "status_code", None) in ABSENT:
            return None
        raise
    return answer.facts


async def post(
    client: Any, url: str, body: dict[str, Any], *, limit: int, origin: str
) -> tuple[bytes, bool]:
    """Send a request by prime-rl's openai client, and return the body of its answer.

    Also returns whether the request was sent more than once, by the client or here.

    The client reads an answer whole before it returns it, unless it is asked to stream. Its own
    retries end where the body begins, so a connection that is lost later is retried here, as often.

    Args:
        client: the openai client.
        url: absolute URL.
        body: the request.
        limit: most bytes of an answer. A larger one is given up, and not asked for again.
        origin: who answers, for messages.

    Raises:
        InvalidAnswer: the answer is larger than ``limit``.
    """
    import httpx

    retries = client.max_retries
    while True:
        response = await client.post(url, cast_to=httpx.Response, body=body, stream=True)
        try:
            content = await read_at_most(limit, response, origin)
            return content, retries < client.max_retries or was_retried(response)
        except InvalidAnswer:
            raise
        except Exception:  # httpx's or httpx2's, by the version of openai
            if retries == 0:
                raise
            retries -= 1
        finally:
            await response.aclose()


def was_retried(response: Any) -> bool:
    """Return whether the openai client sent the request again; it counts in a header."""
    return response.request.headers.get("x-stainless-retry-count", "0") != "0"


async def read_at_most(limit: int, response: Any, origin: str) -> bytes:
    """Return the body of a streamed answer.

    Raises:
        InvalidAnswer: it is larger than ``limit`` bytes.
    """
    chunks, size = [], 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise InvalidAnswer(
                f"{origin} answered more than {limit:,} bytes, the most that scores of this "
                "sequence take: it is no vLLM server, or it returns more log-probs than were asked "
                "for."
            )
    return b"".join(chunks)
