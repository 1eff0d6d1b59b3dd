"""The client against a real vLLM server process, and against servers that misbehave.

The real server takes 25 s to start, once for the module.
"""

import contextlib
import json
import resource
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.http import RequestRefused, ServerError
from prime_composer.backends.protocols import Limits, SamplingParams
from prime_composer.local import opening
from prime_composer.local.opening import teacher_spec
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.weight_sync import check_weight_sync
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import Ends
from prime_composer.recipe.loading import parse_recipe
from prime_composer.samplers.registry import open_sampler
from prime_composer.samplers.server import ServerSampler
from prime_composer.teachers.registry import open_scorer
from prime_composer.teachers.server import ServerScorer
from tests.builders import student_spec
from tests.faults import modes
from tests.faults.server import SpoilingServer, road_of_request
from tests.local.helpers import tiny_models
from tests.local.killed_teacher import expect_wait_for_killed
from tests.stand_in import Reply, serving
from tests.vllm_process import QUICK, VllmProcess, save_tokenizer

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]


def serve(directory, log, forks, max_model_len=320):
    """Start a server whose log-probs are those that it samples from."""
    options = ["--dtype", "float32", "--max-model-len", max_model_len, "--max-logprobs", 16]
    options += ["--logprobs-mode", "processed_logprobs", *QUICK]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1"}
    return VllmProcess(directory, log, *options, forks=forks, **env)


@pytest.fixture(scope="module")
def server(models, vllm_forks, tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    models.tied_model.save_pretrained(directory)
    save_tokenizer(directory, 131)
    # A server's defaults come from the model's generation config; the client must override top_k.
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 1, "top_k": 2, "temperature": 0.2})
    )
    with serve(directory, tmp_path_factory.mktemp("log") / "server.log", vllm_forks) as process:
        yield process


@pytest.fixture
def sampler(server, models):
    sampler = ServerSampler(server.url, server.directory)
    yield sampler
    sampler.update_weights(models.tied_model)
    sampler.close()


@pytest.fixture
def scorer(server):
    scorer = ServerScorer(server.url)
    yield scorer
    scorer.close()


def trained(rollout):
    return range(rollout.start, len(rollout.token_ids))


@pytest.mark.vllm
def test_server_rollouts_have_the_policys_log_probs(sampler, models, plain_logprobs):
    rollouts = sampler.generate(PROMPTS, SamplingParams(n=3, max_tokens=12), seed=0)
    assert [r.prompt_index for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({tuple(r.completion_ids) for r in rollouts}) == 9
    ranks = []
    for rollout in rollouts:
        assert (
            rollout.token_ids[: len(PROMPTS[rollout.prompt_index])].tolist()
            == PROMPTS[rollout.prompt_index]
        )
        rows = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in trained(rollout):
            token = rollout.token_ids[t]
            assert float(rollout.inference_logprobs[t]) == pytest.approx(
                float(rows[t, token]), abs=1e-4
            )
            ranks.append(int((rows[t] > rows[t, token]).sum()))
    assert max(ranks) > 10  # the served generation config says top_k = 2


@pytest.mark.vllm
def test_server_nucleus_is_renormalized(sampler, models, plain_logprobs):
    from prime_composer.samplers.transformers import processed_logprobs

    for rollout in sampler.generate(
        PROMPTS, SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8), seed=0
    ):
        rows = processed_logprobs(plain_logprobs(models.tied_model, rollout.token_ids), 0.7, 0.8)
        for t in trained(rollout):
            assert float(rollout.inference_logprobs[t]) == pytest.approx(
                float(rows[t, rollout.token_ids[t]]), abs=1e-4
            )


