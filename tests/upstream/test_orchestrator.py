"""The orchestrator's side: requests, mixtures, and where samples get the support."""

import asyncio
import json
import math
import sys
import threading
import types

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("msgspec")

from prime_composer.backends.answers import InvalidAnswer  # noqa: E402
from prime_composer.backends.vllm_logprobs import answer_bytes  # noqa: E402
from prime_composer.teachers.client import TeacherClient  # noqa: E402
from prime_composer.teachers.responses import read_json  # noqa: E402
from prime_composer.upstream import wire  # noqa: E402
from prime_composer.upstream.autoload import HOOKS  # noqa: E402
from prime_composer.upstream.orchestrator import hooks, teachers  # noqa: E402
from prime_composer.upstream.orchestrator.client import (  # noqa: E402
    IN_FLIGHT,
    Requests,
    whole_sequence,
)
from prime_composer.upstream.settings import AdapterSettings  # noqa: E402
from prime_composer.upstream.tally import SilentHook, Tally  # noqa: E402
from tests.backends.test_vllm_logprobs import ROWS, TOKENS, answer  # noqa: E402
from tests.stand_in import Reply, serving  # noqa: E402

TOP_2 = {"type": "topk_reverse_kl", "k": 2}
SAMPLED = {"type": "sampled_reverse_kl"}
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

    def __init__(self, *chunks):
        self.chunks, self.closed = chunks, False
        self.request = types.SimpleNamespace(headers={})

    async def aiter_bytes(self):
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def aclose(self):
        self.closed = True


class Client:
    """Answers like the openai client that prime-rl made."""

    base_url = "http://user:secret@teacher:8001/v1/"
    max_retries = 2
    api_key = "EMPTY"

    def __init__(self, header=None, rows=ROWS):
        self.requests = []
        self.rows = rows
        self.default_headers = {} if header is None else {teachers.HEADER: header}

    async def post(self, url, cast_to, body, stream):
        assert stream
        self.requests.append((url, body))
        k = body["sampling_params"]["prompt_logprobs"]
        return Response(answer([row and own_and_top(row, k) for row in self.rows]))


class Failing(Client):
    """Raises an error instead of answering."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    async def post(self, url, cast_to, body, stream):
        raise self.error


class Refusal(Exception):
    """An error of the openai client with an HTTP status."""

    def __init__(self, message, status_code):
        super().__init__(message)
        self.status_code = status_code


@pytest.fixture(autouse=True)
def samples_of_another_process(monkeypatch):
    """Nothing has been made in this process."""
    monkeypatch.setattr(hooks, "MADE", Tally())


@pytest.fixture(autouse=True)
def servers_without_the_plugin(monkeypatch):
    """The scoring plugin has tests of its own, in test_orchestrator_plugin.py."""

    async def discover(*_):
        """Find nothing."""

    monkeypatch.setattr(TeacherClient, "discover", discover)


def score(client, k=2, requests=None):
    return wire.sent(asyncio.run((requests or Requests()).score(client, "teacher", TOKENS, k)))


def sent():
    """Return what prime-rl gets for ``ROWS``."""
    return wire.sent(read_json(answer(ROWS), whole_sequence(TOKENS), 2, "The teacher"))


def test_scores_slice_keeps_its_part_of_the_support():
    tail = sent()[1:]
    assert tail == [-3.0, -1.5] and tail.scores.token_ids.tolist() == [[1, 2], [9, 1]]
    assert tail.scores.teacher_logprobs.ravel().tolist() == pytest.approx([-0.5, -2.0, -0.4, -1.5])


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
        score(Failing(error), k=32)


def test_requests_are_limited_and_parsed_one_by_one(monkeypatch):
    """All rollouts of a batch may come at once."""
    flying, parsing, most = set(), set(), [0, 0]
    lock = threading.Lock()

    def note():
        with lock:
            most[0], most[1] = max(most[0], len(flying)), max(most[1], len(parsing))

    class Counting(Client):
        async def post(self, url, cast_to, body, stream):
            flying.add(body["token_ids"][0])
            await asyncio.sleep(0)
            note()
            return Response(b"")

    def slow_parse(content, sequence, k, origin):
        token_ids = sequence.token_ids
        parsing.add(token_ids[0])
        note()
        threading.Event().wait(1e-4)  # others could come in between
        parsing.remove(token_ids[0])
        flying.remove(token_ids[0])
        return token_ids[0]

    monkeypatch.setattr("prime_composer.teachers.client.read_json", slow_parse)
    requests, count = Requests(), 3 * IN_FLIGHT

    async def batch():
        calls = (requests.score(Counting(), "teacher", [i], 2) for i in range(count))
        return await asyncio.gather(*calls)

    for _ in range(2):  # each in an event loop of its own
        assert asyncio.run(batch()) == list(range(count))
    assert most == [IN_FLIGHT, 1]


def test_request_that_fails_gives_its_place_back():
    requests = Requests(in_flight=1)

    async def after_failures():
        for _ in range(2):
            with pytest.raises(OSError):
                failing = Failing(OSError("Connection error."))
                await requests.score(failing, "teacher", TOKENS, 2)
        return await asyncio.wait_for(requests.score(Client(), "teacher", TOKENS, 2), 10)

    assert asyncio.run(after_failures()).ref_logprobs.tolist() == [-3.0, -1.5]


def test_openais_own_client_retries_and_reads_at_most_the_bound(monkeypatch):
    """A refusal, a connection cut in the answer, a right answer; then an answer without an end."""
    openai = pytest.importorskip("openai")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01, raising=False)
    right, sent = answer(ROWS), [0]

    def endless():
        while True:
            sent[0] += 2**16
            yield b" " * 2**16

    replies = iter(
        [
            Reply.of(b"busy", status=503),
            Reply([right[:50]], len(right)),
            Reply.of(right),
            Reply(endless(), 2**40),
        ]
    )

    async def ask_twice():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
            scores = await Requests().score(client, "teacher", TOKENS, 2)
            with pytest.raises(InvalidAnswer, match=f"^The teacher at {url} answered more than"):
                await Requests().score(client, "teacher", TOKENS, 2)
        return scores

    with serving(lambda path, body: next(replies)) as url:
        assert asyncio.run(ask_twice()).ref_logprobs.tolist() == [-3.0, -1.5]
    assert 0 < sent[0] < 2**24  # what fits into the sockets' buffers


class Sample:
    """prime-rl's TrainingSample."""

    def __init__(self):
        self.token_ids, self.ref_logprobs, self.routed_experts = TOKENS, None, None
        self.mask, self.advantages = [False, True, True], None


