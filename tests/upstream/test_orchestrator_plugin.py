"""Requests of the orchestrator to a teacher's server that has the scoring plugin, or loses it."""

import asyncio
import math

import msgspec
import numpy as np
import pytest

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.scoring.wire import (
    NAME,
    SCORE_PATH,
    VERSION,
    Facts,
    Field,
    ScoreResponse,
    SequenceRows,
)
from prime_composer.upstream import wire
from prime_composer.upstream.orchestrator.client import Requests
from tests.upstream.test_orchestrator import Refusal, Response

TOKENS = [7, 3, 9]
FACTS = Facts("t", 20, 8, 100, "bfloat16", ["sampled", "top_k"], "0.26.0")
OWN = np.array([-3.0, -1.5], "<f4")
IDS = np.array([[1, 2], [9, 1]], "<i4")
LOGPROBS = np.array([[-0.5, -2.0], [-1.5, -1.6]], "<f4")
JSON = (
    b'{"prompt_logprobs":[null,{"3":{"logprob":-3.0,"rank":8},"1":{"logprob":-0.5,"rank":1},'
    b'"2":{"logprob":-2.0,"rank":2}},{"9":{"logprob":-1.5,"rank":1},"1":{"logprob":-1.6,"rank":2}}]}'
)


def packed(facts=FACTS, ids=IDS, own=OWN, top=LOGPROBS, version=VERSION, plugin=NAME, sequences=1):
    k = ids.shape[1]
    fields = [Field("sampled", "float32", 0), Field("top_ids", "int32", k)]
    fields.append(Field("top_logprobs", "float32", k))
    rows = SequenceRows(len(own), fields, own.tobytes() + ids.tobytes() + top[:, :k].tobytes())
    return msgspec.msgpack.encode(ScoreResponse(plugin, version, facts, [rows] * sequences))


class Client:
    """The openai client of a server; ``answers`` maps a path to what is returned or raised."""

    base_url = "http://teacher:8001/v1/"
    max_retries = 0
    api_key = "EMPTY"

    def __init__(self, **answers):
        self.asked = []
        self.answers = {"found": packed(sequences=0), "scores": packed(), "json": JSON} | answers

    async def post(self, url, cast_to, body, stream):
        kind = (
            "json" if not url.endswith(SCORE_PATH) else "scores" if body["sequences"] else "found"
        )
        self.asked.append((kind, url, body))
        await asyncio.sleep(0)
        answer = self.answers[kind]
        if isinstance(answer, Exception):
            raise answer
        return Response(answer)

    @property
    def kinds(self):
        return [kind for kind, *_ in self.asked]


def score(client, k=2, requests=None):
    return wire.sent(asyncio.run((requests or Requests()).score(client, "served", TOKENS, k)))


def test_scores_of_the_plugin_are_those_of_json():
    """Same values, same layout; the first token has no context."""
    binary, json = score(Client()), score(Client(found=Refusal("", 404)))
    assert binary == json == [0.0, -3.0, -1.5]
    assert binary.scores.to_bytes() == json.scores.to_bytes()


def test_server_is_asked_once_whether_it_has_the_plugin():
    client, requests = Client(), Requests()
    for _ in range(3):
        score(client, requests=requests)
    assert client.kinds == ["found", "scores", "scores", "scores"]
    _, url, body = client.asked[1]
    assert url == f"http://teacher:8001{SCORE_PATH}"
    assert body == {
        "version": VERSION, "model": "served", "kinds": ["sampled", "top_k"], "k": 2,
        "sequences": [{"token_ids": TOKENS, "start": 1, "given": "", "skip": []}],
    }  # fmt: skip


@pytest.mark.parametrize("found", [Refusal("", 404), b"<html>"])
def test_server_without_the_plugin_is_asked_for_json(found):
    client, requests = Client(found=found), Requests()
    for _ in range(2):
        assert score(client, requests=requests) == [0.0, -3.0, -1.5]
    assert client.kinds == ["found", "json", "json"]


