"""The routes of the scoring plugin in vLLM's API server.

One wrong request must never end the engine: everything is checked here, before the engine sees it,
and answered with 400. A request whose client is gone is aborted.
"""

import asyncio
import itertools
import json
import secrets
from argparse import Namespace
from collections.abc import Coroutine
from contextlib import suppress
from copy import copy
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from prime_composer.scoring.kinds import KINDS
from prime_composer.scoring.patches import HEAD_METHOD
from prime_composer.scoring.wire import (
    HEAD_PATH,
    NAME,
    SCORE_PATH,
    VERSION,
    Answer,
    Facts,
    Field,
    HeadAnswer,
    HeadFacts,
    HeadQuestion,
    Question,
    Rows,
    WireError,
    decode_ids,
)
from prime_composer.scoring.worker import Wish

MOST_BYTES = 2**30
"""Largest answer of one request, and of all that are in the making at once."""

_process = secrets.token_hex(8)
_numbers = itertools.count()
"""Together the name of a request in the engine, which several API servers may share."""

FIRST_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER=0"


class BadQuestion(ValueError):
    """A question that is answered with 400."""


class NoRows(RuntimeError):
    """The engine's processes gave no rows. Another try would not change it."""


class OtherModel(Exception):
    """A question for a model that is not the server's own, such as an adapter of it."""


class OtherVersion(Exception):
    """A question of another version. The answer says which one this is."""


class Room:
    """Bytes of answers that may be in the making at once. Who asks for more waits, in order.

    Args:
        size: of all together. No single one is larger.
    """

    def __init__(self, size: int):
        self._free = size
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until there is room for ``size`` bytes, and take it."""
        async with self._turn:
            while self._free < size:
                self._left.clear()
                await self._left.wait()
            self._free -= size

    def leave(self, size: int) -> None:
        """Give the room of ``enter`` back."""
        self._free += size
        self._left.set()


class Versioned(msgspec.Struct):
    """What every question has."""

    version: int


class ScoringEndpoint:
    """An endpoint plugin (``vllm.plugins.endpoint_plugins``)."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes: plain ones, without what FastAPI does to a request's body, and first.

        Starlette and vLLM's metrics both try a server's routes, about 60, one after the other.
        """
        for path, answer in ((SCORE_PATH, score), (HEAD_PATH, head)):
            app.router.routes.insert(0, Route(path, answer, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Refuse an engine that would answer with vLLM's own numbers, and note the facts.

        Raises:
            ValueError: the engine has another model runner or several pipeline stages, or leaves
                hidden states of prompts out.
        """
        config = engine_client.vllm_config
        if getattr(config, "use_v2_model_runner", False):
            raise ValueError(
                f"The scoring plugin of prime_composer needs vLLM's first model runner; set "
                f"{FIRST_MODEL_RUNNER}."
            )
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "The scoring plugin of prime_composer needs one pipeline stage; set "
                "--pipeline-parallel-size 1 and use --tensor-parallel-size."
            )
        if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
            raise ValueError(
                "The scoring plugin of prime_composer needs the hidden states of whole prompts; "
                "leave --kv-sharing-fast-prefill out."
            )
        state.prime_composer_names = args.served_model_name or [args.model]
        state.prime_composer_facts = facts_of(engine_client.model_config)
        state.prime_composer_room = Room(MOST_BYTES)
        state.prime_composer_block = config.cache_config.block_size


def facts_of(model_config: Any) -> Facts:
    """Return what the server says about itself."""
    import vllm

    return Facts(
        model=str(model_config.model),
        vocab_size=model_config.get_vocab_size(),
        hidden_size=model_config.get_hidden_size(),
        max_model_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
        kinds=list(KINDS),
        vllm=vllm.__version__,
    )


async def score(request: Request) -> Response:
    """Answer ``SCORE_PATH``."""
    state = request.app.state
    facts: Facts = state.prime_composer_facts
    try:
        question = read(await request.body(), Question)
        if question.model not in ("", *state.prime_composer_names):
            raise OtherModel
        check_question(question, facts)
        wishes = [wish_of(index, question, facts) for index in range(len(question.sequences))]
        size = answer_size(question, wishes, facts)
    except OtherVersion:
        return packed(Answer(NAME, VERSION, facts, []))
    except BadQuestion as error:
        return refusal(400, str(error))
    except OtherModel:
        return refusal(404, f"The scoring plugin answers for {facts.model} alone.")
    except ClientDisconnect:
        return Response(status_code=499)
    if not wishes:
        return packed(Answer(NAME, VERSION, facts, []))
    room: Room = state.prime_composer_room

    async def answered() -> list[Rows]:
        await room.enter(size)
        try:
            return await all_rows(state.engine_client, state.prime_composer_block, question, wishes)
        finally:
            room.leave(size)

    try:
        rows = await unless_gone(request, answered())
    except ValueError as error:  # vLLM's own check
        return refusal(400, str(error))
    except NoRows as error:
        return refusal(501, str(error))
    if rows is None:
        return Response(status_code=499)
    return packed(Answer(NAME, VERSION, facts, rows))