def client_module(name="prime_rl.utils.client"):
    module = types.ModuleType(name)

    async def prefill_logprobs(openai, model, token_ids):
        return list(OWN)

    module.prefill_logprobs = prefill_logprobs
    hooks.hook_client(module)
    return module


def routing_module():
    module = types.ModuleType("prime_rl.orchestrator.algo.routing")
    module.given = []

    def assign_reference_logprobs(branch, values):
        module.given.append(values)

    module.assign_reference_logprobs = assign_reference_logprobs
    hooks.hook_routing(module)
    return module


def prefill(client):
    return asyncio.run(client_module().prefill_logprobs(client, "teacher", TOKENS))


@pytest.mark.parametrize(
    "hook",
    [
        hooks.hook_client,
        hooks.hook_routing,
        hooks.hook_stamps,
        hooks.hook_samples,
    ],
)
def test_hook_of_another_version_leaves_a_module_alone(hook):
    """Another module may have what a hook looks for."""
    module = types.ModuleType("prime_rl.some.module")
    before = dict(vars(module))
    hook(module)
    assert vars(module) == before


@pytest.mark.parametrize("mixed", [False, True])
def test_orchestrator_sends_nan_where_the_trainer_asks(switch, mixed):
    """It makes no request. 0.0, prime-rl's own filling, would be a probability of 1."""
    switch(TOP_2, 2, asked_by="trainer", teachers_mixed=mixed)
    client = Client()
    token = hooks.SCORING.set(hooks.Scoring(True, Tally()))
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
    module = routing_module()
    nodes = [Node(TOKENS[:1]), Node(TOKENS[1:])]
    branch = types.SimpleNamespace(nodes=nodes, token_ids=TOKENS)
    module.assign_reference_logprobs(branch, sent())
    assert type(module.given[0]) is list
    assert [node.routed_experts.shape for node in nodes] == [(1, 2, 2), (2, 2, 2)]
    assert nodes[1].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


def test_routing_hook_keeps_the_support_behind_a_hint():
    """prime-rl's self-distillation cuts the hint off the scores."""
    hint, nodes = TOKENS[:1], [Node(TOKENS[1:])]
    scores = sent()[len(hint) :]
    branch = types.SimpleNamespace(nodes=nodes, token_ids=TOKENS[1:])
    routing_module().assign_reference_logprobs(branch, scores)
    assert nodes[0].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