@pytest.mark.vllm
def test_server_stops_at_stop_ids_and_greedy_is_greedy(sampler, vllm_sampler):
    params = SamplingParams(n=2, max_tokens=10, temperature=0.0)
    ours = sampler.generate(PROMPTS, params, seed=0)
    theirs = vllm_sampler.generate(PROMPTS, params, seed=0)
    assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in theirs]
    stop = ours[0].completion_ids[2]
    stopped = sampler.generate(
        PROMPTS[:1], SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=(stop,)), 0
    )[0]
    first = ours[0].completion_ids.index(stop)
    assert (
        stopped.finish_reason == "stop"
        and stopped.completion_ids == ours[0].completion_ids[: first + 1]
    )


@pytest.mark.vllm
def test_server_ends_where_the_run_says_and_nowhere_else(server):
    """The end of the server's own files, 1, is passed over; another id ends a completion."""
    params = SamplingParams(n=64, max_tokens=24)
    own = ServerSampler(server.url, server.directory)
    run = ServerSampler(server.url, server.directory, eos_token_ids=(7,))
    with contextlib.closing(own), contextlib.closing(run):
        ends = [
            {
                r.completion_ids[-1]
                for r in one.generate(PROMPTS, params, 0)
                if r.finish_reason == "stop"
            }
            for one in (own, run)
        ]
        assert any(1 in r.completion_ids[:-1] for r in run.generate(PROMPTS, params, 0))
    assert ends == [{1}, {7}]


@pytest.mark.vllm
def test_same_seed_gives_the_same_server_rollouts(sampler):
    runs = [
        sampler.generate(PROMPTS, SamplingParams(n=2, max_tokens=10), seed) for seed in (3, 4, 3)
    ]
    ids = [[r.token_ids.tolist() for r in run] for run in runs]
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.vllm
def test_server_scores_are_those_of_the_model(server, scorer, models):
    from prime_composer.teachers.transformers import TransformersScorer

    g = torch.Generator().manual_seed(0)
    rollouts = [
        make_rollout(
            prompt,
            ids := torch.randint(2, 131, (n,), generator=g).tolist(),
            [0.0] * len(ids),
            "length",
            i,
        )
        for i, (prompt, n) in enumerate(zip(PROMPTS, (3, 20, 1), strict=True))
    ]
    local = TransformersScorer(models.tied_model)
    for k, prompts in ((0, None), (5, None), (16, [[40, 41, 42], [50], [60, 61]])):
        served = scorer.score(rollouts, k, prompts)
        expected = local.score(rollouts, k, prompts)
        for a, b, rollout in zip(served, expected, rollouts, strict=True):
            n = len(rollout.completion_ids)
            assert a.token_ids.shape == (n, k) and a.ref_logprobs.shape == (n,)
            torch.testing.assert_close(a.ref_logprobs, b.ref_logprobs, atol=1e-4, rtol=0)
            torch.testing.assert_close(a.teacher_logprobs, b.teacher_logprobs, atol=1e-4, rtol=0)
            assert torch.equal(a.token_ids, b.token_ids)
    with pytest.raises(ServerError, match="larger --max-logprobs, or lower the loss's k"):
        scorer.score(rollouts, 17)
    with pytest.raises(ValueError, match="vocabulary has 131"):
        scorer.score(rollouts, 132)


@pytest.mark.vllm
def test_server_scorer_generates_on_the_same_server(scorer, models):
    """Its sampler serves the teacher's accuracy; limits are the server's own."""
    params = SamplingParams(max_tokens=5, temperature=0.0)
    (rollout,) = scorer.sampler.generate(PROMPTS[:1], params, seed=0)
    with torch.no_grad():
        logits = models.tied_model(input_ids=rollout.token_ids[None]).logits[0]
    assert logits[rollout.start - 1 : -1].argmax(dim=-1).tolist() == rollout.completion_ids
    assert scorer.sampler is scorer.sampler
    assert (scorer.limits.max_model_len, scorer.limits.vocab_size) == (320, 131)
    assert scorer.limits.max_logprobs is None


@pytest.mark.vllm
def test_update_weights_reaches_head_and_prefix_cache(sampler, tied_model):
    assert check_weight_sync(sampler, tied_model, [[(5 * i) % 120 + 4 for i in range(40)]]) < 1e-4


