"""Requests for the teacher's log-probs, by the openai client that prime-rl made."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
from jaxtyping import Bool
from torch import Tensor

from prime_composer.backends.alignment import SequenceToScore, tensor_of
from prime_composer.backends.errors import RequestRefused
from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.recipe.urls import has_credentials, public_url, two_credentials
from prime_composer.scoring.shared_vocabulary import (
    LOG_FLOOR,
    lacking,
    out_of_vocabulary,
    within_head,
)
from prime_composer.scoring.wire import Facts
from prime_composer.teachers.client import OWN_TOKENS, Known, TeacherClient
from prime_composer.teachers.compatibility import PreflightError, check_served_tokenizer
from prime_composer.teachers.watch import (
    ASKED_EVERY,
    KNOWN_TOKENS,
    SHARE_APART,
    KnownRequest,
    known_rollout,
)
from prime_composer.upstream import meeting
from prime_composer.upstream.keys import TOKENIZERS_KEY
from prime_composer.upstream.log import log

T = TypeVar("T")

# An answer takes about 80 bytes x tokens x K: at 2,048 tokens and K = 32 this many are 0.17 GB.
# These 65,000 tokens are several of a vLLM's prefill steps (8,192 or 16,384), so none runs idle.
IN_FLIGHT = 32  # Most requests of this process between being sent and being parsed

OWN_PROMPT = 64  # Most tokens behind which a server samples what it then scores


def whole_sequence(
    token_ids: Sequence[int],
    vocab_size: int | None = None,
    start: int = 1,
    read: Bool[Tensor, " seq"] | None = None,
) -> SequenceToScore:
    """Return a sequence whose tokens from ``start`` on are scored; none predicts the first.

    ``read`` says which of all tokens' scores are read; None: all. Some of them may not train. The
    trainer refuses a token that trains and that the teacher masks, and ids beyond its own head.
    """
    if read is not None:
        read = read[start:] if read[start:].any() and not read[start:].all() else None
    lacks = lacking(tensor_of(token_ids[start:]), vocab_size)
    within = within_head(token_ids, vocab_size)
    return SequenceToScore(within, start, lacks, trained=False, vocab_size=vocab_size, read=read)


@dataclass
class AskedTeacher:
    """What is known of a teacher."""

    plugin: Known = field(default_factory=Known)  # its scoring plugin
    retried: int = 0  # requests that were sent more than once: it may have been started again
    requests: dict[int, KnownRequest] = field(default_factory=dict)  # by K; a live policy has none
    tokenizer: Any = None  # that its server was compared with, where the teacher has its own
    met: bool = False  # it has been compared with the student
    lacks_ids: bool = False  # the user was told that the student samples ids beyond its head
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)  # a batch's rollouts come at once

    @property
    def sign(self) -> tuple[int | None, int]:
        """What names the server's start: its own word, or else that nothing was sent twice."""
        starts = self.plugin.starts
        return starts, self.retried if starts is None else 0


class OpenAITransport:
    """Sends a teacher client's requests by prime-rl's openai client (``client.Transport``).

    Its router, headers, authentication, retries and timeouts apply.
    """

    def __init__(self, client: Any, base: str, thread: ThreadPoolExecutor, asked: AskedTeacher):
        self.base, self.origin = base, f"The teacher at {public_url(base)}"
        self._client, self._thread, self._asked = client, thread, asked

    async def receive(self, path: str, body: Any, max_bytes: int, *, tail: int = 0) -> bytes:
        """Send a request, and return the body of its response.

        The client reads a response whole before it returns it, unless it is asked to stream. Its
        own retries end where the body begins, so a connection that is lost later is retried here,
        as often.
        """
        import httpx

        client, left = self._client, self._client.max_retries
        while True:
            try:
                response = await client.post(
                    f"{self.base}{path}", cast_to=httpx.Response, body=body, stream=True
                )
            except Exception as error:
                status = getattr(error, "status_code", None)
                if status is None:
                    raise
                raise RequestRefused(status, str(error)) from error
            try:
                content = await self._read_at_most(max_bytes, response)
                # The openai client counts in a header.
                count = response.request.headers.get("x-stainless-retry-count", "0")
                self._asked.retried += left < client.max_retries or count != "0"
                return content
            except InvalidAnswer:
                raise
            except Exception:  # httpx's or httpx2's, by the version of openai
                if left == 0:
                    raise
                left -= 1
            finally:
                await response.aclose()

    async def _read_at_most(self, limit: int, response: Any) -> bytes:
        chunks, size = [], 0
        async for chunk in response.aiter_bytes():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise InvalidAnswer(
                    f"{self.origin} answered more than {limit:,} bytes, the most that scores of "
                    "this sequence take: it is no vLLM server, or it returns more log-probs than "
                    "were asked for."
                )
        return b"".join(chunks)

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``, computed off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def json_request(self, model: str, token_ids: Sequence[int], k: int) -> tuple[str, Any]:
        """Return path and body of the request that prime-rl itself makes."""
        body = {
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "top_p": 1.0,
                "prompt_logprobs": k,
                # Else vLLM's API server decodes each of the tokens x (K + 1) ids by itself, for a
                # decoded_token that is not used.
                "detokenize": False,
            },
        }
        return "/inference/v1/generate", body

    def refused(self, refusal: RequestRefused, path: str, k: int = 0) -> Exception:
        """Return the error for a refusal: the openai client's own where no remedy is known."""
        answer = public_url(refusal.reason)
        if refusal.status == 400 and "out of vocabulary" in answer:
            return ValueError(out_of_vocabulary(self.origin, answer))
        if refusal.status == 400 and "logprobs" in answer:
            return ValueError(
                f"{self.origin} refuses prompt_logprobs = {k}: start it with --max-logprobs {k} or "
                f"more (vLLM's default is 20). Its answer: {answer}"
            )
        cause = refusal.__cause__
        return cause if isinstance(cause, Exception) else refusal

    def error(self, message: str) -> InvalidAnswer:
        return InvalidAnswer(message)

    def show(self, message: str) -> None:
        log(message)