@pytest.mark.parametrize(
    "rewards,algorithm,rl,ref_kl,scored",
    [
        (None, "ref_kl", [0.0] * 3, [1.0] * 3, True),
        ("in_loss", "ref_kl", None, None, True),
        ("beside", "ref_kl", None, [1.0] * 3, True),
        (None, "rl", None, None, False),
        ("in_loss", "rl", None, None, False),
        ("beside", "rl", None, None, False),
    ],
)
def test_stamps_send_scored_tokens_to_the_rl_loss(switch, rewards, algorithm, rl, ref_kl, scored):
    """Where rewards are in the loss, a sample without a teacher is marked with NaN."""
    switch(TOP_2, 2, rewards=rewards)
    module = types.ModuleType("prime_rl.orchestrator.algo.routing")

    def stamp_loss_routing(sample, action_loss_type):
        if action_loss_type == "ref_kl":
            sample.rl_weights, sample.ref_kl_weights = [0.0] * 3, [1.0] * 3

    module.stamp_loss_routing = stamp_loss_routing
    hooks.hook_stamps(module)
    sample = Sample()
    sample.rl_weights = sample.ref_kl_weights = None
    sample.ref_logprobs = list(OWN) if scored else None
    hooks.MADE.called(hooks.SAMPLES)
    module.stamp_loss_routing(sample, algorithm)
    assert (sample.rl_weights, sample.ref_kl_weights) == (rl, ref_kl)
    if scored:
        assert sample.ref_logprobs == OWN
    elif rewards == "in_loss":
        assert len(sample.ref_logprobs) == 3 and all(map(math.isnan, sample.ref_logprobs))
    else:
        assert sample.ref_logprobs is None


def algorithm_of(name, score):
    """Return a stand-in of a distilling algorithm, hooked.

    Args:
        name: of the class.
        score: gets the rollouts of an episode.
    """

    class Algorithm:
        async def score_episode(self, episode):
            await score(episode.traces)

        async def score_group(self, episodes):
            pass

    module = f"prime_rl.orchestrator.algo.{name.removesuffix('Algorithm').lower()}"
    algo = types.ModuleType(module)
    Algorithm.__name__ = name
    setattr(algo, name, Algorithm)
    hooks.hook_algorithm(algo)
    algorithm = getattr(algo, name)()
    algorithm.demo_key = "answer"
    return algorithm


def test_orchestrator_with_more_parameters_gets_them(monkeypatch, switch):
    """What a later prime-rl adds to a function that is wrapped reaches it."""
    switch(SAMPLED, 0)
    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: []
    monkeypatch.setitem(sys.modules, base.__name__, base)
    given = []

    class OPDAlgorithm:
        async def score_episode(self, episode, more=None):
            given.append(more)

        async def score_group(self, episodes, more=None):
            given.append(more)

    opd = types.ModuleType("prime_rl.orchestrator.algo.opd")
    routing = types.ModuleType("prime_rl.orchestrator.algo.routing")
    opd.OPDAlgorithm = OPDAlgorithm
    routing.assign_reference_logprobs = lambda branch, values, more=None: given.append(more)
    routing.stamp_loss_routing = lambda sample, action_loss_type, more=None: given.append(more)
    hooks.hook_algorithm(opd)
    hooks.hook_routing(routing)
    hooks.hook_stamps(routing)
    algorithm = OPDAlgorithm()
    asyncio.run(algorithm.score_episode(types.SimpleNamespace(traces=[]), more=1))
    asyncio.run(algorithm.score_group([], more=2))
    routing.assign_reference_logprobs(None, [], more=3)
    routing.stamp_loss_routing(Sample(), "rl", more=4)
    assert given == [1, 2, 3, 4]


@pytest.fixture
def distil(monkeypatch):
    """Return a function that scores one rollout with a stand-in of OPD, by another's request.

    It takes the request, what keeps the answer, and whether the rollout has something to train.
    """
    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: [(e, t) for e in episodes for t in e.traces]
    monkeypatch.setitem(sys.modules, base.__name__, base)

    def run(ask, keep, trains=True):
        async def score(samples):
            for sample in samples:
                keep(sample, await ask(Client(), "teacher", TOKENS))

        parts = [Sample()] if trains else []
        episode = types.SimpleNamespace(traces=parts)
        asyncio.run(algorithm_of("OPDAlgorithm", score).score_episode(episode))
        return parts

    return run


async def own_request(client, model, token_ids):
    """prime-rl's own request, where it has moved it."""
    return list(OWN)


