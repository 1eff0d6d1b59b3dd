"""`prime-rl teacher` on this machine: a real vLLM server with the plugin, asked in every way.

The model's prompts are prefilled in pieces of 192 tokens. One server, 40 s to start.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.request
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.http import Connection, RequestRefused
from prime_composer.recipe.backends import Served
from prime_composer.scoring.requests import MOST_SEQUENCES
from prime_composer.scoring.wire import (
    HEAD_PATH,
    SCORE_PATH,
    VERSION,
    ScoreRequest,
    SequenceRequest,
)
from prime_composer.teachers.server import ServerScorer
from tests.tiny_qwen import VOCAB, make_model
from tests.vllm_process import SECOND_RUNNER, TeacherProcess, save_tokenizer

pytestmark = pytest.mark.vllm

KEY, KEY_VAR = "a-key", "PRIME_COMPOSER_TEST_KEY"
LENGTHS = (2, 3, 17, 128, 129, 191, 192, 193, 300, 400, 511)


@pytest.fixture(scope="module", autouse=True)
def keys():
    """The keys that the tables of these tests name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VAR, KEY)
        patch.setenv("ANOTHER_KEY", "another")
        yield


def served(server, variable=KEY_VAR):
    return Served(url=server.url, api_key_var=variable)


@pytest.fixture(scope="module")
def model():
    return make_model(tied=True, seed=3)


@pytest.fixture(scope="module", params=["first", "second"])
def runner(request):
    """The variables of a server with each of vLLM's model runners."""
    return {} if request.param == "first" else SECOND_RUNNER