class TokenizerAnswer(msgspec.Struct):
    """A server's answer of how it reads a text, or writes tokens."""

    tokens: list[int] | None = None
    prompt: str | None = None
    max_model_len: int | None = None  # how many tokens it reads at most


class OpenAITokenizer:
    """Asks a server for its tokenizer, from a thread beside the event loop of its requests."""

    def __init__(self, teacher: TeacherClient):
        self.window: int | None = None  # its --max-model-len, once it has said so
        self._teacher, self._loop = teacher, asyncio.get_running_loop()

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's tokens of a text, without special ones; None: it cannot say."""
        answer = self._ask("/tokenize", prompt=text, add_special_tokens=False)
        if answer.tokens is not None:
            self.window = answer.max_model_len
        return answer.tokens

    def detokenize(self, ids: list[int]) -> str | None:
        """Return the server's text of tokens; None: it cannot say."""
        return self._ask("/detokenize", tokens=ids).prompt

    def _ask(self, path: str, **body: Any) -> TokenizerAnswer:
        body["model"] = self._teacher.model
        request = self._teacher.transport.receive(path, body, 2**20)
        try:
            content = asyncio.run_coroutine_threadsafe(request, self._loop).result()
            return msgspec.json.decode(content, type=TokenizerAnswer)
        except (RequestRefused, ValueError, msgspec.MsgspecError, RecursionError):
            return TokenizerAnswer()