def by_routing(sample, scores):
    """Keep scores as prime-rl's algorithms do, by the function that is hooked."""
    branch = types.SimpleNamespace(nodes=[Node(TOKENS)], token_ids=TOKENS)
    routing_module().assign_reference_logprobs(branch, scores)
    sample.ref_logprobs = scores


def by_another(sample, scores):
    sample.other = list(scores)


@pytest.mark.parametrize("loss", [TOP_2, SAMPLED])
def test_request_that_is_not_ours_ends_the_run(switch, distil, loss):
    """In the orchestrator, at the first rollout: no trainer has got a batch."""
    switch(loss, loss.get("k", 0))
    with pytest.raises(SilentHook, match="OPDAlgorithm has scored .* not by prefill_logprobs"):
        distil(own_request, by_another)
    assert distil(own_request, by_another, trains=False) == []
    switch(None)
    distil(own_request, by_another)  # prime-rl's own losses


def test_support_that_is_not_kept_ends_the_run(switch, distil):
    """The request was ours, and prime-rl keeps the scores without the support."""
    ours = client_module().prefill_logprobs
    distil(ours, by_routing)
    with pytest.raises(SilentHook, match="kept the scores without the teacher's top-2"):
        distil(ours, by_another)
    switch(TOP_2, 2, asked_by="trainer")
    distil(ours, by_another)  # the trainer has the support of its own question
    switch(SAMPLED)
    distil(ours, by_another)


def samples_module():
    module = types.ModuleType("prime_rl.orchestrator.trajectories")

    def trace_to_samples(trace, *, env_name="", mm_token_type_ids_mapping=None):
        sample = Sample()
        sample.ref_logprobs = list(OWN)
        return [sample]

    module.trace_to_samples = trace_to_samples
    hooks.hook_samples(module)
    return module


def test_samples_hook_takes_what_later_versions_have(switch):
    """trace_to_samples has lost the mapping of multimodal tokens, and may get something new."""
    switch(TOP_2, 2, teachers_mixed=True)
    module = types.ModuleType("prime_rl.orchestrator.trajectories")
    seen = []

    def trace_to_samples(trace, *, env_name="", more=None):
        seen.append((env_name, more))
        sample = Sample()
        sample.ref_logprobs = list(OWN)
        return [sample]

    module.trace_to_samples = trace_to_samples
    hooks.hook_samples(module)
    trace = types.SimpleNamespace()
    for words in ([trace], []):
        named = {} if words else {"trace": trace}
        (sample,) = module.trace_to_samples(*words, **named, env_name="sums", more=2)
        assert sample.ref_logprobs[0] == wire.MARK
    assert seen == [("sums", 2)] * 2


def test_samples_made_elsewhere_end_the_run_at_their_stamp(switch):
    """They would lack the mark of mixed teachers, and have samples without a hint."""
    module = types.ModuleType("prime_rl.orchestrator.algo.routing")
    module.stamp_loss_routing = lambda sample, action_loss_type: None
    hooks.hook_stamps(module)
    module.stamp_loss_routing(Sample(), "rl")
    with pytest.raises(SilentHook, match="not made by trace_to_samples"):
        module.stamp_loss_routing(Sample(), "ref_kl")
    samples_module().trace_to_samples(types.SimpleNamespace())
    module.stamp_loss_routing(Sample(), "ref_kl")


@pytest.mark.parametrize("rewards", ["beside", "in_loss"])
def test_samples_never_stamped_end_the_run_at_the_next_group(switch, rewards):
    """Their tokens would lack their rewards."""
    switch(TOP_2, 2, rewards=rewards)
    samples_module().trace_to_samples(types.SimpleNamespace())

    algorithm = algorithm_of("OPDAlgorithm", None)
    with pytest.raises(SilentHook, match="stamp_loss_routing did not run on samples"):
        asyncio.run(algorithm.score_group([]))


@pytest.mark.parametrize("rewards", ["in_loss", "beside", None])
def test_stamps_keep_tokens_whose_advantage_is_zero(switch, rewards):
    """prime-rl takes them out of the rl loss, where the loss of rewards reads a teacher too."""
    switch(TOP_2, 2, rewards=rewards)
    module = types.ModuleType("prime_rl.orchestrator.algo.routing")
    module.stamp_loss_routing = lambda sample, action_loss_type: None
    hooks.hook_stamps(module)
    sample = Sample()
    sample.advantages, sample.rl_weights = [0.0, 0.0, -0.5], None
    module.stamp_loss_routing(sample, "rl")
    mark = 2.0**-100 if rewards == "in_loss" else 0.0
    assert sample.advantages == [0.0, mark, -0.5]


