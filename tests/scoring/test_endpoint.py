"""The routes with a stand-in for vLLM's engine: what is refused before the engine sees it."""

import asyncio
import re
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("fastapi", reason="vLLM's server is not installed")


from prime_composer.scoring.endpoint import ScoringEndpoint  # noqa: E402
from prime_composer.scoring.wire import (  # noqa: E402
    HEAD_PATH,
    VERSION,
    ScoreResponse,
    decode_response,
    encode_ids,
    unpack_arrays,
)
from prime_composer.scoring.worker import Progress, RowsRequest, uint8  # noqa: E402
from tests.scoring.conftest import ARGS, GOOD, post, question  # noqa: E402


def test_question_is_answered_in_order(app, engine):
    answer = post(app, question(GOOD, ([1, 2, 3, 4, 5], 3, {})))
    assert answer.status_code == 200
    sequences = decode_response(answer.content, ScoreResponse).sequences
    assert unpack_arrays(sequences[0], 2)["sampled"].tolist() == [0, -1]
    assert unpack_arrays(sequences[1], 2)["sampled"].tolist() == [0, -1]
    assert [rows_request.start for _, rows_request, _ in engine.asked] == [1, 3]


def test_question_of_another_version_gets_this_one(app):
    """The client learns which version the server has, and says what to do."""
    answer = post(app, {"version": VERSION + 1, "anything": "else"})
    assert msgspec.msgpack.decode(answer.content)["version"] == VERSION


def given(ids):
    return {"kinds": ["given"], "sequences": [{"token_ids": [5, 6, 7], "start": 1, "given": ids}]}


BAD = {
    "no json": (b"{", "cannot be read"),
    "deep": (b'{"version":1,"sequences":' + b"[" * 100_000, "cannot be read"),
    "unknown key": (question(GOOD, seed=1), "seed"),
    "a kind twice": (question(GOOD, kinds=["sampled", "sampled"]), "each once"),
    "unknown kind": (question(GOOD, kinds=["samples"]), "'samples'"),
    "k without top_k": (question(GOOD, k=3), "k = 3"),
    "top_k without k": (question(GOOD, kinds=["top_k"]), "k = 0"),
    "k too large": (question(GOOD, kinds=["top_k"], k=101), "vocabulary's 100"),
    "start 0": (question(([5, 6], 0, {})), "start = 0"),
    "start beyond": (question(GOOD, ([5, 6], 2, {})), "sequence 1 .* start = 2"),
    "empty": (question(([], 1, {})), "0 tokens"),
    "skip to the end": (question(([5] * 9, 1, {"skip": [[3, 9]]})), "skips"),
    "skips that touch": (question(([5] * 9, 1, {"skip": [[2, 3], [3, 4]]})), "skips"),
    "too long": (question(([1] * 20, 1, {})), "max_model_len = 20 leaves room for 19"),
    "id too large": (question(([5, 100], 1, {})), "id 100, where 0 to 99"),
    "id negative": (question(([-1, 5], 1, {})), "id -1"),
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


def test_rows_that_the_prefix_cache_had_are_computed_again(app, engine):
    engine.gap = True
    long = ([5, 6, 7, 8, 9], 3, {})
    answer = decode_response(post(app, question(long)).content, ScoreResponse)
    assert unpack_arrays(answer.sequences[0], 2)["sampled"].tolist() == [0, -1]
    assert [skipped for *_, skipped in engine.asked] == [False, True]


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


ERROR = {"type": "OutOfMemoryError", "text": "3 GiB"}


@pytest.mark.parametrize(
    ("failed", "words"), [(True, "OutOfMemoryError: 3 GiB"), (False, "VLLM_PLUGINS=prime_composer")]
)
def test_worker_that_cannot_answer_is_not_asked_again(app, engine, failed, words):
    """It was out of memory, or has no plugin. A client asks again after a 500, not after a 501."""

    async def generate(prompt, params, request_id):
        arrays = [torch.zeros(2, 1)] * 3
        if failed:
            arrays = *Progress(RowsRequest.of(params), error=ERROR).payload(), uint8(b"start")
        yield SimpleNamespace(prompt_logprobs=[tuple(arrays)])

    engine.generate = generate
    answer = post(app, question(GOOD))
    assert answer.status_code == 501 and words in answer.text


def test_prompt_of_whole_blocks_does_not_ask_the_cache(app, engine):
    """The cache would have its last row too, and every sequence would be computed twice."""
    tokens = [5, 6, 7, 8, 9, 10]
    for start in (3, 4, 5):
        assert post(app, question((tokens, start, {}))).status_code == 200
    assert [skipped for *_, skipped in engine.asked] == [False, True, False]


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
