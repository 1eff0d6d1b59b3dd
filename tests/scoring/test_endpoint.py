"""The routes with a stand-in for vLLM's engine: what is refused before the engine sees it."""

import asyncio
import re
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

import httpx  # noqa: E402

from prime_composer.scoring.endpoint import ScoringEndpoint  # noqa: E402
from prime_composer.scoring.engine import Room  # noqa: E402
from prime_composer.scoring.kinds import KINDS  # noqa: E402
from prime_composer.scoring.wire import (  # noqa: E402
    HEAD_PATH,
    SCORE_PATH,
    VERSION,
    ScoreResponse,
    decode_response,
    encode_ids,
    unpack_arrays,
)
from prime_composer.scoring.worker import Progress, RowsRequest, uint8  # noqa: E402
from tests.scoring.conftest import ARGS, GOOD, asking, post, question, scope_of  # noqa: E402


def test_question_is_answered_in_order(app, engine):
    answer = post(app, question(GOOD, ([1, 2, 3, 4, 5], 3, {})))
    assert answer.status_code == 200
    sequences = decode_response(answer.content, ScoreResponse).sequences
    assert unpack_arrays(sequences[0], 2)["sampled"].tolist() == [0, -1]
    assert unpack_arrays(sequences[1], 2)["sampled"].tolist() == [0, -1]
    assert [rows_request.start for _, rows_request, _ in engine.asked] == [1, 3]


def test_question_without_sequences_is_answered_with_facts(app):
    facts = decode_response(post(app, question()).content, ScoreResponse).facts
    assert (facts.vocab_size, facts.hidden_size, facts.max_model_len) == (100, 8, 20)
    assert facts.kinds == list(KINDS) and facts.dtype == "float32"


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_question_of_another_version_gets_this_one(app, version):
    """The client learns which version the server has, and says what to do."""
    answer = post(app, {"version": version, "anything": "else"})
    assert msgspec.msgpack.decode(answer.content)["version"] == VERSION


def given(ids):
    return {"kinds": ["given"], "sequences": [{"token_ids": [5, 6, 7], "start": 1, "given": ids}]}


BAD = {
    "no json": (b"{", "cannot be read"),
    "deep": (b'{"version":1,"sequences":' + b"[" * 100_000, "cannot be read"),
    "no version": ({"sequences": []}, "version"),
    "unknown key": (question(GOOD, seed=1), "seed"),
    "no kind": (question(GOOD, kinds=[]), "kinds"),
    "a kind twice": (question(GOOD, kinds=["sampled", "sampled"]), "each once"),
    "unknown kind": (question(GOOD, kinds=["samples"]), "'samples'"),
    "k without top_k": (question(GOOD, k=3), "k = 3"),
    "top_k without k": (question(GOOD, kinds=["top_k"]), "k = 0"),
    "k too large": (question(GOOD, kinds=["top_k"], k=101), "vocabulary's 100"),
    "k negative": (question(GOOD, kinds=["top_k"], k=-1), "k = -1"),
    "start 0": (question(([5, 6], 0, {})), "start = 0"),
    "start beyond": (question(GOOD, ([5, 6], 2, {})), "sequence 1 .* start = 2"),
    "start negative": (question(([5, 6], -1, {})), "start = -1"),
    "empty": (question(([], 1, {})), "0 tokens"),
    "skip at the start": (question(([5] * 9, 1, {"skip": [[1, 3]]})), "skips"),
    "skip to the end": (question(([5] * 9, 1, {"skip": [[3, 9]]})), "skips"),
    "skips that touch": (question(([5] * 9, 1, {"skip": [[2, 3], [3, 4]]})), "skips"),
    "skip backwards": (question(([5] * 9, 1, {"skip": [[4, 2]]})), "skips"),
    "too long": (question(([1] * 20, 1, {})), "max_model_len = 20 leaves room for 19"),
    "id too large": (question(([5, 100], 1, {})), "id 100, where 0 to 99"),
    "id negative": (question(([-1, 5], 1, {})), "id -1"),
    "id huge": (question(([5, 2**70], 1, {})), "cannot be read|id "),
    "id text": (question((["5", 6], 1, {})), "int"),
    "id true": (question(([True, 6], 1, {})), "int"),
    "given outside": (question() | given(encode_ids([[1], [100]])), "given ids: id 100"),
    "given negative": (question() | given(encode_ids([[1], [-1]])), "given ids: id -1"),
    "given of another length": (question() | given(encode_ids([[1]])), "multiple of 4 times 2"),
    "given no base64": (question() | given("?"), "base64"),
    "given without ids": (question(GOOD, kinds=["given"]), "go together"),
    "ids without given": (question(([5, 6], 1, {"given": encode_ids([[1]])})), "go together"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_question_is_400_and_never_reaches_the_engine(app, engine, name):
    body, words = BAD[name]
    answer = post(app, body)
    assert answer.status_code == 400 and engine.asked == []
    message = answer.json()["error"]["message"]
    assert re.search(words, message) and len(message) < 1000


def test_answer_too_large_is_refused_before_it_is_made(app, engine, monkeypatch):
    monkeypatch.setattr("prime_composer.scoring.requests.MOST_RESPONSE_BYTES", 200)
    four = [([1] * 9, 1, {})] * 4  # 8 rows each
    assert post(app, question(*four)).status_code == 200
    for rows_request, size in ({"kinds": ["top_k"], "k": 1}, 256), ({"kinds": ["hidden"]}, 1024):
        answer = post(app, question(*four, **rows_request))
        assert answer.status_code == 413
        assert f"{size:,} bytes, {size // 32} for each" in answer.text
        assert "at most 200 are answered at once" in answer.text
    monkeypatch.setattr("prime_composer.scoring.requests.MOST_HEAD_BYTES", 300)
    answer = post(app, {"version": VERSION, "first": 0, "last": 100}, HEAD_PATH)
    assert answer.status_code == 413 and "ask in pieces" in answer.text


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (3, 2), (0, 101)])
def test_rows_of_the_head_outside_are_refused(app, first, last):
    answer = post(app, {"version": VERSION, "first": first, "last": last}, HEAD_PATH)
    assert answer.status_code == 400