@pytest.mark.parametrize("held", ["clients", "policy_pool"])
def test_advantages_are_grpos_by_whatever_it_holds(switch, monkeypatch, held):
    """GRPO gets what the distilling algorithm has: its clients, or its policy pool before."""
    switch(TOP_2, 2, rewards="beside")
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


def test_request_moved_to_the_orchestrators_clients_is_ours():
    """The module that has it is hooked, whichever it is."""
    assert HOOKS["prime_rl.orchestrator.clients"] == HOOKS["prime_rl.utils.client"]
    client = Client()
    clients = client_module("prime_rl.orchestrator.clients")
    assert asyncio.run(clients.prefill_logprobs(client, "teacher", TOKENS)) == [0.0, -3.0, -1.5]
    assert len(client.requests) == 1


def test_request_for_something_else_is_left_to_prime_rl():
    """A branch's own distillation asks with ``top_k``; without one the request is ours."""
    module = types.ModuleType("prime_rl.utils.client")

    async def prefill_logprobs(openai, model, token_ids, top_k=None):
        return "its own", top_k

    module.prefill_logprobs = prefill_logprobs
    hooks.hook_client(module)
    client = Client()
    own = asyncio.run(module.prefill_logprobs(client, "teacher", TOKENS, top_k=4))
    assert own == ("its own", 4) and not client.requests
    ours = asyncio.run(module.prefill_logprobs(client, "teacher", TOKENS, top_k=None))
    assert ours == [0.0, -3.0, -1.5]


def test_router_replay_in_the_rollouts_is_refused():
    node = Node(TOKENS)
    node.routed_experts = numpy.zeros((3, 12, 8), numpy.uint8)
    with pytest.raises(ValueError, match="enable_return_routed_experts"):
        branch = types.SimpleNamespace(nodes=[node])
        routing_module().assign_reference_logprobs(branch, sent())


@pytest.mark.parametrize("loss", [SAMPLED, None])
def test_loss_without_a_support_asks_for_one_entry_and_sends_none(switch, loss):
    """prime-rl asks for one too. The entry serves the check, and no sample carries it."""
    switch(loss)
    client, node = Client(), Node(TOKENS)
    scores = prefill(client)
    routing_module().assign_reference_logprobs(types.SimpleNamespace(nodes=[node]), scores)
    assert scores == [0.0, -3.0, -1.5] and node.routed_experts is None
    assert [body["sampling_params"]["prompt_logprobs"] for _, body in client.requests] == [1]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("value", [0.3, 3.0, math.nan, math.inf])
def test_wrong_log_prob_of_the_sampled_token_is_refused(switch, k, value, capsys):
    """It ends the run, and is said in the log before."""
    switch(TOP_2 if k else SAMPLED, k)
    wrong = [None, {**ROWS[1], "7": {"logprob": value, "rank": 5}}, ROWS[2]]
    message = (
        r"^The teacher at http://\*\*\*@teacher:8001 .* (7 at position 1|position 1: .* 7 is) "
    )
    with pytest.raises(InvalidAnswer, match=message) as caught:
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


def test_all_zeros_are_refused_without_a_support_too(switch):
    switch(SAMPLED)
    zeros = [
        row and {i: {"logprob": 0.0, "rank": e["rank"]} for i, e in row.items()} for row in ROWS
    ]
    with pytest.raises(InvalidAnswer, match="position 1: .* mass of 2, where a probability"):
        prefill(Client(rows=zeros))


def test_wrong_answer_of_a_mixtures_teacher_names_that_teacher(servers):
    wrong = [None, {**ROWS[1], "1": {"logprob": 0.3, "rank": 1}}, ROWS[2]]
    servers["http://b:8003/v1"] = Client(rows=wrong)
    servers["http://b:8003/v1"].base_url = "http://b:8003/v1"
    with pytest.raises(InvalidAnswer, match="^The teacher at http://b:8003 gave .* id 1 is 0.3"):
        prefill(Client(json.dumps(OTHERS)))


class Streaming(Client):
    """Answers with responses that a test made, one after the other."""

    def __init__(self, *responses):
        super().__init__()
        self.responses = responses

    async def post(self, url, cast_to, body, stream):
        self.requests.append((url, body))
        return self.responses[len(self.requests) - 1]


def test_answer_beyond_the_bound_is_given_up_and_not_retried():
    limit = answer_bytes(len(TOKENS), 2)
    response = Response(*[b" " * 2**16] * 10, AssertionError("read on"))
    client = Streaming(response)
    with pytest.raises(InvalidAnswer, match=f"@teacher:8001 answered more than {limit:,} bytes"):
        score(client)
    assert len(client.requests) == 1 and response.closed