@pytest.mark.vllm
def test_stale_connection_is_opened_again(server, models):
    """The server closed it early. It says that it still has the weights."""
    lines = []
    sampler = ServerSampler(server.url, server.directory, status=lines.append)
    sampler.update_weights(models.tied_model)
    sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=1), seed=0)
    time.sleep(2)
    assert len(sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=1), seed=0)) == 1
    assert sampler.starts == 1 and lines == []
    sampler.close()


@pytest.mark.vllm
def test_vllm_names_the_version_of_its_weights(server, models):
    """It is the one of the last update, until somebody else gives another one."""
    sampler = ServerSampler(server.url, server.directory)
    sampler.update_weights(models.tied_model)
    first = sampler._sign
    sampler.update_weights(models.tied_model)
    assert isinstance(first, str) and first != sampler._sign == sampler.sign()
    assert not sampler._has_lost_weights()
    body = {"new_version": "another"}
    sampler._connection.run(sampler._connection.request("POST", "/update_weight_version", body))
    assert sampler._has_lost_weights()
    sampler.close()


@pytest.mark.vllm
def test_vllm_says_when_it_was_started(server, models):
    """Which tells one process from another, where weights have no versions."""
    sampler = ServerSampler(server.url, server.directory)
    sampler._give_version = lambda: None
    sampler._has_versions = False
    sampler.update_weights(models.tied_model)
    assert time.time() - 3600 < float(sampler._sign) < time.time()
    assert not sampler._has_lost_weights()
    sampler.close()


@pytest.mark.vllm
def test_server_says_what_its_tokens_are(scorer):
    assert scorer.tokenize("w5 w6 w7") == [5, 6, 7]
    assert scorer.detokenize([5, 6, 7]) == "w5 w6 w7"


@pytest.mark.slow
@pytest.mark.vllm
def test_run_waits_for_a_killed_vllm_teacher(vllm_forks, tiny_recipe, tmp_path):
    """The teacher is killed after step 2 and back seconds later, as if nothing had been."""
    teacher = tiny_models(tiny_recipe())["teacher"]
    with serve(teacher, tmp_path / "server.log", vllm_forks, max_model_len=256) as server:
        expect_wait_for_killed(server, tiny_recipe, tmp_path)


@pytest.mark.vllm
def test_another_model_than_the_recipes_is_refused(server):
    with pytest.raises(
        ServerError,
        match=rf"serves {server.directory}, and the recipe names Qwen/Qwen3-8B; set model",
    ):
        ServerScorer(server.url, "Qwen/Qwen3-8B")


@pytest.mark.vllm
def test_prompt_too_long_for_the_server_is_refused(sampler):
    with pytest.raises(ValueError, match="does not fit into max_model_len 320"):
        sampler.generate([[5] * 300], SamplingParams(max_tokens=21), seed=0)


@pytest.mark.parametrize(
    "url", ["http://[::1", "ftp://me:secret@h:21", "localhost:8001", "", "http://", "http://h:p"]
)
def test_url_of_no_server_names_its_key(url):
    with pytest.raises(ServerError, match=r"^url in \[teacher\]: ") as error:
        ServerScorer(url)
    assert "secret" not in str(error.value)


