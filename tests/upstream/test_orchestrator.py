"""The orchestrator's side: requests, mixtures, and where samples get the support."""

import asyncio
import json
import math
import sys
import types

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("msgspec")

from prime_composer.backends.answers import InvalidAnswer  # noqa: E402
from prime_composer.backends.vllm_logprobs import answer_bytes  # noqa: E402
from prime_composer.teachers.client import TeacherClient  # noqa: E402
from prime_composer.teachers.responses import read_json_response  # noqa: E402
from prime_composer.upstream import wire  # noqa: E402
from prime_composer.upstream.autoload import HOOKS  # noqa: E402
from prime_composer.upstream.orchestrator import hooks, mixture  # noqa: E402
from prime_composer.upstream.orchestrator.client import (  # noqa: E402
    IN_FLIGHT,
    Requests,
    whole_sequence,
)
from prime_composer.upstream.settings import AdapterSettings  # noqa: E402
from prime_composer.upstream.silent_hook import SilentHook  # noqa: E402
from prime_composer.upstream.teachers import header_entries, read_entries  # noqa: E402
from prime_composer.upstream.versions.toml_shapes import HEADER  # noqa: E402
from tests.backends.test_vllm_logprobs import answer  # noqa: E402
from tests.stand_in import Reply, serving  # noqa: E402

TOP_2 = {"type": "topk_reverse_kl", "k": 2}
SAMPLED = {"type": "sampled_reverse_kl"}
TOKENS = [4, 7, 1]
ROWS = [
    None,
    {
        "7": {"logprob": -3.0, "rank": 5},
        "1": {"logprob": -0.5, "rank": 1},
        "2": {"logprob": -2.0, "rank": 2},
    },
    {"1": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.4, "rank": 1}},
]
OWN = [0.0, -9.0, -9.0]
"""Scores that prime-rl's own request returns; the adapter asks for itself."""


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    """Return a function that sets this process's settings; at first a loss with K = 2."""

    def set_to(loss, k=0, teachers_mixed=False, **more):
        settings = AdapterSettings(loss=loss, k=k, teachers_mixed=teachers_mixed, **more)
        for name, value in settings.to_env().items():
            monkeypatch.setenv(name, value)

    set_to(TOP_2, 2)
    return set_to


def own_and_top(row, k):
    """Return a row's first entry, the sampled token's, and the top K."""
    own = next(iter(row))
    return {i: entry for i, entry in row.items() if i == own or entry["rank"] <= k}


class Response:
    """A streamed response of httpx."""

    def __init__(self, content):
        self.content = content
        self.request = types.SimpleNamespace(headers={})

    async def aiter_bytes(self):
        yield self.content

    async def aclose(self):
        """Nothing is open."""


class Client:
    """Answers like the openai client that prime-rl made."""

    base_url = "http://user:secret@teacher:8001/v1/"
    max_retries = 2
    api_key = "EMPTY"

    def __init__(self, header=None, rows=ROWS, error=None):
        self.requests = []
        self.rows, self.error = rows, error
        self.default_headers = {} if header is None else {HEADER: header}

    async def post(self, url, cast_to, body, stream):
        assert stream
        if self.error is not None:
            raise self.error
        self.requests.append((url, body))
        k = body["sampling_params"]["prompt_logprobs"]
        return Response(answer([row and own_and_top(row, k) for row in self.rows]))


class Refusal(Exception):
    """An error of the openai client with an HTTP status."""

    def __init__(self, message, status_code):
        super().__init__(message)
        self.status_code = status_code


@pytest.fixture(autouse=True)
def servers_without_the_plugin(monkeypatch):
    """The scoring plugin has tests of its own, in test_orchestrator_plugin.py."""

    async def nothing(*_):
        """Find nothing, and sample nothing."""
        return "it does not"

    monkeypatch.setattr(TeacherClient, "discover", nothing)
    monkeypatch.setattr(TeacherClient, "own_logprobs", nothing)