@pytest.fixture(scope="module")
def server(runner, model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(directory)
    save_tokenizer(directory, VOCAB)
    options = ["--dtype", "float32", "--enable-chunked-prefill", "--max-num-batched-tokens", 192]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with TeacherProcess(
        directory, log, *options, VLLM_API_KEY=KEY, VLLM_SERVER_DEV_MODE="1", **runner
    ) as process:
        yield process


@pytest.fixture(scope="module")
def scorer(server):
    scorer = ServerScorer(served(server))
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def rollouts():
    """Mixed lengths and starts: the first token that has a context, the middle, the last one."""
    generator = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        tokens = generator.integers(0, VOCAB, length).tolist()
        for start in sorted({1, length // 2, length - 1} - {0}):
            completion = tokens[start:]
            made.append(
                make_rollout(tokens[:start], completion, [-1.0] * len(completion), "length", 0)
            )
    return made


@pytest.fixture(scope="module")
def exact(model, rollouts):
    """log q of the whole vocabulary in float64, one matrix per rollout from its start on."""
    with torch.no_grad():
        model = model.double()
        found = [
            model(rollout.token_ids[None]).logits[0].log_softmax(-1)[rollout.start - 1 : -1]
            for rollout in rollouts
        ]
        model.float()
    return found


def own(logprobs, rollout):
    return logprobs.gather(1, rollout.token_ids[rollout.start :, None])[:, 0]


def test_server_names_its_model_runner(scorer, runner):
    assert scorer.client.facts.runner == ("second" if runner else "first")


@pytest.mark.parametrize("k", [0, 32])
def test_scores_equal_torchs_own_forward(scorer, rollouts, exact, k):
    scores = scorer.score(rollouts, k)
    for score, rollout, logprobs in zip(scores, rollouts, exact, strict=True):
        expected = own(logprobs, rollout)
        torch.testing.assert_close(score.ref_logprobs.double(), expected, atol=1e-4, rtol=0)
        assert score.token_ids.shape == (len(expected), k)
        found = score.teacher_logprobs.double()
        torch.testing.assert_close(logprobs.gather(1, score.token_ids), found, atol=1e-4, rtol=0)
        torch.testing.assert_close(logprobs.topk(k).values, found, atol=1e-4, rtol=0)


def test_scores_equal_vllms_json(scorer, rollouts):
    answers = (scorer.score(rollouts[::4], 32, binary=binary) for binary in (True, False))
    for packed, plain in zip(*answers, strict=True):
        for name in ("ref_logprobs", "teacher_logprobs"):
            found, expected = getattr(packed, name), getattr(plain, name)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_fingerprint_is_that_of_the_load(server, model, rollouts, tmp_path):
    """It stays over requests and API clients, and is another one after a load of weights."""
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").chmod(0o644)
    found = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            scorer = ServerScorer(served(server))
            stack.callback(scorer.close)
            scorer.score(rollouts[:3], 4)
            (fingerprint,) = scorer.client.known.fingerprints
            found.append(fingerprint)
            assert scorer.starts == 1
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        connection = scorer._connection
        connection.run(connection.request("POST", "/collective_rpc", call))
        scorer.score(rollouts[:1], 4)
        assert scorer.starts == 2
    assert found[0] == found[1] and len(found[0]) == 16


def test_given_ids_get_their_log_probs(scorer, rollouts, exact):
    generator = np.random.default_rng(1)
    given = [
        torch.from_numpy(
            np.stack([generator.permutation(VOCAB)[:16] for _ in range(len(logprobs))])
        )
        for logprobs in exact
    ]
    scores = scorer.score(rollouts, 16, candidate_ids=given)
    for one, ids, expected, rollout in zip(scores, given, exact, rollouts, strict=True):
        assert torch.equal(one.token_ids, ids)
        logprobs, sampled = one.teacher_logprobs.double(), one.ref_logprobs.double()
        torch.testing.assert_close(logprobs, expected.gather(1, ids), atol=1e-4, rtol=0)
        torch.testing.assert_close(sampled, own(expected, rollout), atol=1e-4, rtol=0)


def test_hidden_states_and_head_give_the_same_log_probs(scorer, rollouts, exact, model, tmp_path):
    """The head comes in pieces and is kept under its hash; the second time nothing is sent."""
    client = scorer.served_head()
    head = client.read(tmp_path)
    assert torch.equal(head.weight, model.lm_head.weight) and head.bias is None
    assert (head.facts.dtype, head.facts.scale, head.facts.softcap) == ("float32", 1.0, None)
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"{head.facts.sha256}.safetensors"
    stamp = kept.stat().st_mtime_ns
    assert torch.equal(client.read(tmp_path).weight, head.weight)
    assert kept.stat().st_mtime_ns == stamp
    scores = scorer.score(rollouts, 0, hidden=True)
    for one, rollout, expected in zip(scores, rollouts, exact, strict=True):
        (hidden,) = one.hidden
        assert hidden.states.dtype == torch.float32 and hidden.head is scores[0].hidden[0].head
        logprobs = (hidden.states @ head.weight.T).double().log_softmax(-1)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
        sampled = one.ref_logprobs.double()
        torch.testing.assert_close(sampled, own(expected, rollout), atol=1e-4, rtol=0)


def test_rows_that_do_not_train_have_no_score(scorer, rollouts, exact, model):
    """As tools' answers between a student's turns: 3 of 10 tokens train."""
    generator = np.random.default_rng(2)
    rollout, expected = rollouts[-2], exact[-2]
    trained = torch.from_numpy(generator.random(len(expected)) < 0.3)
    trained[0] = True
    mask = rollout.loss_mask.clone()
    mask[rollout.start :] = trained
    (one,) = scorer.score([replace(rollout, loss_mask=mask)], 8, hidden=True)
    assert torch.equal(one.scored, trained) and len(one) == len(expected)
    found, right = one.rows(trained), expected[trained]
    assert torch.equal(found.token_ids, right.topk(8).indices)
    logprobs = found.teacher_logprobs.double()
    torch.testing.assert_close(logprobs, right.topk(8).values, atol=1e-4, rtol=0)
    of_states = (found.hidden[0].states @ model.lm_head.weight.T).double().log_softmax(-1)
    torch.testing.assert_close(of_states, right, atol=1e-4, rtol=0)


def test_group_of_rollouts_has_the_scores_of_each_alone(scorer, exact, rollouts):
    """They share a prompt of many blocks, which the prefix cache has after the first one."""
    prompt = np.random.default_rng(2).integers(0, VOCAB, 300).tolist()
    completions = np.random.default_rng(3).integers(0, VOCAB, (8, 40)).tolist()
    group = [make_rollout(prompt, one, [-1.0] * 40, "length", 0) for one in completions]
    for _ in range(2):  # the second time, the cache has the completions too
        for score, rollout in zip(scorer.score(group, 8), group, strict=True):
            (alone,) = scorer.score([rollout], 8)
            torch.testing.assert_close(
                score.teacher_logprobs, alone.teacher_logprobs, atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("path", [SCORE_PATH, HEAD_PATH])
@pytest.mark.parametrize("variable", ["NO_KEY", "ANOTHER_KEY"])
def test_api_key_guards_the_routes(server, path, variable):
    connection = Connection(served(server, variable), "[teacher]")
    with pytest.raises(RequestRefused) as refused:
        connection.run(connection.request("POST", path, {"version": VERSION, "sequences": []}))
    assert refused.value.status == 401
    connection.close()


def test_wrong_questions_do_not_end_the_engine(server, scorer, rollouts):
    """Each of these ended vLLM's engine without the checks."""
    good = SequenceRequest([5, 6, 7], 1)
    wrong = [
        SequenceRequest([5, 6, 7], 4), SequenceRequest([5, 6, 7], 0),
        SequenceRequest([5, VOCAB], 1), SequenceRequest([5, -1], 1),
        SequenceRequest([5] * 600, 1),
        SequenceRequest([5, 6], 1, "AAAAgA=="),
    ]  # fmt: skip
    connection = Connection(served(server), "[teacher]")
    for sequence in wrong:
        kinds = ["given"] if sequence.given else ["sampled"]
        question = msgspec.to_builtins(ScoreRequest(VERSION, [good, sequence], kinds))
        with pytest.raises(RequestRefused) as refused:
            connection.run(connection.request("POST", SCORE_PATH, question))
        assert refused.value.status == 400, refused.value.reason
    connection.close()
    assert len(scorer.score(rollouts[:3], 4)) == 3


def test_mark_in_a_plain_request_is_no_mark(server):
    """Extra arguments of another route cannot reach the plugin's code."""
    connection = Connection(served(server), "[teacher]")
    body = {"model": str(server.directory), "prompt": [5, 6, 7], "max_tokens": 1}
    body |= {"prompt_logprobs": 1, "vllm_xargs": {"prime_composer": "x", "other": [1]}}
    answer = json.loads(bytes(connection.run(connection.request("POST", "/v1/completions", body))))
    assert len(answer["choices"][0]["prompt_logprobs"]) == 3
    connection.close()


def metric(server, *names):
    """Return the sum of the server's own metrics whose lines begin so."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


def prefilled(server):
    """Return the number of tokens of all prompts that the engine has read."""
    return metric(server, "vllm:prompt_tokens_total")


@contextlib.contextmanager
def asked(server, question):
    """Yield a connection on which a question was sent."""
    address = urlsplit(server.url)
    client = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    with contextlib.closing(client):
        headers = {"Authorization": f"Bearer {KEY}"}
        client.request("POST", SCORE_PATH, msgspec.json.encode(question), headers)
        yield client


LARGEST = ScoreRequest(
    VERSION, [SequenceRequest([5] * 256, 1)] * MOST_SEQUENCES, ["sampled", "top_k"], 8
)


def test_small_question_is_answered_before_the_largest(server, scorer, rollouts):
    """It waits for the few sequences of the large one that the engine has, not for the others.

    The engine's tokens are counted, and no seconds. Three tries, because on a busy machine this
    process may wait for a core until the large question is answered.
    """

    def read_beside_it():
        before, deadline = prefilled(server), time.monotonic() + 60
        with asked(server, LARGEST):
            while prefilled(server) == before:
                assert time.monotonic() < deadline
            scorer.score(rollouts[:1], 4)
            return prefilled(server) - before

    tokens = sum(len(sequence.token_ids) for sequence in LARGEST.sequences)
    assert any(read_beside_it() < tokens / 2 for _ in range(3))


def test_work_of_a_client_that_hung_up_ends(server, scorer, rollouts):
    """The engine reads no more of its prompts, of which it has read less than a half."""
    before, deadline = prefilled(server), time.monotonic() + 30
    with asked(server, LARGEST):
        while prefilled(server) == before:
            assert time.monotonic() < deadline
    assert len(scorer.score(rollouts[:1], 4)) == 1
    after = prefilled(server)
    time.sleep(1)
    assert before < prefilled(server) == after < before + 130_000


@pytest.mark.slow
def test_preempted_prefills_are_answered_whole(runner, server, rollouts, exact, model, tmp_path):
    """A cache of 8 blocks is too small for the prompts that are prefilled at once, 64 tokens each.

    The scheduler throws their blocks away in the middle, and computes them again.
    """
    options = ["--dtype", "float32", "--enable-chunked-prefill", "--max-num-batched-tokens", 512]
    options += ["--long-prefill-token-threshold", 64, "--num-gpu-blocks-override", 8]
    options.append("--no-scheduler-reserve-full-isl")
    log = tmp_path / "server.log"
    with TeacherProcess(server.directory, log, *options, VLLM_API_KEY=KEY, **runner) as small:
        scorer = ServerScorer(served(small))
        test_scores_equal_torchs_own_forward(scorer, rollouts * 2, exact * 2, 8)
        test_given_ids_get_their_log_probs(scorer, rollouts, exact)
        test_hidden_states_and_head_give_the_same_log_probs(
            scorer, rollouts, exact, model, tmp_path / "heads"
        )
        scorer.close()
        assert metric(small, "vllm:num_preemptions_total") > 0


def test_start_prints_what_to_type_by_hand(server):
    line = next(line for line in server.log.read_text().splitlines() if "VLLM_PLUGINS=" in line)
    variables = dict(word.split("=", 1) for word in line.split() if word.startswith("VLLM_"))
    assert variables["VLLM_PLUGINS"].split(",")[0] == "prime_composer"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in variables  # vLLM chooses
    assert "--max-logprobs -1" in line and KEY not in line
    assert os.environ.get("VLLM_PLUGINS") is None
