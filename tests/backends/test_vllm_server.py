"""The client against a real vLLM server process, and against servers that misbehave.

The real server takes 25 s to start, once for the module.
"""

import contextlib
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.http import RequestRefused, ServerError
from prime_composer.backends.protocols import SamplingParams
from prime_composer.local.opening import teacher_spec
from prime_composer.local.weight_sync import check_weight_sync
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


def test_url_of_no_server_names_its_key():
    with pytest.raises(ServerError, match=r"^url in \[teacher\]: ") as error:
        ServerScorer("ftp://me:secret@h:21")
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


@pytest.mark.parametrize(
    ("versions", "when"),
    [
        (True, "between"),
        (True, "/v1/completions sampling"),
        (True, "/collective_rpc reload"),
        (True, "/weight_info None"),
        (False, "between"),
        (False, "/v1/completions sampling"),
        (False, "/metrics None"),
    ],
)
def test_restarted_student_gets_its_weights_again(
    versions, when, restarting, tied_model, monkeypatch
):
    """Killed between two steps, while it samples, or in a weight update.

    As a vLLM whose weights have versions, and as an older one, whose start is known.
    """
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
    outages = sampler._connection.outages
    if when == "between":  # and no connection is cut, as behind a proxy
        restarting.swap(restarting.checkpoint)
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
    if when == "between":
        assert sampler._connection.outages == outages


def test_seeds_of_a_server_are_those_of_step_and_prompt(restarting):
    """A seed repeats its rollouts. Another one has others, and so have equal prompts."""
    with contextlib.closing(ServerSampler(restarting.url)) as sampler:
        params = SamplingParams(n=4, max_tokens=6)
        first, other, again = (ids_of(sampler.generate([[5, 6]] * 2, params, s)) for s in (3, 4, 3))
    assert first == again
    assert first[:4] != first[4:] and first[:4] != other[:4]


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


@pytest.mark.parametrize("mode", [*modes.CARDS, *modes.BODIES])
def test_malformed_list_of_models_is_one_sentence(mode, restarting):
    restarting.spoil(mode, times=1, road="models")
    with pytest.raises(ServerError, match="something else than a list of models") as error:
        ServerScorer(restarting.url)
    message = str(error.value)
    assert restarting.url in message and len(message) < 600
    assert message.isascii() and message.isprintable()


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


@pytest.mark.parametrize(("prompts", "n", "seconds"), [(1, 1, 800), (100, 16, 20_480)])
def test_sampling_time_grows_with_what_is_asked_at_once(
    prompts, n, seconds, fake_server, monkeypatch
):
    """8,000 tokens at 10 per second, or of 32 requests at once, 16 times each, at 200."""
    sampler = ServerSampler(fake_server.url, concurrency=32)
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
    """Return a server with programmed answers: path -> (status, body)."""
    answers = {"/v1/models": (200, {"data": [{"id": "m", "root": "m", "max_model_len": 64}]})}
    state = SimpleNamespace(answers=answers, key=None)

    def answer(path, body):
        status, said = answers.get(path, (404, {"detail": "Not Found"}))
        return Reply.of(said, status=status)

    def allows(authorization):
        return state.key is None or authorization == f"Bearer {state.key}"

    with serving(answer, allows) as state.url:
        yield state


CHOICE = {
    "index": 0,
    "token_ids": [7],
    "finish_reason": "length",
    "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"w7": -1.0, "w8": -0.6}]},
}


def test_raw_log_probs_are_refused_where_they_are_not_mu(fake_server):
    fake_server.answers["/v1/completions"] = (200, {"choices": [CHOICE]})
    sampler = ServerSampler(fake_server.url)
    assert sampler.generate([[5]], SamplingParams(max_tokens=1), seed=0)
    for params in (
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, top_p=0.9),
    ):
        with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
            sampler.generate([[5]], params, seed=0)
    sampler.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        ((500, {"error": {"message": "No such file"}}), "answered 500 to .*: No such file"),
    ],
)
def test_reload_that_cannot_succeed_is_not_waited_for(answer, words, fake_server, tied_model):
    """vLLM answers 500 where it cannot read the directory."""
    fake_server.answers["/collective_rpc"] = answer
    sampler = ServerSampler(fake_server.url)
    with pytest.raises(ServerError, match=words):
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