def score(client, k=2, requests=None):
    return wire.sent(asyncio.run((requests or Requests()).score(client, "teacher", TOKENS, k)))


def sent():
    """Return what prime-rl gets for ``ROWS``."""
    return wire.sent(read_json_response(answer(ROWS), whole_sequence(TOKENS), 2, "The teacher"))


def test_request_is_prime_rls_own_with_k_and_without_text():
    client = Client()
    scores = score(client)
    url, body = client.requests[0]
    assert url == "http://user:secret@teacher:8001/inference/v1/generate"
    assert body["token_ids"] == TOKENS
    own_params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    assert body["sampling_params"] == own_params | {"prompt_logprobs": 2, "detokenize": False}
    assert scores.scores.token_ids.shape == (3, 2)


def test_request_whose_k_is_refused_says_how_to_start_the_server():
    error = Refusal("Requested prompt logprobs of 32, which is greater than max allowed: 20", 400)
    with pytest.raises(ValueError, match="--max-logprobs 32"):
        score(Client(error=error), k=32)


def test_requests_are_sent_a_few_at_a_time():
    """All rollouts of a batch may come at once. One that fails gives its place back."""
    flying, most = [], []

    class Failing(Client):
        async def post(self, url, cast_to, body, stream):
            flying.append(body)
            most.append(len(flying))
            await asyncio.sleep(0)
            flying.remove(body)
            raise OSError("Connection error.")

    async def batch():
        calls = (requests.score(Failing(), "t", [i], 2) for i in range(3 * IN_FLIGHT))
        return await asyncio.gather(*calls, return_exceptions=True)

    requests = Requests()
    for _ in range(2):  # each in an event loop of its own
        assert {type(one) for one in asyncio.run(batch())} == {OSError}
    assert max(most) == IN_FLIGHT and len(most) == 6 * IN_FLIGHT


def test_openais_own_client_retries_and_reads_at_most_the_bound(monkeypatch):
    """A refusal, a connection cut in the answer, a right answer; an answer without an end; and
    connections that are cut as often as the client tries.
    """
    openai = pytest.importorskip("openai")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01, raising=False)
    right, sent, asked = answer(ROWS), [0], []

    def endless():
        while True:
            sent[0] += 2**16
            yield b" " * 2**16

    def cut():
        return Reply([right[:50]], len(right))

    replies = [Reply.of(b"busy", status=503), cut(), Reply.of(right), Reply(endless(), 2**40)]
    replies += [cut() for _ in range(3)]

    def reply(path, body):
        asked.append(path)
        return replies[len(asked) - 1]

    async def ask():
        limit = answer_bytes(len(TOKENS), 2)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=2) as client:
            scores = await Requests().score(client, "teacher", TOKENS, 2)
            many = f"^The teacher at {url} answered more than {limit:,} bytes"
            with pytest.raises(InvalidAnswer, match=many):
                await Requests().score(client, "teacher", TOKENS, 2)
            with pytest.raises(Exception, match="(?i)incomplete|closed"):
                await Requests().score(client, "teacher", TOKENS, 2)
        return scores

    with serving(reply) as url:
        assert asyncio.run(ask()).ref_logprobs.tolist() == [-3.0, -1.5]
    assert 0 < sent[0] < 2**24  # what fits into the sockets' buffers
    assert len(asked) == len(replies)


class Sample:
    """prime-rl's TrainingSample."""

    def __init__(self, scores=None, advantages=None):
        self.token_ids, self.ref_logprobs = TOKENS, scores and list(scores)
        self.mask, self.advantages = [False, True, True], advantages
        self.rl_weights = self.ref_kl_weights = None
        self.branches = ()


def hooked(name, *hook, **members):
    """Return a module of prime-rl's orchestrator with these members, hooked."""
    module = types.ModuleType(f"prime_rl.{name}")
    vars(module).update(members)
    for each in hook:
        each(module)
    return module