def test_other_refusals_are_not_taken_for_a_missing_plugin():
    with pytest.raises(Refusal):
        score(Client(found=Refusal("", 401)))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"found": packed(version=VERSION + 1)}, f"version {VERSION + 1} of the plugin"),
        ({"scores": packed()[:-1]}, "truncated"),
        ({"scores": packed(facts=msgspec.structs.replace(FACTS, model="u"))}, "was t and is u"),
        ({"scores": packed(own=np.array([0.3, -1.5], "<f4"))}, "wrong score at position 1"),
    ],
)
def test_wrong_answer_of_the_plugin_is_refused(answers, words):
    with pytest.raises(InvalidAnswer, match=words) as error:
        score(Client(**answers))
    assert str(error.value).startswith("The teacher at http://teacher:8001 ")


def test_server_that_lost_the_plugin_is_asked_for_json(capsys):
    """Its numbers are the same. One line says so, whatever the number of requests."""
    client, requests = Client(), Requests()
    score(client, requests=requests)
    client.answers["scores"] = Refusal("", 404)

    async def both():
        asked = [requests.score(client, "served", TOKENS, 2) for _ in range(2)]
        return await asyncio.gather(*asked)

    assert [one.ref_logprobs.tolist() for one in asyncio.run(both())] == [[-3.0, -1.5]] * 2
    assert score(client, requests=requests) == [0.0, -3.0, -1.5]
    assert client.kinds == ["found", *["scores"] * 3, *["json"] * 3]
    printed = capsys.readouterr().err
    assert printed.count("lost its scoring plugin and answers in JSON") == 1


LONG = list(range(1, 19))


def numbers(own, fingerprint):
    """Return a response with one log-prob for every token of ``LONG``."""
    facts = msgspec.structs.replace(FACTS, fingerprint=fingerprint)
    size = len(LONG) - 1
    ids, top = np.zeros((size, 1), "<i4"), np.full((size, 1), -0.1, "<f4")
    return packed(facts, ids, np.full(size, own, "<f4"), top)


def test_teacher_of_another_start_is_asked_what_it_knows():
    """At once, before its scores are kept; a known start is not asked again."""
    client, requests = Client(scores=numbers(-3.0, "one")), Requests()

    def ask(own, fingerprint):
        client.answers["scores"] = numbers(own, fingerprint)
        client.asked.clear()
        asyncio.run(requests.score(client, "served", LONG, 1, frozen=True))
        return len(client.asked)

    asked = [ask(-3.0, name) for name in ("one", "one", "two", "two", "one")]
    # The first one also looks for the plugin, and asks for what the server samples.
    assert asked == [3, 1, 2, 1, 1]
    assert ask(-9.0, "two") == 1  # what it says of itself is taken, once in a while apart
    with pytest.raises(InvalidAnswer, match="other numbers than then: up to 6 nat apart"):
        ask(-9.0, "three")


def test_padding_that_the_student_sampled_is_floored(capsys):
    """The teacher's head has 20 ids. In the place of another one it reads its last, once said."""
    client, requests, tokens = Client(), Requests(), [7, 25, 9]
    for _ in range(2):
        scores = asyncio.run(requests.score(client, "served", tokens, 2))
        assert scores.ref_logprobs.tolist() == pytest.approx([math.log(1e-7), -1.5])
    assert client.asked[1][2]["sequences"][0]["token_ids"] == [7, 19, 9]
    assert scores.token_ids.tolist() == [[1, 2], [9, 1]]
    assert capsys.readouterr().err.count("output head of 20 ids, and the student sampled") == 1


def test_json_of_a_smaller_teacher_names_the_remedy():
    """Without the plugin the size of its head is not known here."""
    refusal = Refusal("Token id 25 is out of vocabulary", 400)
    with pytest.raises(
        ValueError, match="wider head may sample.*start it with prime-composer teacher"
    ):
        score(Client(found=Refusal("", 404), json=refusal))
