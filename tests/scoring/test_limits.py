"""No question keeps the others waiting: limits, parts for the engine, and answers in windows."""

import asyncio
import time
from contextlib import AsyncExitStack

import msgspec
import pytest

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

import httpx  # noqa: E402

from prime_composer.scoring import endpoint, requests  # noqa: E402
from prime_composer.scoring import engine as engine_module
from prime_composer.scoring.endpoint import Windows  # noqa: E402
from prime_composer.scoring.engine import AHEAD, Room  # noqa: E402
from prime_composer.scoring.kinds import KINDS  # noqa: E402
from prime_composer.scoring.wire import (
    HEAD_PATH,
    SCORE_PATH,
    VERSION,
    Facts,
    ScoreRequest,
    ScoreResponse,
    SequenceRequest,
    decode_response,
    encode_ids,
)  # noqa: E402
from tests.scoring.conftest import GOOD, asking, post, question, scope_of  # noqa: E402

SHORT = ([5, 6], 1, {})


TOO_LARGE = {
    "sequences": (question(*[SHORT] * (requests.MOST_SEQUENCES + 1)), "1,024 sequences"),
    "many more": (question(*[SHORT] * 100_000), "1,024 sequences"),
    "tokens": (question(*[([5] * 1000, 1, {})] * 263), "262,144 tokens in all"),
    "bytes": (b" " * (requests.MOST_REQUEST_BYTES + 1), "33,554,432 bytes"),
}


@pytest.mark.parametrize(
    ("path", "name"),
    [*((SCORE_PATH, name) for name in TOO_LARGE), (HEAD_PATH, "bytes")],
)
def test_question_over_the_limits_is_413_at_once(app, engine, path, name):
    body, words = TOO_LARGE[name]
    body = body if isinstance(body, bytes) else msgspec.json.encode(body)
    begin = time.perf_counter()
    answer = post(app, body, path)
    assert time.perf_counter() - begin < 1
    assert answer.status_code == 413 and words in answer.json()["error"]["message"]
    assert engine.asked == []