def test_connection_lost_in_an_answer_is_retried_as_often_as_openai_does():
    lost = [Response(b'{"prompt_', OSError("connection lost")) for _ in range(3)]
    client = Streaming(*lost[:2], Response(answer(ROWS)[:50], answer(ROWS)[50:]))
    assert score(client) == [0.0, -3.0, -1.5]
    client = Streaming(*lost)
    with pytest.raises(OSError, match="connection lost"):
        score(client)
    assert len(client.requests) == 3 and all(response.closed for response in lost)


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


async def ask(requests, client, times=1, frozen=True):
    for _ in range(times):
        await requests.score(
            client, "teacher", LONG, client.k if client.k == 2 else 0, frozen=frozen
        )


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("change", [{"shift": 0.7}, {"shift": -0.7}, {"best": 5}])
def test_teacher_that_is_another_model_is_refused(often, k, change):
    """At the next question with a known answer; without a support by its own tokens alone."""
    client, requests = Teacher(k), Requests()
    asyncio.run(ask(requests, client, 8))
    vars(client).update(change)
    if k == 1 and "best" in change:
        asyncio.run(ask(requests, client, 8))
        return
    client.requests = []
    message = r"^The teacher at http://\*\*\*@teacher:8001 scores .* other numbers .* at 100% of"
    with pytest.raises(InvalidAnswer, match=message):
        asyncio.run(ask(requests, client))
    assert [len(body["token_ids"]) for _, body in client.requests[-2:]] == [100, 64]
    assert client.requests[-1][1]["token_ids"] == LONG[:64]


def test_teacher_that_was_away_is_asked_again_at_once():
    client, requests = Teacher(2), Requests()
    asyncio.run(ask(requests, client, 2))
    client.shift, client.retries = 1.0, 1
    with pytest.raises(InvalidAnswer, match="It serves another model now"):
        asyncio.run(ask(requests, client))


@pytest.mark.parametrize("change", [{"shift": 0.45}, {"shift": -0.45}, {"unsteady": 6}])
def test_right_teacher_in_half_precision_passes(often, change):
    """Also one whose experts differ at a few positions."""
    client, requests = Teacher(2), Requests()
    asyncio.run(ask(requests, client))
    vars(client).update(change)
    asyncio.run(ask(requests, client, 24))
    assert len(client.requests) == 1 + 24 + 3


def test_live_policy_is_asked_for_its_scores_alone(often):
    """Its numbers change with every step of the run."""
    client, requests = Teacher(2), Requests()
    asyncio.run(ask(requests, client, 2, frozen=False))
    client.shift, client.retries = 2.0, 1
    asyncio.run(ask(requests, client, 10, frozen=False))
    assert len(client.requests) == 12


@pytest.mark.parametrize("name,frozen", [("OPDAlgorithm", True), ("OPSDAlgorithm", False)])
def test_teacher_of_opd_is_frozen_and_of_opsd_is_not(monkeypatch, name, frozen):
    """A server that was away is asked a known question, where its weights never change."""
    monkeypatch.setattr(hooks, "REQUESTS", Requests())
    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: []
    monkeypatch.setitem(sys.modules, base.__name__, base)
    client, clients = Teacher(2), client_module()

    async def score(parts):
        await asyncio.gather(*[clients.prefill_logprobs(client, "teacher", LONG)])

    algorithm = algorithm_of(name, score)
    nothing = types.SimpleNamespace(traces=[])
    asyncio.run(algorithm.score_episode(nothing))
    assert len(client.requests) == 1
    client.retries = 1
    asyncio.run(algorithm.score_episode(nothing))
    assert len(client.requests) == (3 if frozen else 2)


class Trace(types.SimpleNamespace):
    """A rollout of prime-rl's, within an episode."""

    def __init__(self, reply, reward):
        data = types.SimpleNamespace(question="1+1?", answer="#### 2")
        super().__init__(
            last_reply=reply,
            reward=reward,
            info={},
            task=types.SimpleNamespace(data=data),
        )


class Episode(types.SimpleNamespace):
    def model_copy(self, update):
        return Episode(**{**vars(self), **update})