class RestartingServer(SpoilingServer):
    """A server that is restarted with its first weights, at a request that a test chooses."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        self.restart_at = {}  # path -> requests until the restart; the last one gets no answer

    def restart(self):
        self.stop()
        self.swap(self.checkpoint)
        self.start()

    def answer(self, method, path, body):
        kind = f"{path} {road_of_request(path, body)}"
        if kind in self.restart_at:
            self.restart_at[kind] -= 1
            if self.restart_at[kind] == 0:
                del self.restart_at[kind]
                restart = threading.Thread(target=self.restart)
                restart.start()
                restart.join()  # the connection is cut by now
        return super().answer(method, path, body)


@pytest.fixture(scope="module")
def restarting(models):
    with RestartingServer(models.tied) as server:
        yield server


@pytest.fixture(params=[True, False], ids=["versions", "older"])
def either(request, restarting):
    """The same server as a vLLM whose weights have versions, and as an older one."""
    restarting.versions = request.param
    yield restarting
    restarting.versions = True


@pytest.fixture
def spoiling(restarting):
    """The same server as one whose answers a test spoils."""
    yield restarting
    restarting.heal()
    restarting.can_tokenize = True


def moved(model):
    """Change a model's weights so that every log-prob changes by some nats."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def ids_of(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


def mu_of(rollouts):
    return [rollout.inference_logprobs[rollout.start :].tolist() for rollout in rollouts]


MOMENTS = [
    "between",
    "/v1/completions sampling",
    "/update_weight_version None",
    "/collective_rpc reload",
    "/reset_prefix_cache None",
]


@pytest.mark.parametrize(
    ("versions", "when"),
    [(True, when) for when in (*MOMENTS, "/weight_info None")]
    + [(False, when) for when in (*MOMENTS, "/metrics None")],
)
def test_restarted_student_gets_its_weights_again(
    versions, when, restarting, tied_model, monkeypatch
):
    """Killed between two steps, while it samples, or in any part of a weight update."""
    monkeypatch.setattr(restarting, "versions", versions)
    params = SamplingParams(n=2, max_tokens=6)
    lines = []
    sampler = ServerSampler(restarting.url, concurrency=1, status=lines.append)
    sampler.update_weights(tied_model)
    old = sampler.generate(PROMPTS, params, seed=0)
    moved(tied_model)
    sampler.update_weights(tied_model)
    undisturbed = sampler.generate(PROMPTS, params, seed=0)
    assert ids_of(old) != ids_of(undisturbed) and sampler.starts == 1

    restarting.restart()
    sampler.update_weights(tied_model)
    if when == "between":
        restarting.restart()
    else:
        # Of the three prompts, the second one's request meets the restart.
        restarting.restart_at = {when: 2 if "sampling" in when else 1}
    if "sampling" not in when and when != "between":
        sampler.update_weights(tied_model)
    rollouts = sampler.generate(PROMPTS, params, seed=0)
    sampler.close()
    assert not restarting.restart_at
    assert ids_of(rollouts) == ids_of(undisturbed) and mu_of(rollouts) == mu_of(undisturbed)
    lost = "sampling" in when or when == "between"
    told = any("came back without the run's weights" in line for line in lines)
    assert told == lost == (sampler.starts > 1)


def test_student_restarted_without_an_outage_samples_again(either, tied_model, monkeypatch):
    """No request meets the restart, and what follows it is of old weights."""
    params = SamplingParams(max_tokens=6)
    sampler = ServerSampler(either.url)
    moved(tied_model)
    sampler.update_weights(tied_model)
    undisturbed = sampler.generate(PROMPTS, params, seed=0)
    sample, calls = sampler._sample, []

    def sample_after_a_restart(*arguments):
        if not calls:
            either.swap(either.checkpoint)
        calls.append(1)
        return sample(*arguments)

    monkeypatch.setattr(sampler, "_sample", sample_after_a_restart)
    rollouts = sampler.generate(PROMPTS, params, seed=0)
    sampler.close()
    assert len(calls) == 2 and sampler._connection.outages == 0
    assert ids_of(rollouts) == ids_of(undisturbed) and mu_of(rollouts) == mu_of(undisturbed)