def client_module(name="utils.client"):
    async def prefill_logprobs(openai, model, token_ids, top_k=None):
        return list(OWN), top_k

    return hooked(name, hooks.hook_client, prefill_logprobs=prefill_logprobs)


def routing_module(stamp=lambda sample, action_loss_type: None):
    given = []

    def assign_reference_logprobs(branch, values):
        given.append(values)

    return hooked(
        "orchestrator.algo.routing",
        hooks.hook_routing,
        hooks.hook_stamps,
        assign_reference_logprobs=assign_reference_logprobs,
        stamp_loss_routing=stamp,
        given=given,
    )


def prefill(client):
    return asyncio.run(client_module().prefill_logprobs(client, "teacher", TOKENS))


@pytest.mark.parametrize("mixed", [False, True])
def test_orchestrator_sends_nan_where_the_trainer_asks(switch, mixed):
    """It makes no request. 0.0, prime-rl's own filling, would be a probability of 1."""
    switch(TOP_2, 2, asked_by="trainer", teachers_mixed=mixed)
    client = Client()
    token = hooks.SCORING.set(hooks.Scoring(True))
    rows = [prefill(client)]
    hooks.SCORING.reset(token)
    rows.append(prefill(Client(header=json.dumps([]))))
    assert not client.requests
    for row in rows:
        assert len(row) == 3 and all(map(math.isnan, row[1:]))
        assert row[0] == wire.MARK if mixed else math.isnan(row[0])
    prefill(client)  # the policy itself, which has the hint
    assert len(client.requests) == 1


class Node:
    """A node of an episode's graph."""

    def __init__(self, tokens):
        self.token_ids, self.routed_experts = tokens, None


def test_routing_hook_attaches_the_support_to_every_node():
    """The first token has no score, and knows nothing."""
    module = routing_module()
    nodes = [Node(TOKENS[:1]), Node(TOKENS[1:])]
    module.assign_reference_logprobs(types.SimpleNamespace(nodes=nodes), sent())
    assert type(module.given[0]) is list and module.given[0][0] == 0.0
    assert [node.routed_experts.shape for node in nodes] == [(1, 2, 2), (2, 2, 2)]
    assert nodes[0].routed_experts[:, 0].tolist() == [[-(2**31)] * 2]
    assert nodes[1].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


def test_routing_hook_keeps_the_support_behind_a_hint():
    """prime-rl's self-distillation cuts the hint off the scores."""
    hint, nodes = TOKENS[:1], [Node(TOKENS[1:])]
    scores = sent()[len(hint) :]
    assert scores == [-3.0, -1.5]
    expected = pytest.approx([-0.5, -2.0, -0.4, -1.5])
    assert scores.scores.teacher_logprobs.ravel().tolist() == expected
    routing_module().assign_reference_logprobs(types.SimpleNamespace(nodes=nodes), scores)
    assert nodes[0].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


NAN = [math.nan] * 3
STAMPED = [
    # rewards, algorithm: rl weights, ref_kl weights, scores, an advantage of 0
    (False, "ref_kl", [0.0] * 3, [1.0] * 3, OWN, 0.0),
    (True, "ref_kl", None, None, OWN, 2.0**-100),
    (False, "rl", None, None, None, 0.0),
    (True, "rl", None, None, NAN, 2.0**-100),
]


@pytest.mark.parametrize("rewards,algorithm,rl,ref_kl,scores,nothing", STAMPED)
def test_stamps_send_tokens_to_their_losses(
    switch, rewards, algorithm, rl, ref_kl, scores, nothing
):
    """Where rewards are in the loss, a sample without a teacher is marked with NaN, and an
    advantage of 0 keeps its token in the rl loss.
    """
    switch(TOP_2, 2, reads_rewards=rewards)

    def stamp_loss_routing(sample, action_loss_type):
        if action_loss_type == "ref_kl":
            sample.rl_weights, sample.ref_kl_weights = [0.0] * 3, [1.0] * 3

    sample = Sample(OWN if algorithm == "ref_kl" else None, [0.0, 0.0, -0.5])
    routing_module(stamp_loss_routing).stamp_loss_routing(sample, algorithm)
    assert (sample.rl_weights, sample.ref_kl_weights) == (rl, ref_kl)
    assert repr(sample.ref_logprobs) == repr(scores)
    assert sample.advantages == [0.0, nothing, -0.5]