class Requests:
    """Requests of this process: at most ``in_flight`` at a time, and one response read at a time.

    Responses are read in one thread, off the event loop. Reading holds the GIL, so more threads
    would not be faster, but the loop would have to wait for each of them in turn.
    """

    def __init__(self, in_flight: int = IN_FLIGHT):
        self._in_flight = in_flight
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._thread = ThreadPoolExecutor(1, "prime_composer_parse")
        self._asked: dict[tuple[str, str], AskedTeacher] = {}

    async def score(
        self,
        client: Any,
        model: str,
        token_ids: Sequence[int],
        k: int,
        *,
        start: int = 1,
        read: Bool[Tensor, " seq"] | None = None,
        frozen: bool = False,
    ) -> Scores:
        """Return the scores of ``token_ids`` from ``start`` on, with the top ``k`` of ``model``.

        With ``read`` the tokens of which it is False may have no score.

        A frozen model, whose weights never change, is first compared with the student, and its
        scores with those of what it samples. It also scores its first sequence's beginning again,
        before the scores of another start of its server are returned. A server without the scoring
        plugin names no start. It is asked after a request that was sent more than once, and as all
        are once in a while.
        """
        teacher, asked = self._connection(client, model)
        if frozen:
            await self._compare(teacher, asked, token_ids)
        scores = await self._ask(teacher, asked, token_ids, k, start, read)
        if frozen:
            await self._watch(teacher, asked, token_ids, scores)
        return scores

    def _connection(self, client: Any, model: str) -> tuple[TeacherClient, AskedTeacher]:
        base = str(client.base_url).rstrip("/").removesuffix("/v1")
        if has_credentials(base) and client.api_key not in ("", "EMPTY"):
            of_url = f"The url of the teacher at {public_url(base)}"
            raise ValueError(two_credentials(of_url, "of its api_key_var"))
        asked = self._asked.setdefault((base, model), AskedTeacher())
        transport = OpenAITransport(client, base, self._thread, asked)
        return TeacherClient(transport, model, asked.plugin), asked

    async def meet(self, client: Any, model: str, tokenizer: Any) -> Facts:
        """Return what the server of a teacher with a tokenizer of its own says of itself.

        Once, its server is asked how it reads texts. One that cannot be asked passes.
        """
        teacher, asked = self._connection(client, model)
        origin = teacher.transport.origin
        await teacher.discover_once()
        if teacher.facts is None:
            raise InvalidAnswer(
                f"{origin} has no scoring plugin, and of a teacher with a tokenizer of "
                "its own hundreds of log-probs per token are read, which cost a server several "
                "milliseconds each time in JSON: start it with prime-composer teacher."
            )
        if asked.tokenizer is not tokenizer:
            asked.tokenizer = tokenizer  # others need not ask it as well
            server = OpenAITokenizer(teacher)
            whose = f"the tokenizer that {TOKENIZERS_KEY} names for {model!r}"
            remedy = "name the tokenizer of the model that it serves"
            try:
                await asyncio.to_thread(check_served_tokenizer, tokenizer, server, whose, remedy)
            except PreflightError as error:
                raise InvalidAnswer(f"{origin}: {error}") from None
        return teacher.facts

    async def _compare(
        self, teacher: TeacherClient, asked: AskedTeacher, token_ids: Sequence[int]
    ) -> None:
        """Compare a server with the student and with itself, once, before it scores."""
        async with asked.meeting:
            if asked.met:
                return
            origin = teacher.transport.origin
            if asked.tokenizer is None:
                server = OpenAITokenizer(teacher)
                compare = meeting.compare_with_student
                await asyncio.to_thread(compare, origin, server, lambda: server.window)
            await teacher.discover_once()
            # Shorter than the sequence, which fits into the server's window.
            prompt = within_head(token_ids, asked.plugin.vocab_size)[:-OWN_TOKENS] or token_ids[:1]
            own = await teacher.own_logprobs(prompt[:OWN_PROMPT])
            meeting.compare_with_itself(origin, own)
            asked.met = True

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``, computed where responses are read, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _watch(
        self,
        teacher: TeacherClient,
        asked: AskedTeacher,
        token_ids: Sequence[int],
        scores: Scores,
    ) -> None:
        """Send the known request where scores that have just come may be another model's."""
        k, least, most = scores.k, KNOWN_TOKENS.start - 1, KNOWN_TOKENS[-1] - 1
        known = asked.requests.get(k)
        if known is None:
            at = scores.all_scored.nonzero()[:most, 0]
            if len(at) < least:
                return
            # The beginning's scores depend on nothing behind it.
            read = torch.zeros(scores.start + int(at[-1]) + 1, dtype=torch.bool)
            read[scores.start + at] = True
            rollout = known_rollout(torch.tensor(token_ids[: len(read)]), scores.start)
            rollout = replace(rollout, loss_mask=read)
            first = scores.rows(slice(len(read) - scores.start)).rows(read[scores.start :])
            asked.requests[k] = KnownRequest(rollout, first, share=SHARE_APART, sign=asked.sign)
        elif known.is_due(sign := asked.sign, 1):
            known_ids, read = known.rollout.token_ids.tolist(), known.rollout.loss_mask
            start = known.rollout.start
            again = await self._ask(teacher, asked, known_ids, k, start, read)
            again = again.rows(read[start:])  # JSON gives all rows
            if change := known.change(again, sign):
                raise InvalidAnswer(
                    f"{teacher.transport.origin} {change}: start it as it was. Steps since its "
                    f"last right answer, at most {ASKED_EVERY} requests ago, may have trained on "
                    "wrong numbers."
                )

    async def _ask(
        self,
        teacher: TeacherClient,
        asked: AskedTeacher,
        token_ids: Sequence[int],
        k: int,
        start: int = 1,
        read: Bool[Tensor, " seq"] | None = None,
    ) -> Scores:
        loop = asyncio.get_running_loop()
        # A semaphore belongs to one event loop.
        places = self._places.setdefault(loop, asyncio.Semaphore(self._in_flight))
        async with places:
            await teacher.discover_once()
            size = asked.plugin.vocab_size
            sequence = whole_sequence(token_ids, size, start, read)
            lacks = sequence.lacks.any() or sequence.token_ids[0] != token_ids[0]
            if lacks and not asked.lacks_ids and size is not None:
                asked.lacks_ids = True
                log(
                    f"{teacher.transport.origin} has an output head of {size} ids, and the student "
                    f"sampled padding beyond them: its log-prob counts as {LOG_FLOOR:.1f}, and the "
                    f"teacher reads id {size - 1} in its place"
                )
            return await teacher.score(sequence, k=k)