def test_student_is_asked_for_its_weights_after_it_samples(either, tied_model):
    """One cheap request per call. The weights are not sent again where they are there."""
    sampler = ServerSampler(either.url)
    sampler.update_weights(moved(tied_model))
    before = Counter(either.requests)
    for _ in range(2):
        sampler.generate(PROMPTS, SamplingParams(max_tokens=6), seed=0)
    sampler.close()
    asked = Counter(either.requests) - before
    assert asked["/weight_info"] == (2 if either.versions else 0)
    assert asked["/metrics"] == (0 if either.versions else 2)
    assert asked["/v1/completions"] == 2 * len(PROMPTS)
    assert asked["/collective_rpc"] == asked["/update_weight_version"] == 0 and sampler.starts == 1


def test_student_that_says_nothing_is_lost_by_outages(restarting, tied_model, monkeypatch):
    """Where neither version nor start is known, it may be another one after any outage."""
    monkeypatch.setattr(restarting, "versions", False)
    monkeypatch.setattr(restarting, "metrics", False)
    sampler = ServerSampler(restarting.url)
    sampler.update_weights(moved(tied_model))
    undisturbed = sampler.generate(PROMPTS, SamplingParams(max_tokens=6), seed=0)
    assert sampler.starts == 1
    restarting.restart_at = {"/v1/completions sampling": 2}
    rollouts = sampler.generate(PROMPTS, SamplingParams(max_tokens=6), seed=0)
    sampler.close()
    assert sampler.starts == 2 and ids_of(rollouts) == ids_of(undisturbed)


def test_dropped_request_of_a_student_keeps_its_weights(spoiling, tied_model):
    """A lost connection alone is no reason to send the weights again."""
    sampler = ServerSampler(spoiling.url)
    sampler.update_weights(tied_model)
    reloads = spoiling.requests["/collective_rpc"]
    spoiling.spoil("drop", after=1, times=2, road="sampling")
    assert len(sampler.generate(PROMPTS, SamplingParams(max_tokens=4), seed=0)) == 3
    sampler.close()
    assert sampler._connection.outages > 0 and sampler.starts == 1 and spoiling.spoiled["drop"] >= 2
    assert spoiling.requests["/collective_rpc"] == reloads


def test_student_that_never_stays_up_is_given_up(restarting, tied_model, monkeypatch):
    sampler = ServerSampler(restarting.url)
    sampler.update_weights(tied_model)
    moved(tied_model)
    sampler.update_weights(tied_model)
    sample = sampler._sample

    def restart_and_sample(*arguments):
        restarting.restart_at = {"/v1/completions sampling": 1}
        return sample(*arguments)

    monkeypatch.setattr(sampler, "_sample", restart_and_sample)
    with pytest.raises(ServerError, match="was lost 3 times during sampling"):
        sampler.generate(PROMPTS, SamplingParams(max_tokens=2), seed=0)
    sampler.close()


@pytest.mark.parametrize("mode", [*modes.CARDS, *modes.BODIES])
def test_malformed_list_of_models_is_one_sentence(mode, spoiling):
    spoiling.spoil(mode, times=1, road="models")
    match = "something else than a list of models|more than 1,048,576 bytes"
    with pytest.raises(ServerError, match=match) as error:
        ServerScorer(spoiling.url)
    message = str(error.value)
    assert spoiling.url in message and len(message) < 600
    assert message.isascii() and message.isprintable()