async def head(request: Request) -> Response:
    """Answer ``HEAD_PATH``."""
    facts: Facts = request.app.state.prime_composer_facts
    try:
        question = read(await request.body(), HeadQuestion)
        first, last = question.first, question.last
        if not first <= last <= facts.vocab_size:
            raise BadQuestion(
                f"rows {first} to {last}, where 0 <= first <= last <= {facts.vocab_size} is needed"
            )
        if (last - first) * facts.hidden_size * 4 > MOST_BYTES:
            raise BadQuestion(f"{last - first} rows at once are too many; ask in pieces")
    except OtherVersion:
        return packed(HeadAnswer(NAME, VERSION))
    except BadQuestion as error:
        return refusal(400, str(error))
    except ClientDisconnect:
        return Response(status_code=499)
    parts = await request.app.state.engine_client.collective_rpc(HEAD_METHOD, args=(first, last))
    for part in parts:
        if "error" in part:
            return refusal(400, f"The head of {facts.model} cannot be read: {part['error']}.")
    if first == last:
        return packed(HeadAnswer(NAME, VERSION, facts=joined(parts)))
    parts.sort(key=lambda part: part["first"])
    fields = [Field("weight", parts[0]["dtype"], facts.hidden_size)]
    fields += [Field("bias", parts[0]["dtype"], 0)] * any(part["bias"] for part in parts)
    data = b"".join([part["weight"] for part in parts] + [part["bias"] for part in parts])
    return packed(HeadAnswer(NAME, VERSION, rows=Rows(last - first, fields, data)))


def joined(parts: list[dict[str, Any]]) -> HeadFacts:
    """Return the facts of a head of which each worker has some rows."""
    parts = sorted(parts, key=lambda part: part["first"])
    one = parts[0]
    return HeadFacts(
        rows=sum(part["rows"] for part in parts),
        columns=one["columns"],
        dtype=one["dtype"],
        sha256=sha256(b"".join(part["digests"] for part in parts)).hexdigest(),
        scale=one["scale"],
        softcap=one["softcap"],
        bias=one["bias"],
        computed_in=one["computed_in"],
    )


def read(body: bytes, kind: type[Any]) -> Any:
    """Return a question of this version.

    Raises:
        OtherVersion: it is one of another version.
        BadQuestion: it is none.
    """
    try:
        question = msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        # Another version's may have other keys.
        with suppress(ValueError, RecursionError):
            if msgspec.json.decode(body, type=Versioned).version != VERSION:
                raise OtherVersion from None
        raise BadQuestion(f"The question cannot be read: {error}") from None
    if question.version != VERSION:
        raise OtherVersion
    return question


def check_question(question: Question, facts: Facts) -> None:
    """Check what the sequences of a question share.

    Raises:
        BadQuestion: a kind that is not known, or a K that does not fit.
    """
    kinds = question.kinds
    if question.sequences and not kinds or len({*kinds} & KINDS.keys()) != len(kinds):
        raise BadQuestion(f"kinds {kinds}, where some of {list(KINDS)} are needed, each once")
    if not 0 <= question.k <= facts.vocab_size or ("top_k" in kinds) != (question.k > 0):
        raise BadQuestion(
            f"k = {question.k} with kinds {kinds}: top_k needs a k from 1 to the vocabulary's "
            f"{facts.vocab_size}, and without it k is 0"
        )


def wish_of(index: int, question: Question, facts: Facts) -> Wish:
    """Return what the worker has to do for one sequence.

    Args:
        index: of the sequence.
        question: the whole question.
        facts: the server's.

    Raises:
        BadQuestion: the engine would end, or answer something else.
    """
    sequence = question.sequences[index]
    place, length = f"sequence {index}", len(sequence.token_ids)
    if length + 1 > facts.max_model_len:
        raise BadQuestion(
            f"{place} has {length} tokens, and max_model_len = {facts.max_model_len} leaves room "
            f"for {facts.max_model_len - 1}"
        )
    if not 1 <= sequence.start < length:
        raise BadQuestion(
            f"{place} has {length} tokens and start = {sequence.start}, where a start from 1 to "
            f"{length - 1} is needed"
        )
    check_ids(min(sequence.token_ids), max(sequence.token_ids), facts.vocab_size, place)
    try:
        given = decode_ids(sequence.given, length - sequence.start)
    except WireError as error:
        raise BadQuestion(f"{place}: {error}") from None
    if ("given" in question.kinds) != (given.size > 0):
        raise BadQuestion(f"{place}: the kind given and given ids go together")
    if given.size:
        check_ids(int(given.min()), int(given.max()), facts.vocab_size, f"{place}, given ids")
    return Wish(sequence.start, tuple(question.kinds), question.k, given.tobytes())


