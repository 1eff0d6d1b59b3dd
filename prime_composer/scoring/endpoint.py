"""The routes of the scoring plugin in vLLM's API server.

One wrong request must never end the engine, and no large one may keep the others waiting: every
request is checked before the engine sees it, handed over in small parts, and answered in windows.
"""

import asyncio
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prime_composer.scoring.engine import NoRows, Room, all_rows
from prime_composer.scoring.head import DTYPES_BY_NAME, head_dtype_of
from prime_composer.scoring.kinds import KINDS
from prime_composer.scoring.patches import HEAD_METHOD
from prime_composer.scoring.requests import (
    BadRequest,
    OtherVersion,
    body_of,
    check_head_request,
    check_request,
    limits_of,
    read,
    response_size,
    rows_request_of,
)
from prime_composer.scoring.wire import (
    HEAD_PATH,
    NAME,
    SCORE_PATH,
    VERSION,
    Bytes,
    Facts,
    Field,
    HeadFacts,
    HeadRequest,
    HeadResponse,
    ScoreRequest,
    ScoreResponse,
    SequenceRows,
    response_parts,
)

T = TypeVar("T")

ROOM = 2**30  # Bytes of responses that are in the making at once. A larger one is so alone.

SMALL_BYTES = 2**24  # Responses up to this size never wait for larger ones

SMALL_ROOM = 2**28  # Bytes of small responses that are in the making at once

WINDOW_BYTES = 2**20  # How much of a response is sent before other requests have their turn

STALL_SECONDS = 60.0  # For a client to take a window, who keeps others from the room

MEDIA_TYPE = "application/x-msgpack"


class OtherModel(Exception):
    """A request for a model that is not the server's own, such as an adapter of it."""