def algorithm_of(name, score):
    """Return a stand-in of a distilling algorithm, hooked; ``score`` gets an episode's rollouts."""

    class Algorithm:
        demo_key = "answer"

        async def score_episode(self, episode):
            await score(episode.traces)

        async def score_group(self, episodes):
            """Assign nothing."""

    Algorithm.__name__ = name
    module = f"orchestrator.algo.{name.removesuffix('Algorithm').lower()}"
    return getattr(hooked(module, hooks.hook_algorithm, **{name: Algorithm}), name)()


@pytest.fixture(autouse=True)
def trainable(monkeypatch):
    """prime-rl's choice of the rollouts that train: all of an episode."""
    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: [(e, t) for e in episodes for t in e.traces]
    monkeypatch.setitem(sys.modules, base.__name__, base)


async def own_request(client, model, token_ids):
    """prime-rl's own request, where it has moved it."""
    return list(OWN)


@pytest.mark.parametrize("loss", [TOP_2, SAMPLED])
def test_request_that_is_not_ours_ends_the_run(switch, loss):
    """In the orchestrator, at the first rollout: no trainer has got a batch."""
    switch(loss, loss.get("k", 0))

    def distil(ask, trains=True):
        async def score(traces):
            for _ in traces:
                await ask(Client(), "teacher", TOKENS)

        episode = types.SimpleNamespace(traces=[Sample()] if trains else [])
        asyncio.run(algorithm_of("OPDAlgorithm", score).score_episode(episode))

    with pytest.raises(SilentHook, match="OPDAlgorithm has scored .* not by prefill_logprobs"):
        distil(own_request)
    distil(own_request, trains=False)
    distil(client_module().prefill_logprobs)
    switch(None)
    distil(own_request)  # prime-rl's own losses


def test_sample_that_a_teacher_should_have_scored_ends_the_run(switch):
    """prime-rl would pack it with 0.0. One of an rl environment has no scores."""
    stamp = routing_module().stamp_loss_routing
    stamp(Sample(), "rl")
    with pytest.raises(SilentHook, match="no teacher's scores"):
        stamp(Sample(), "ref_kl")
    switch(None)
    stamp(Sample(), "ref_kl")  # prime-rl's own losses


@pytest.mark.parametrize("held", ["clients", "policy_pool"])
def test_advantages_are_grpos_by_whatever_it_holds(switch, monkeypatch, held):
    """GRPO gets what the distilling algorithm has: its clients, or its policy pool before."""
    switch(TOP_2, 2, reads_rewards=True)
    grpo = types.ModuleType("prime_rl.orchestrator.algo.grpo")
    source = f"""
class GRPOAlgoConfig: pass
class GRPOAlgorithm:
    def __init__(self, config, {held}): self.held = {held}
    async def score_group(self, episodes): given.append((self.held, episodes))
"""
    grpo.given = given = []
    exec(source, vars(grpo))
    monkeypatch.setitem(sys.modules, grpo.__name__, grpo)
    algorithm = algorithm_of("OPDAlgorithm", None)
    setattr(algorithm, held, "the policy")
    asyncio.run(algorithm.score_group(["an episode"]))
    assert given == [("the policy", ["an episode"])]