def test_thirty_two_huge_answers_take_little_memory(spoiling):
    """32 answers of 300 MB each would be 9.6 GB; the bound comes from tokens and K."""
    scorer = ServerScorer(spoiling.url)
    rollouts = [make_rollout([5, 6], [7 + i], [-1.0], "length", i) for i in range(32)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spoiling.spoil("huge", road="scoring")
    with pytest.raises(ServerError, match=r"with more than [\d,]+ bytes"):
        scorer.score(rollouts, 8)
    scorer.close()
    # In KiB. The server of this process takes some of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


def test_server_says_its_tokens_and_texts(spoiling):
    scorer = ServerScorer(spoiling.url)
    assert scorer.detokenize([5, 6]) == "5 6"
    assert scorer.tokenize("w5 w6") is None  # the fixture's model has no tokenizer: 400
    spoiling.spoil("tokens_shifted", road="tokenize")
    spoiling.can_tokenize = False
    assert scorer.detokenize([5, 6]) is None and scorer.tokenize("w5") is None
    scorer.close()


def test_tokens_of_another_layout_cannot_be_asked(fake_server):
    """An answer without the field asked for is none."""
    scorer = ServerScorer(fake_server.url)
    for answer in ({}, {"tokens": ["5"]}, [], {"tokens": None}, {"prompt": 5}):
        fake_server.answers["/tokenize"] = fake_server.answers["/detokenize"] = (200, answer)
        assert scorer.tokenize("w5") is None and scorer.detokenize([5]) is None
    fake_server.answers["/tokenize"] = (200, {"tokens": [5, 6], "count": 2})
    assert scorer.tokenize("w5 w6") == [5, 6]
    assert fake_server.last == {"model": "m", "prompt": "w5 w6", "add_special_tokens": False}
    scorer.close()


def test_reload_that_fails_is_not_waited_for(fake_server, tied_model):
    """vLLM answers 500 where it cannot read the directory; the words are its own."""
    fake_server.answers["/collective_rpc"] = (500, {"error": {"message": "No such file"}})
    sampler = ServerSampler(fake_server.url)
    with pytest.raises(ServerError, match="answered 500 to /collective_rpc: No such file"):
        sampler.update_weights(tied_model)
    sampler.close()


def test_reload_needs_no_prompt_logprobs(fake_server, tied_model):
    """A server that refuses to score still samples; it gets the weights again after an outage."""
    refusal = {"error": {"message": "prompt_logprobs are not supported"}}
    reloads = []

    def complete(body):
        return refusal if "prompt_logprobs" in body else completion(body)

    def reload(body):
        reloads.append(body)
        return {}

    fake_server.answers["/v1/completions"] = (
        lambda body: 400 if "prompt_logprobs" in body else 200,
        complete,
    )
    fake_server.answers["/collective_rpc"] = (200, reload)
    fake_server.answers["/reset_prefix_cache"] = (200, {"success": True})
    sampler = ServerSampler(fake_server.url)
    sampler.update_weights(tied_model)
    assert sampler.generate([[5]], SamplingParams(max_tokens=1), seed=0) and len(reloads) == 1
    fake_server.drops = 1
    assert sampler.generate([[5]], SamplingParams(max_tokens=1), seed=0) and len(reloads) == 2
    sampler.close()


def test_busy_server_is_asked_to_reload_again(spoiling, tied_model):
    sampler = ServerSampler(spoiling.url)
    spoiling.spoil("status_503", times=2, road="reload")
    sampler.update_weights(tied_model)
    sampler.close()
    assert spoiling.spoiled["status_503"] >= 2


def specs_of(recipe, teacher, table="teacher"):
    """Return how the student's sampler and a teacher's scorer are opened."""
    student = student_spec(recipe)
    return student, teacher_spec(teacher, student, "m", samples=False, table=table)


def test_tables_of_a_recipe_reach_the_server(fake_server, tiny_recipe):
    """``wait``, ``timeout`` and the table's name, of each of several teachers and the student."""
    raw = tiny_recipe(student={"model": "m"})
    del raw["teacher"]
    raw["teachers"] = {"big": {"model": "m", "url": fake_server.url, "wait": 3, "timeout": 5}}
    raw["rollout"] |= {"backend": "server", "url": fake_server.url, "wait": 4, "timeout": 6}
    recipe = parse_recipe(raw)
    student, teacher = specs_of(recipe, recipe.teachers["big"], "teachers.big")
    scorer, sampler = open_scorer(teacher), open_sampler(student)
    tables = [one._connection.served for one in (scorer, sampler)]
    assert [(table.wait, table.timeout) for table in tables] == [(3, 5), (4, 6)]
    assert (scorer.section, sampler.section) == ("[teachers.big]", "[rollout]")
    scorer.close()
    sampler.close()
    assert all(table.may_be_starting for table in tables)
    del raw["rollout"]["wait"], raw["teachers"]["big"]["wait"]
    unset = parse_recipe(raw)
    assert not unset.rollout.may_be_starting and not unset.teachers["big"].may_be_starting
    assert parse_recipe(tiny_recipe()).rollout.wait == 600
    assert parse_recipe(tiny_recipe()).teacher.timeout == 600


@pytest.mark.parametrize("resumed", [False, True])
def test_resumed_run_waits_for_servers_that_start(resumed, tiny_recipe, tmp_path, monkeypatch):
    """Run and servers were killed together, and start together."""
    specs = []

    def opener(kind):
        return lambda spec, status: specs.append(spec) or Mock(spec=kind, limits=Limits())

    monkeypatch.setattr(opening, "open_sampler", opener(ServerSampler))
    monkeypatch.setattr(opening, "open_scorer", opener(ServerScorer))
    tokenized = Mock(spec=TokenizedProblems, ends=Ends((1,), 1))
    with_ends = tokenized, []
    monkeypatch.setattr(opening, "with_ends", lambda *_: with_ends)
    monkeypatch.setattr(opening, "load_student", lambda *_, **__: (torch.nn.Linear(1, 1), Mock()))
    for kind in (opening.Teachers, opening.TokenizedProblems):
        monkeypatch.setattr(opening, kind.__name__, Mock(return_value=Mock(spec=kind)))
    raw = tiny_recipe(student={"model": "m"}, teacher={"model": "m", "url": "http://a:1"})
    raw["rollout"] |= {"backend": "server", "url": "http://b:1"}
    recipe = parse_recipe(raw)
    opening.open_engine(recipe, Mock(spec=ProblemSet), {}, str, tmp_path if resumed else None)
    assert [(spec.section, spec.resumes) for spec in specs] == [
        ("[rollout]", resumed),
        ("[teacher]", resumed),
    ]


@pytest.mark.parametrize(
    ("prompts", "n", "concurrency", "seconds"),
    [
        (1, 1, 32, 800),  # 10 tokens per second
        (100, 16, 32, 20_480),  # 32 * 16 * 8000 tokens, 200 per second
        (2, 16, 32, 1280),
        (100, 16, 1, 800),
    ],
)
def test_sampling_time_grows_with_what_is_asked_at_once(
    prompts, n, concurrency, seconds, fake_server, monkeypatch
):
    sampler = ServerSampler(fake_server.url, concurrency=concurrency)
    sampler._limits = replace(sampler.limits, max_model_len=10_000)
    allowed = []

    async def refuse(method, path, body, *, max_bytes, seconds):
        allowed.append(seconds)
        raise RequestRefused(400, "no")

    monkeypatch.setattr(sampler._connection, "request", refuse)
    with pytest.raises(ServerError):
        sampler.generate([[5]] * prompts, SamplingParams(n=n, max_tokens=8000), seed=0)
    sampler.close()
    assert set(allowed) == {seconds}


@pytest.fixture
def fake_server():
    """Return a server with programmed answers: path -> (status, body); ``drops`` hangs up."""
    answers = {"/v1/models": (200, {"data": [{"id": "m", "root": "m", "max_model_len": 64}]})}
    state = SimpleNamespace(answers=answers, drops=0, key=None, last=None)

    def answer(path, body):
        state.last = body
        if state.drops:
            state.drops -= 1
            raise ConnectionError
        status, said = answers.get(path, (404, {"detail": "Not Found"}))
        status, said = (one(body) if callable(one) else one for one in (status, said))
        return Reply.of(said, status=status)

    def allows(authorization):
        return state.key is None or authorization == f"Bearer {state.key}"

    with serving(answer, allows) as state.url:
        yield state


def completion(body):
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length"}
    choice["logprobs"] = {"token_logprobs": [-1.0], "top_logprobs": [{"w7": -1.0, "w8": -0.6}]}
    return {"choices": [choice]}


def test_raw_log_probs_are_refused_where_they_are_not_mu(fake_server):
    fake_server.answers["/v1/completions"] = (200, completion)
    sampler = ServerSampler(fake_server.url)
    assert sampler.generate([[5]], SamplingParams(max_tokens=1), seed=0)
    for params in (
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, top_p=0.9),
    ):
        with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
            sampler.generate([[5]], params, seed=0)
    sampler.close()