@pytest.fixture
def opsd(monkeypatch):
    """Return a function: (demo_key, traces) -> what the hooked algorithm has scored, in order.

    Rollouts arrive one by one; then their group is complete.
    """
    scored = []

    def note(self, trace):
        scored.append((trace.last_reply, trace.info.get(self.demo_key)))
        hooks.ran(hooks.REQUEST)
        hooks.ran(hooks.SUPPORT)

    class OPSDAlgorithm:
        async def score_episode(self, episode):
            for trace in episode.traces:
                note(self, trace)

        async def score_group(self, episodes):
            scored.append("group")

    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: [(e, t) for e in episodes for t in e.traces]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    module = types.ModuleType("prime_rl.orchestrator.algo.opsd")
    module.OPSDAlgorithm = OPSDAlgorithm
    hooks.hook_algorithm(module)

    def run(demo_key, traces):
        algorithm = module.OPSDAlgorithm()
        algorithm.demo_key = demo_key
        episodes = [Episode(traces=[trace]) for trace in traces]

        async def both_phases():
            for episode in episodes:
                await algorithm.score_episode(episode)
            await algorithm.score_group(episodes)

        asyncio.run(both_phases())
        return scored

    return run


def test_hint_of_a_sibling_is_another_right_answer_of_the_group(opsd):
    """The first one, and never the rollout itself. Scored once the group is complete."""
    traces = [Trace("a", 0.0), Trace(" b ", 1.0), Trace("c", 1.0)]
    scored = opsd("prime_composer:sibling", traces)
    assert scored == [("a", "b"), (" b ", "c"), ("c", "b"), "group"]


def test_rollout_without_a_right_sibling_is_not_trained(opsd):
    traces = [Trace("a", 0.0), Trace("b", 1.0), Trace("c", -1.0)]
    assert opsd("prime_composer:sibling", traces) == [("a", "b"), ("c", "b"), "group"]
    module = types.ModuleType("prime_rl.orchestrator.trajectories")

    def trace_to_samples(trace, *, env_name="", mm_token_type_ids_mapping=None):
        return [Sample()]

    module.trace_to_samples = trace_to_samples
    hooks.hook_samples(module)
    assert [len(module.trace_to_samples(trace)) for trace in traces] == [1, 0, 1]


def test_hint_of_feedback_is_the_attempt_and_its_verdict(opsd):
    """At once, for it needs no other rollout."""
    scored = opsd("prime_composer:feedback", [Trace("one", 0.0), Trace("2", 1.0)])
    wrong = "An earlier attempt: one\nIts verdict: This is wrong; the right answer is 2."
    right = "An earlier attempt: 2\nIts verdict: This is correct."
    assert scored == [("one", wrong), ("2", right), "group"]


def test_hint_of_the_data_is_left_to_prime_rl(opsd):
    assert opsd("answer", [Trace("a", 0.0)]) == [("a", None), "group"]


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


@pytest.mark.parametrize("change", [{"weight": 0}, {"weight": "http://u:hidden@a"}, {"url": None}])
def test_header_of_another_form_is_not_shown(change):
    """Its URLs may have passwords, and the message is logged."""
    header = json.dumps([{**OTHERS[0], "url": "http://u:hidden@a:8002/v1"} | change])
    header = header.replace('"url": null', '"u": "http://u:hidden@a"')
    with pytest.raises(ValueError, match="must be a JSON list of") as caught:
        teachers.teachers_of(header)
    assert "hidden" not in str(caught.value)


def test_password_in_an_error_is_not_shown(servers, capsys):
    servers["http://b:8003/v1"] = Failing(OSError("no route to http://u:hidden@b:8003"))
    with pytest.raises(ValueError, match=r"no route to http://\*\*\*@b:8003") as caught:
        prefill(Client(json.dumps(OTHERS)))
    with pytest.raises(OSError):
        prefill(servers["http://b:8003/v1"])
    assert "hidden" not in str(caught.value) + capsys.readouterr().err


def test_first_token_has_no_score_and_knows_nothing():
    """prime-rl's convention is 0.0. The bytes say that no id is known."""
    ids = wire.pack(sent().scores)[:, 0].tolist()
    assert sent()[0] == 0.0 and ids == [[-(2**31)] * 2, [1, 2], [9, 1]]


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
    teachers.client_of.cache_clear()
    yield clients
    teachers.client_of.cache_clear()


def test_header_names_the_teachers_that_score_instead(servers):
    client = Client(json.dumps(OTHERS))
    scores = prefill(client)
    models = [server.requests[0][1]["model"] for server in servers.values()]
    assert models == ["a", "b"] and not client.requests
    assert list(scores) == pytest.approx([0.0, -3.0, -1.5])  # both have the same scores