class ScoringEndpoint:
    """An endpoint plugin (``vllm.plugins.endpoint_plugins``)."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes: plain ones, without what FastAPI does to a request's body, and first.

        Starlette and vLLM's metrics both try a server's routes, about 60, one after the other.
        """
        for path, route in ((SCORE_PATH, score_route), (HEAD_PATH, head_route)):
            app.router.routes.insert(0, Route(path, route, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Refuse an engine that would answer with vLLM's own numbers, and note the facts."""
        config = engine_client.vllm_config
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
        parts = await engine_client.collective_rpc(HEAD_METHOD, args=(0, 1))
        state.prime_composer_facts = server_facts(
            engine_client.model_config, columns_of(parts), parts[0].get("runner")
        )
        state.prime_composer_rooms = Room(SMALL_ROOM), Room(ROOM)
        state.prime_composer_config = config


def columns_of(parts: Sequence[dict[str, Any]]) -> int | None:
    """Return the columns of a head whose first row the workers gave; None where none could."""
    rows = [part for part in parts if part.get("weight")]
    return len(rows[0]["weight"]) // DTYPES_BY_NAME[rows[0]["dtype"]].itemsize if rows else None


def server_facts(model_config: Any, columns: int | None = None, runner: str | None = None) -> Facts:
    """Return what the server says about itself."""
    import vllm

    return Facts(
        model=str(model_config.model),
        vocab_size=model_config.get_vocab_size(),
        hidden_size=columns or model_config.get_hidden_size(),
        max_model_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
        kinds=list(KINDS),
        vllm=vllm.__version__,
        limits=limits_of(model_config.max_model_len),
        head_dtype=head_dtype_of(model_config),
        runner=runner,
    )


async def score_route(request: Request) -> Response:
    state = request.app.state
    facts: Facts = state.prime_composer_facts
    try:
        score_request = read(await body_of(request, facts), ScoreRequest)
        if score_request.model not in ("", *state.prime_composer_names):
            raise OtherModel
        check_request(score_request, facts)
        rows_requests = [
            rows_request_of(index, score_request, facts)
            for index in range(len(score_request.sequences))
        ]
        size = response_size(rows_requests, facts)
    except OtherVersion:
        return packed(ScoreResponse(NAME, VERSION, facts, []))
    except BadRequest as error:
        return error_response(error.status, str(error))
    except OtherModel:
        return error_response(404, f"The scoring plugin answers for {facts.model} alone.")
    except ClientDisconnect:
        return Response(status_code=499)
    if not rows_requests:
        return packed(ScoreResponse(NAME, VERSION, facts, []))
    async with AsyncExitStack() as held:

        async def answered() -> tuple[list[SequenceRows], str | None]:
            room: Room = state.prime_composer_rooms[size > SMALL_BYTES]
            await held.enter_async_context(room.taken(size))
            return await all_rows(
                state.engine_client, state.prime_composer_config, score_request, rows_requests
            )

        try:
            found = await unless_gone(request.receive, answered())
        except ValueError as error:  # vLLM's own check
            return error_response(400, str(error))
        except NoRows as error:
            return error_response(501, str(error))
        if found is None:
            return Response(status_code=499)
        rows, fingerprint = found
        facts = msgspec.structs.replace(facts, fingerprint=fingerprint)
        return Windows(response_parts(ScoreResponse(NAME, VERSION, facts, rows)), held.pop_all())


async def head_route(request: Request) -> Response:
    facts: Facts = request.app.state.prime_composer_facts
    try:
        head_request = read(await body_of(request, facts), HeadRequest)
        check_head_request(head_request, facts)
    except OtherVersion:
        return packed(HeadResponse(NAME, VERSION))
    except BadRequest as error:
        return error_response(error.status, str(error))
    except ClientDisconnect:
        return Response(status_code=499)
    first, last = head_request.first, head_request.last
    parts = await request.app.state.engine_client.collective_rpc(HEAD_METHOD, args=(first, last))
    for part in parts:
        if "error" in part:
            return error_response(
                400, f"The head of {facts.model} cannot be read: {part['error']}."
            )
    if first == last:
        return packed(HeadResponse(NAME, VERSION, facts=joined_head_facts(parts)))
    parts.sort(key=lambda part: part["first"])
    fields = [Field("weight", parts[0]["dtype"], facts.hidden_size)]
    fields += [Field("bias", parts[0]["dtype"], 0)] * any(part["bias"] for part in parts)
    data = b"".join([part["weight"] for part in parts] + [part["bias"] for part in parts])
    return packed(
        HeadResponse(NAME, VERSION, rows=SequenceRows(last - first, fields, memoryview(data)))
    )


def joined_head_facts(parts: list[dict[str, Any]]) -> HeadFacts:
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


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result; None, and cancel the work, if the client hangs up before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
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


class Windows(Response):
    """A response of the plugin that is sent as fast as its client takes it, never copied whole."""

    def __init__(self, parts: Sequence[Bytes], held: AsyncExitStack):
        self._parts, self._held = parts, held
        self._size = sum(len(part) for part in parts)
        super().__init__(media_type=MEDIA_TYPE, headers={"Content-Length": str(self._size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            if self._size <= WINDOW_BYTES:
                await self._send(send)
                return
            with suppress(TimeoutError):  # the server closes a connection without an end
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        left = self._size
        for window in windows(self._parts):
            left -= len(window)
            body = {"type": "http.response.body", "body": window, "more_body": left > 0}
            async with asyncio.timeout(STALL_SECONDS):
                await send(body)
            await asyncio.sleep(0)  # sending does not wait for a client that is fast or gone


def windows(parts: Sequence[Bytes]) -> Iterator[bytes]:
    """Yield the bytes of all parts, one or two times ``WINDOW_BYTES`` at a time."""
    window = bytearray()
    for part in parts:
        for first in range(0, len(part), WINDOW_BYTES):
            window += part[first : first + WINDOW_BYTES]
            if len(window) >= WINDOW_BYTES:
                yield bytes(window)
                window.clear()
    if window:
        yield bytes(window)


def packed(response: Any) -> Response:
    """Return a short response of the plugin."""
    return Response(msgspec.msgpack.encode(response), media_type=MEDIA_TYPE)


def error_response(status: int, message: str) -> Response:
    """Return an error in the form of OpenAI's."""
    return Response(
        msgspec.json.encode({"error": {"message": message, "code": status}}),
        status_code=status,
        media_type="application/json",
    )