def test_missing_reload_endpoint_names_the_remedy(fake_server, tied_model):
    sampler = ServerSampler(fake_server.url)
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        sampler.update_weights(tied_model)
    sampler.close()


def test_api_key_comes_from_the_recipes_variable(fake_server, monkeypatch, tiny_recipe):
    monkeypatch.setenv("VLLM_API_KEY", "usual")
    monkeypatch.setenv("OTHER_KEY", "another")
    raw = tiny_recipe(student={"model": "m"}, teacher={"model": "m", "url": fake_server.url})
    raw["rollout"] |= {"backend": "server", "url": fake_server.url}

    def open_both():
        recipe = parse_recipe(raw)
        student, teacher = specs_of(recipe, recipe.teacher)
        open_scorer(teacher).close()
        open_sampler(student).close()

    fake_server.key = "usual"
    open_both()
    fake_server.key = "another"
    with pytest.raises(
        ServerError,
        match=r"asks for an API key and got another: .* api_key_var in \[teacher\] names",
    ):
        open_both()
    raw["teacher"]["api_key_var"] = raw["rollout"]["api_key_var"] = "OTHER_KEY"
    open_both()
    monkeypatch.delenv("OTHER_KEY")
    with pytest.raises(ServerError, match="got none"):
        open_both()