def check_ids(lowest: int, highest: int, vocab_size: int, place: str) -> None:
    """Check that ids are in the vocabulary; another one ends the engine.

    Raises:
        BadQuestion: one is not.
    """
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadQuestion(f"{place}: id {wrong}, where 0 to {vocab_size - 1} is needed")


def answer_size(question: Question, wishes: list[Wish], facts: Facts) -> int:
    """Return about how many bytes an answer has.

    Raises:
        BadQuestion: more than ``MOST_BYTES``.
    """
    per_row = 4 + 8 * question.k + ("hidden" in question.kinds) * 4 * facts.hidden_size
    size = sum(
        (len(sequence.token_ids) - wish.start) * per_row + len(wish.given)
        for sequence, wish in zip(question.sequences, wishes, strict=True)
    )
    if size > MOST_BYTES:
        raise BadQuestion(
            f"{len(wishes)} sequences would get {size:,} bytes, and at most {MOST_BYTES:,} are "
            "answered at once; ask for fewer sequences, or a smaller k"
        )
    return size


async def all_rows(
    engine: Any, block_size: int, question: Question, wishes: list[Wish]
) -> list[Rows]:
    """Return the answer of each sequence, in order; the first error cancels the others.

    Args:
        engine: vLLM's client of its engine.
        block_size: tokens of a block of the prefix cache. It has whole blocks: a shorter prompt is
            in none, and one of whole blocks is in it with the row that predicts the first token.
        question: the checked question.
        wishes: what the worker has to do, one per sequence.
    """
    work = [
        rows_of(
            engine,
            sequence.token_ids,
            wish,
            cached=wish.start > block_size and wish.start % block_size > 0,
        )
        for sequence, wish in zip(question.sequences, wishes, strict=True)
    ]
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def rows_of(engine: Any, token_ids: list[int], wish: Wish, *, cached: bool) -> Rows:
    """Return one sequence's answer.

    The prompt's key-value cache is shared with other sequences of its group. Where the cache had
    more than the prompt, rows are missing, and the sequence is computed once more without it.

    Args:
        engine: vLLM's client of its engine.
        token_ids: prompt and completion.
        wish: what the worker has to do.
        cached: the prefix cache may have the prompt without its last row.

    Raises:
        NoRows: the engine's processes do not have the plugin, or cannot compute the rows.
    """
    for skips_cache in (False, True) if cached else (True,):
        # A copy is not checked again, and vLLM makes a shallow one instead of a deep one.
        params = copy(sampling_params())
        params.skip_reading_prefix_cache = skips_cache
        params.extra_args = wish.mark()
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
                f"set VLLM_PLUGINS={NAME} and {FIRST_MODEL_RUNNER} for all of them."
            )
        description, data = tensors[0].numpy().tobytes(), tensors[1].numpy().data
        if description:
            return Rows(len(token_ids) - wish.start, fields_of(description), data)
    raise NoRows("vLLM left rows of the prompt out, without a cache")


@cache
def sampling_params() -> Any:
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
    """Return the arrays of an answer (``worker.Progress.payload``).

    Raises:
        NoRows: there are none, and the worker says why.
    """
    fields = json.loads(description)
    if isinstance(fields, str):
        raise NoRows(f"vLLM's worker could not compute the rows: {fields}")
    return [Field(*one) for one in fields]


async def unless_gone(request: Request, work: Coroutine[Any, Any, list[Rows]]) -> list[Rows] | None:
    """Return the result; None, and cancel the work, if the client hangs up before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None
    finally:
        left.cancel()
        task.cancel()


def packed(answer: Any) -> Response:
    """Return an answer of the plugin."""
    return Response(msgspec.msgpack.encode(answer), media_type="application/x-msgpack")


def refusal(status: int, message: str) -> Response:
    """Return an error in the form of OpenAI's."""
    return Response(
        msgspec.json.encode({"error": {"message": message, "code": status}}),
        status_code=status,
        media_type="application/json",
    )