def test_request_is_ours_wherever_it_is_and_for_scores_alone():
    """A branch's own distillation asks with ``top_k``, which is left to prime-rl."""
    assert HOOKS["prime_rl.orchestrator.clients"] == HOOKS["prime_rl.utils.client"]
    client = Client()
    clients = client_module("orchestrator.clients")
    own = asyncio.run(clients.prefill_logprobs(client, "teacher", TOKENS, top_k=4))
    assert own == (OWN, 4) and not client.requests
    ours = asyncio.run(clients.prefill_logprobs(client, "teacher", TOKENS, top_k=None))
    assert ours == [0.0, -3.0, -1.5] and len(client.requests) == 1


def test_router_replay_in_the_rollouts_is_refused():
    node = Node(TOKENS)
    node.routed_experts = numpy.zeros((3, 12, 8), numpy.uint8)
    with pytest.raises(ValueError, match="enable_return_routed_experts"):
        branch = types.SimpleNamespace(nodes=[node])
        routing_module().assign_reference_logprobs(branch, sent())


@pytest.mark.parametrize("loss", [SAMPLED, None])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_without_a_support_asks_for_one_entry_and_sends_none(switch, servers, loss, mixed):
    """prime-rl asks for one too. The entry serves the check, and no sample carries it."""
    switch(loss)
    client, node = Client(json.dumps(OTHERS) if mixed else None), Node(TOKENS)
    scores = prefill(client)
    routing_module().assign_reference_logprobs(types.SimpleNamespace(nodes=[node]), scores)
    assert list(scores) == pytest.approx([0.0, -3.0, -1.5]) and node.routed_experts is None
    for asked in servers.values() if mixed else [client]:
        assert [body["sampling_params"]["prompt_logprobs"] for _, body in asked.requests] == [1]


@pytest.mark.parametrize("loss,k", [(TOP_2, 2), (SAMPLED, 0)])
@pytest.mark.parametrize("value", [0.3, math.nan])
def test_wrong_log_prob_is_refused_and_logged(switch, loss, k, value, capsys):
    """It ends the run, and is said in the log before."""
    switch(loss, k)
    wrong = [None, {**ROWS[1], "7": {"logprob": value, "rank": 5}}, ROWS[2]]
    with pytest.raises(
        InvalidAnswer, match=r"^The teacher at http://\*\*\*@teacher:8001 "
    ) as caught:
        prefill(Client(rows=wrong))
    assert f"no scores, and the run ends: {caught.value}" in capsys.readouterr().err


@pytest.mark.parametrize("loss,k", [(TOP_2, 2), (SAMPLED, 0)])
@pytest.mark.parametrize("value", [-math.inf, -9999.0])
def test_masked_token_passes_to_the_trainer(switch, servers, value, loss, k):
    """It may be of the prompt. The trainer refuses one that trains (``validity.check_own``)."""
    switch(loss, k)
    rows = [None, {**ROWS[1], "7": {"logprob": value, "rank": 5}}, ROWS[2]]
    assert prefill(Client(rows=rows))[1:] == [value, -1.5]
    for server in servers.values():
        server.rows = rows
    assert prefill(Client(json.dumps(OTHERS)))[1:] == [pytest.approx(value), pytest.approx(-1.5)]


class Teacher(Client):
    """Scores any sequence; a test makes it another model, or an unsteady one."""

    def __init__(self, k, header=None):
        super().__init__(header)
        self.k, self.shift, self.best, self.unsteady, self.retries = k, 0.0, 3, 0, 0

    async def post(self, url, cast_to, body, stream):
        tokens = body["token_ids"]
        self.requests.append((url, body))
        rows = [None]
        for position, token in enumerate(tokens[1:]):
            far = -3.0 if position < self.unsteady else 0.0
            row = {str(token): {"logprob": -5.0 + self.shift + far, "rank": 9}}
            row[str(self.best)] = {"logprob": -0.5, "rank": 1}
            if self.k == 2:
                row["4"] = {"logprob": -2.0, "rank": 2}
            rows.append(row)
        response = Response(answer(rows))
        response.request.headers = {"x-stainless-retry-count": str(self.retries)}
        return response