def test_server_errors_quote_the_server(fake_server):
    fake_server.answers["/v1/completions"] = (400, {"error": {"message": "no such thing"}})
    scorer = ServerScorer(fake_server.url)
    rollout = make_rollout([4], [5], [0.0], "length", 0)
    with pytest.raises(ServerError, match="answered 400 to /v1/completions: no such thing"):
        scorer.score([rollout], 2)
    with pytest.raises(ServerError, match="'full'; set k to a number"):
        scorer.score([rollout], "full")
    scorer.close()


def test_server_scorer_names_its_table(fake_server):
    """With several teachers, a message names the table of the one that it is about."""
    with pytest.raises(ServerError, match=r"set model in \[teachers.big\] to what it serves"):
        ServerScorer(fake_server.url, "other", section="[teachers.big]")


def test_server_scorer_reads_the_answer_by_rank(fake_server):
    """Scores start at the first trained token; ties are resolved as ``vllm_logprobs`` says."""

    def entry(**values):
        return {
            token[1:]: {"logprob": logprob, "rank": rank}
            for token, (logprob, rank) in values.items()
        }

    rows = [
        None,
        entry(_9=(-7.0, 2), _3=(-1.0, 1)),
        entry(_4=(-3.0, 9), _5=(-0.5, 1), _6=(-1.5, 2)),
        entry(_8=(-2.0, 4), _7=(-2.0, 2), _9=(-0.5, 1)),
    ]
    answer = {"choices": [{"index": 0, "prompt_logprobs": rows}]}
    fake_server.answers["/v1/completions"] = (200, answer)
    scorer = ServerScorer(fake_server.url)
    (score,) = scorer.score([make_rollout([1, 3], [4, 8], [0.0, 0.0], "length", 0)], 2)
    scorer.close()
    assert score.ref_logprobs.tolist() == [-3.0, -2.0]
    # Token 4 is outside its top 2; token 8 ties with 7 and is outside too.
    assert score.token_ids.tolist() == [[5, 6], [9, 7]]
    assert score.teacher_logprobs.tolist() == [[-0.5, -1.5], [-0.5, -2.0]]