def test_rows_that_the_prefix_cache_had_are_computed_again(app, engine):
    engine.gap = True
    long = ([5, 6, 7, 8, 9], 3, {})
    answer = decode_response(post(app, question(long)).content, ScoreResponse)
    assert unpack_arrays(answer.sequences[0], 2)["sampled"].tolist() == [0, -1]
    assert [skipped for *_, skipped in engine.asked] == [False, True]


def test_prompt_shorter_than_a_block_does_not_ask_the_cache(app, engine):
    engine.gap = True
    for tokens, start in (([5, 6, 7], 1), ([5, 6, 7], 2)):
        assert post(app, question((tokens, start, {}))).status_code == 200
    assert [skipped for *_, skipped in engine.asked] == [True, True]


def test_question_for_an_adapter_is_not_found(app, engine):
    """vLLM's JSON knows adapters; the plugin would answer with the model without it."""
    assert post(app, question(GOOD, model="m")).status_code == 200
    for sequences in ((), (GOOD,)):
        answer = post(app, question(*sequences, model="an-adapter"))
        assert answer.status_code == 404 and "answers for m alone" in answer.text
    args = SimpleNamespace(model="m", served_model_name=["first", "second"])
    asyncio.run(ScoringEndpoint().init_state(engine, app.state, args))
    assert post(app, question(model="second")).status_code == 200
    assert post(app, question(model="m")).status_code == 404


def test_reason_of_the_worker_is_answered_and_not_asked_again(app, engine):
    async def generate(prompt, params, request_id):
        error = {"type": "OutOfMemoryError", "text": "3 GiB"}
        progress = Progress(RowsRequest.of(params), error=error)
        yield SimpleNamespace(prompt_logprobs=[(*progress.payload(), uint8(b"start"))])

    engine.generate = generate
    answer = post(app, question(GOOD))
    assert answer.status_code == 501 and "OutOfMemoryError: 3 GiB" in answer.text


@pytest.mark.parametrize("path", [SCORE_PATH, HEAD_PATH])
def test_client_that_hangs_up_while_it_asks_is_no_error(app, path):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope_of(path), receive, send))
    assert sent[0]["status"] == 499


def test_prompt_of_whole_blocks_does_not_ask_the_cache(app, engine):
    """The cache would have its last row too, and every sequence would be computed twice."""
    tokens = [5, 6, 7, 8, 9, 10]
    for start in (3, 4, 5):
        assert post(app, question((tokens, start, {}))).status_code == 200
    assert [skipped for *_, skipped in engine.asked] == [False, True, False]


def test_engine_without_the_plugin_is_named(app, engine):
    async def generate(prompt, params, request_id):
        yield SimpleNamespace(prompt_logprobs=[(torch.zeros(2, 1),) * 3])

    engine.generate = generate
    answer = post(app, question(GOOD))
    # A client asks again after a 500, and waits for a server that comes back.
    assert answer.status_code == 501 and "VLLM_PLUGINS=prime_composer" in answer.text


@pytest.mark.parametrize(
    ("part", "setting", "value", "words"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
        ("cache_config", "kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    ],
)
def test_engine_that_cannot_answer_is_refused_at_its_start(engine, part, setting, value, words):
    """With the last one, vLLM's worker would end at the first request."""
    config = engine.vllm_config
    setattr(getattr(config, part) if part else config, setting, value)
    with pytest.raises(ValueError, match=words):
        asyncio.run(ScoringEndpoint().init_state(engine, SimpleNamespace(), ARGS))


def test_work_of_a_client_that_hung_up_is_aborted(app, engine):
    """The server sends http.disconnect; both of its sequences are cancelled in the engine."""
    body = msgspec.json.encode(question(GOOD, GOOD))

    async def scenario():
        engine.gate = asyncio.Event()
        task, gone = asking(app, body)
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(task, 10)

    asyncio.run(scenario())
    assert engine.aborted == 2


def test_answers_beyond_the_room_wait_for_their_turn(app, engine):
    """Room for two of these; the third one waits in order, and one that hangs up takes none."""
    app.state.prime_composer_rooms = Room(16), Room(0)
    bodies = [question(([5, 6, 7], 1, {})) for _ in range(4)]  # 8 bytes each

    async def scenario():
        engine.gate = asyncio.Event()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            posts = [
                asyncio.ensure_future(client.post(SCORE_PATH, content=msgspec.json.encode(body)))
                for body in bodies
            ]
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(engine.asked) == 2
            posts[2].cancel()
            await asyncio.sleep(0)
            engine.gate.set()
            answers = await asyncio.gather(posts[0], posts[1], posts[3])
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len(engine.asked) == 3

    asyncio.run(scenario())
    assert app.state.prime_composer_rooms[0]._free == 16


def test_one_failing_sequence_cancels_the_others(app, engine):
    async def generate(prompt, params, request_id):
        try:
            if prompt["prompt_token_ids"] == [9, 9]:
                raise ValueError("vLLM's words")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            engine.aborted += 1
            raise
        yield None

    engine.generate = generate
    answer = post(app, question(GOOD, ([9, 9], 1, {})))
    assert answer.status_code == 400 and "vLLM's words" in answer.text
    assert engine.aborted == 1