@pytest.mark.parametrize("announced", [True, False])
def test_body_over_the_limit_is_not_read_to_its_end(app, announced):
    """With its length announced not at all; otherwise up to the limit."""
    asked, sent, chunk = 0, [], b" " * 2**20
    scope = scope_of(SCORE_PATH)
    if announced:
        scope["headers"] = [(b"content-length", b"99999999999")]

    async def receive():
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413
    assert asked == (0 if announced else requests.MOST_REQUEST_BYTES // len(chunk) + 1)


def test_small_answer_does_not_wait_for_a_large_one(app, engine, monkeypatch):
    """The large one has the room for itself, and the engine is not done with it."""
    monkeypatch.setattr(endpoint, "SMALL_BYTES", 100)
    large = question(*[([5] * 19, 1, {})] * 4)  # 4 * 18 rows of 4 bytes
    app.state.prime_composer_rooms = Room(100), Room(288)

    async def scenario():
        engine.gate = asyncio.Event()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

            def ask(body):
                content = msgspec.json.encode(body)
                return asyncio.ensure_future(client.post(SCORE_PATH, content=content))

            tasks = [ask(large), ask(large)]
            await asyncio.sleep(0.1)
            tasks.append(ask(question(GOOD)))
            await asyncio.sleep(0.1)
            assert [len(tokens) for tokens, *_ in engine.asked] == [19, 19, 19, 19, 3]
            engine.gate.set()
            assert [(await task).status_code for task in tasks] == [200] * 3

    asyncio.run(scenario())
    assert len(engine.asked) == 9


def test_engine_gets_a_few_steps_of_one_question_at_once(app, engine):
    """The stand-in's step has 256 tokens. Once the client is gone, the engine gets no more."""
    tokens = [5] * 19
    body = msgspec.json.encode(question(*[(tokens, 1, {})] * 100))
    at_once = AHEAD * 256 // engine_module.LEAST_TOKENS

    async def scenario():
        engine.gate = asyncio.Event()
        task, gone = asking(app, body)
        await asyncio.sleep(0.1)
        assert len(engine.asked) == at_once
        gone.set()
        await asyncio.wait_for(task, 10)

    asyncio.run(scenario())
    assert len(engine.asked) == engine.aborted == at_once
    assert all(room._free == room._size for room in app.state.prime_composer_rooms)


def test_room_is_given_to_what_is_larger_than_it():
    """It waits until it is alone."""
    order = []

    async def scenario():
        room = Room(10)

        async def work(size):
            async with room.taken(size):
                order.append(size)
                await asyncio.sleep(0)
                order.append(-size)

        await asyncio.wait_for(asyncio.gather(work(4), work(6), work(25), work(1)), 10)

    asyncio.run(scenario())
    assert order == [4, 6, -4, -6, 25, -25, 1, -1]


@pytest.mark.parametrize("window", [7, 2**20])
def test_answer_in_windows_is_the_answer(app, engine, monkeypatch, window):
    """Bit for bit, and as long as it says."""
    body = question(GOOD, ([1, 2, 3, 4, 5], 3, {}))
    whole = post(app, body)
    monkeypatch.setattr(endpoint, "WINDOW_BYTES", window)
    answer = post(app, body)
    assert answer.content == whole.content
    assert int(answer.headers["Content-Length"]) == len(whole.content)
    assert len(decode_response(answer.content, ScoreResponse).sequences) == 2
    assert len(engine.asked) == 4  # each sequence is computed once, in however many windows


@pytest.mark.parametrize("ending", ["gone", "stalled"])
def test_answer_that_is_not_taken_gives_its_room_back(monkeypatch, ending):
    """The client hangs up, or keeps the connection and takes nothing."""
    monkeypatch.setattr(endpoint, "WINDOW_BYTES", 4)
    monkeypatch.setattr(endpoint, "STALL_SECONDS", 0.1)
    taken = []

    async def scenario():
        room, held, gone = Room(10), AsyncExitStack(), asyncio.Event()
        await held.enter_async_context(room.taken(10))

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            taken.append(len(message.get("body", b"")))
            if len(taken) == 3:
                if ending == "gone":
                    gone.set()
                else:
                    await asyncio.Event().wait()

        response = Windows([b"abc", memoryview(bytes(4000))], held)
        await asyncio.wait_for(response(scope_of(SCORE_PATH), receive, send), 10)
        assert room._free == 10

    asyncio.run(scenario())
    assert len(taken) < 10


def test_others_have_their_turn_while_an_answer_is_sent(monkeypatch):
    """Also where ``send`` never waits, as uvicorn's for a client that is gone."""
    monkeypatch.setattr(endpoint, "WINDOW_BYTES", 2**10)
    turns = []

    async def scenario():
        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            turns.append("sent")

        async def other():
            while turns.count("sent") < 100:
                turns.append("other")
                await asyncio.sleep(0)

        response = Windows([bytes(2**17)], AsyncExitStack())
        await asyncio.gather(response(scope_of(SCORE_PATH), receive, send), other())

    asyncio.run(scenario())
    assert turns.count("other") > 90


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_size_of_an_answer_is_its_real_one(dtype, width):
    """As many bytes as its arrays have: 8 columns of hidden states, K = 3, two given ids."""
    facts = Facts("m", 100, 8, 512, dtype, [*KINDS], "0.32.0")
    tokens = SequenceRequest([5] * 11, 1, encode_ids([[1, 2]] * 10))
    for kinds, k, size in (
        (["hidden"], 0, 8 * width),
        (["sampled", "top_k", "hidden"], 3, 4 + 24 + 8 * width),
        (["sampled", "top_k", "given", "hidden"], 3, 4 + 24 + 8 + 8 * width),
    ):
        one = tokens if "given" in kinds else SequenceRequest(tokens.token_ids, 1)
        asked = ScoreRequest(VERSION, [one], kinds, k)
        rows_requests = [requests.rows_request_of(0, asked, facts)]
        assert requests.response_size(rows_requests, facts) == 10 * size