LONG = list(range(100, 200))


@pytest.fixture
def often(monkeypatch):
    """Ask known questions every 8 requests."""
    monkeypatch.setattr("prime_composer.teachers.watch.ASKED_EVERY", 8)


async def ask(requests, client, times=1):
    k = client.k if client.k == 2 else 0
    for _ in range(times):
        await requests.score(client, "teacher", LONG, k, frozen=True)


@pytest.mark.parametrize("k,change", [(1, {"shift": -0.7}), (2, {"shift": 0.7}), (2, {"best": 5})])
def test_teacher_that_is_another_model_is_refused(often, k, change):
    """At the next question with a known answer; without a support by its own tokens alone."""
    client, requests = Teacher(k), Requests()
    asyncio.run(ask(requests, client, 8))
    vars(client).update(change)
    client.requests = []
    message = r"^The teacher at http://\*\*\*@teacher:8001 scores .* other numbers .* at 100% of"
    with pytest.raises(InvalidAnswer, match=message):
        asyncio.run(ask(requests, client))
    assert [len(body["token_ids"]) for _, body in client.requests[-2:]] == [100, 64]
    assert client.requests[-1][1]["token_ids"] == LONG[:64]


def test_right_teacher_in_half_precision_passes(often):
    """Also one whose experts differ at a few positions."""
    client, requests = Teacher(2), Requests()
    asyncio.run(ask(requests, client))
    client.shift, client.unsteady = 0.45, 6
    asyncio.run(ask(requests, client, 24))
    assert len(client.requests) == 1 + 24 + 3


@pytest.mark.parametrize("name,frozen", [("OPDAlgorithm", True), ("OPSDAlgorithm", False)])
def test_teacher_of_opd_is_frozen_and_of_opsd_is_not(monkeypatch, name, frozen):
    """A server that was away is asked a known question, where its weights never change."""
    monkeypatch.setattr(hooks, "REQUESTS", Requests())
    client, clients = Teacher(2), client_module()

    async def score(traces):
        await asyncio.gather(clients.prefill_logprobs(client, "teacher", LONG))

    algorithm = algorithm_of(name, score)
    nothing = types.SimpleNamespace(traces=[])
    asyncio.run(algorithm.score_episode(nothing))
    assert len(client.requests) == 1
    client.retries = 1
    asyncio.run(algorithm.score_episode(nothing))
    assert len(client.requests) == (3 if frozen else 2)
    client.retries, client.shift = 2, 1.0
    if frozen:
        with pytest.raises(InvalidAnswer, match="It serves another model now"):
            asyncio.run(algorithm.score_episode(nothing))


def test_mixed_teachers_are_asked_again_each(switch, monkeypatch, servers):
    monkeypatch.setattr(hooks, "REQUESTS", Requests())
    for url in servers:
        servers[url] = Teacher(2)
        servers[url].base_url = url
    clients, header = client_module(), Client(json.dumps(OTHERS))
    asyncio.run(clients.prefill_logprobs(header, "teacher", LONG))
    assert [len(server.requests) for server in servers.values()] == [1, 1]
    vars(servers["http://b:8003/v1"]).update(shift=1.0, retries=1)
    with pytest.raises(InvalidAnswer, match="^The teacher at http://b:8003 scores"):
        asyncio.run(clients.prefill_logprobs(header, "teacher", LONG))