def test_header_of_a_sampled_loss_sends_no_support(switch, servers):
    switch(SAMPLED)
    node = Node(TOKENS)
    scores = prefill(Client(json.dumps(OTHERS)))
    routing_module().assign_reference_logprobs(types.SimpleNamespace(nodes=[node]), scores)
    assert list(scores) == pytest.approx([0.0, -3.0, -1.5]) and node.routed_experts is None
    (_, body) = servers["http://a:8002/v1"].requests[0]
    assert body["sampling_params"]["prompt_logprobs"] == 1


@pytest.mark.parametrize("mixed,first", [(True, wire.MARK), (False, 0.0)])
@pytest.mark.parametrize("loss,k", [(TOP_2, 2), (SAMPLED, 0)])
def test_mark_shows_that_the_orchestrator_is_hooked(switch, servers, loss, k, mixed, first):
    """On a mixture, and on an environment's single teacher."""
    switch(loss, k, mixed)
    header = json.dumps(OTHERS)
    for client in (Client(header), Client()):
        assert prefill(client)[0] == first


@pytest.mark.parametrize("mixed,first", [(True, wire.MARK), (False, 0.0)])
def test_mark_is_on_the_samples_that_have_scores(switch, mixed, first):
    switch(SAMPLED, 0, mixed)
    module = types.ModuleType("prime_rl.orchestrator.trajectories")

    def trace_to_samples(trace, *, env_name="", mm_token_type_ids_mapping=None):
        return [types.SimpleNamespace(ref_logprobs=scores and list(scores)) for scores in trace]

    module.trace_to_samples = trace_to_samples
    hooks.hook_samples(module)
    scored, rl = module.trace_to_samples([OWN, None], env_name="sums")
    assert scored.ref_logprobs == [first, *OWN[1:]] and rl.ref_logprobs is None


def test_teacher_that_does_not_answer_is_named(servers):
    servers["http://b:8003/v1"] = Failing(OSError("Connection error."))
    message = "The teacher b at http://b:8003/v1 did not score: Connection error. Start its"
    with pytest.raises(ValueError, match=message):
        prefill(Client(json.dumps(OTHERS)))


def test_teacher_that_wants_a_key_names_the_variable(servers):
    servers["http://a:8002/v1"] = Failing(Refusal("Unauthorized", 401))
    message = "The teacher a at .* did not score: Unauthorized It wants .* variable VLLM_API_KEY"
    with pytest.raises(ValueError, match=message):
        prefill(Client(json.dumps(OTHERS)))


def test_teachers_have_their_own_api_keys_and_one_client_each(monkeypatch, servers):
    made = []

    def client(base_url, api_key, max_retries):
        made.append((base_url, api_key))

    monkeypatch.setattr(sys.modules["openai"], "AsyncOpenAI", client)
    monkeypatch.setenv("VLLM_API_KEY", "usual")
    monkeypatch.setenv("MATH_KEY", "secret")
    header = json.dumps([OTHERS[0], {**OTHERS[0], "api_key_var": "MATH_KEY"}])
    for teacher in teachers.teachers_of(header) * 2:
        teachers.client_of(teacher.url, teacher.api_key_var)
    assert made == [(OTHERS[0]["url"], "usual"), (OTHERS[0]["url"], "secret")]


def test_password_and_api_key_of_a_teacher_are_refused(monkeypatch, servers):
    """The openai client would send the password alone."""
    monkeypatch.setenv("MATH_KEY", "key")
    monkeypatch.setenv("OTHER_KEY", "")
    url = "http://u:hidden@a:8002/v1"
    servers[url] = Client()
    assert teachers.client_of(url, "OTHER_KEY") is servers[url]
    with pytest.raises(
        ValueError, match=r"\*\*\*@a:8002/v1 .* password, and .* MATH_KEY"
    ) as caught:
        teachers.client_of(url, "MATH_KEY")
    assert "hidden" not in str(caught.value)


def test_password_and_api_key_of_prime_rls_client_are_refused():
    client = Client()
    client.api_key = "key"
    with pytest.raises(ValueError, match=r"at http://\*\*\*@teacher:8001 has a user or password"):
        prefill(client)
    assert not client.requests


def test_header_weights_add_up_to_one():
    weights = [teacher.weight for teacher in teachers.teachers_of(json.dumps(OTHERS))]
    assert weights == [0.25, 0.75]


@pytest.mark.parametrize(
    "entry", [{"url": "u", "model": "m"}, {"url": "u", "model": "m", "weight": 0}, "u"]
)
def test_header_of_another_form_is_refused(entry):
    for header in (json.dumps([entry]), "[]", "no JSON"):
        with pytest.raises(ValueError, match="must be a JSON list of"):
            teachers.teachers_of(header)