def test_process_started_by_hand_has_to_name_the_loss(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    with pytest.raises(ValueError, match="no loss is named in this process"):
        prefill(Client())


HEADERS = [
    "no JSON",
    "[" * 100_000,
    "[]",
    '[{"url": "http://u:hidden@a", "model": "m"}]',
    '[{"url": "http://u:hidden@a", "model": "m", "weight": 0}]',
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_header_of_another_form_is_refused_and_not_shown(header):
    """Its URLs may have passwords, and the message is logged."""
    with pytest.raises(ValueError, match="must be a JSON list of") as caught:
        header_entries(header)
    assert "hidden" not in str(caught.value)


OTHERS = [
    {"url": "http://a:8002/v1", "model": "a", "weight": 1},
    {"url": "http://b:8003/v1", "model": "b", "weight": 3},
]


@pytest.fixture
def servers(monkeypatch):
    """Return the clients of the openai package by URL; a test may put its own in."""
    clients = {entry["url"]: Client() for entry in OTHERS}
    module = types.ModuleType("openai")
    module.AsyncOpenAI = lambda base_url, **settings: clients[base_url]
    monkeypatch.setitem(sys.modules, "openai", module)
    mixture.client_of.cache_clear()
    yield clients
    mixture.client_of.cache_clear()


@pytest.mark.parametrize("mixed,first", [(True, wire.MARK), (False, 0.0)])
def test_mark_is_on_the_samples_that_have_scores(switch, mixed, first):
    """The trainer sees by it that the orchestrator is hooked."""
    switch(SAMPLED, 0, mixed)

    def trace_to_samples(trace):
        return [Sample(OWN), Sample()]

    module = hooked(
        "orchestrator.trajectories", hooks.hook_samples, trace_to_samples=trace_to_samples
    )
    scored, rl = module.trace_to_samples(types.SimpleNamespace())
    assert scored.ref_logprobs == [first, *OWN[1:]] and rl.ref_logprobs is None


WRONG = [None, {**ROWS[1], "1": {"logprob": 0.3, "rank": 1}}, ROWS[2]]
OF_A_MIXTURE = {
    "a wrong answer": ({"rows": WRONG}, "^The teacher at http://b:8003 gave .* id 1 is 0.3"),
    "no key": ({"error": Refusal("Unauthorized", 401)},
               "teacher b at .* did not score: Unauthorized It wants .* variable VLLM_API_KEY"),
    "a password in the error": ({"error": OSError("no route to http://u:hidden@b:8003")},
                                r"no route to http://\*\*\*@b:8003"),
}  # fmt: skip
"""What the second teacher of a mixture does, and what the error says."""


@pytest.mark.parametrize("case", OF_A_MIXTURE)
def test_teacher_of_a_mixture_that_fails_is_named(servers, case, capsys):
    how, words = OF_A_MIXTURE[case]
    failing = servers["http://b:8003/v1"] = Client(**how)
    failing.base_url = "http://b:8003/v1"
    with pytest.raises(ValueError, match=words) as caught:
        prefill(Client(json.dumps(OTHERS)))
    with pytest.raises(type(how.get("error", InvalidAnswer()))):
        prefill(failing)
    assert "hidden" not in str(caught.value) + capsys.readouterr().err


def test_password_and_api_key_of_prime_rls_client_are_refused():
    client = Client()
    client.api_key = "key"
    with pytest.raises(ValueError, match=r"at http://\*\*\*@teacher:8001 has a user or password"):
        prefill(client)
    assert not client.requests


def test_teachers_have_their_own_api_keys_and_one_client_each(monkeypatch, servers):
    made = []

    def client(base_url, api_key, max_retries):
        made.append((base_url, api_key))

    monkeypatch.setattr(sys.modules["openai"], "AsyncOpenAI", client)
    monkeypatch.setenv("VLLM_API_KEY", "usual")
    monkeypatch.setenv("MATH_KEY", "secret")
    header = json.dumps([OTHERS[0], {**OTHERS[0], "api_key_var": "MATH_KEY"}])
    teachers = read_entries(header_entries(header))
    assert [teacher.weight for teacher in teachers] == [0.5, 0.5]
    for teacher in teachers * 2:
        mixture.client_of(teacher.url, teacher.api_key_var)
    assert made == [(OTHERS[0]["url"], "usual"), (OTHERS[0]["url"], "secret")]
