"""The orchestrator's half: parsing, asking, and where each version's support goes."""

import asyncio
import json
import math
import sys
import time
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

numpy = pytest.importorskip("numpy")
pytest.importorskip("msgspec")

from prime_composer.upstream import hooks, orchestrator, registration, switch, wire  # noqa: E402

ROWS = [
    None,
    {
        "7": {"logprob": -3.0, "rank": 5},
        "1": {"logprob": -0.1, "rank": 1},
        "2": {"logprob": -2.0, "rank": 2},
    },
    {"1": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.4, "rank": 1}},
]
TOKENS = [4, 7, 1]


def answer(rows):
    """As a server writes it, with what nobody reads."""
    told = [
        row and {token: {**entry, "decoded_token": ' a\u00e9"'} for token, entry in row.items()}
        for row in rows
    ]
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": None}
    return json.dumps(
        {
            "request_id": "r",
            "choices": [choice],
            "prompt_logprobs": told,
            "usage": {"prompt_tokens": 3},
        }
    ).encode()


def plain_parse(token_ids, content, k):
    """``orchestrator.parse`` written the plain way, entry by entry."""
    rows = json.loads(content)["prompt_logprobs"]
    ids, logprobs = (
        numpy.zeros((len(rows), k), numpy.int32),
        numpy.full((len(rows), k), math.nan, numpy.float32),
    )
    values = [0.0] * len(rows)
    for t, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        if row:
            values[t] = float(row[str(token)]["logprob"])
            best = sorted(row.items(), key=lambda item: (item[1]["rank"], -item[1]["logprob"]))[:k]
            for j, (candidate, entry) in enumerate(best):
                ids[t, j], logprobs[t, j] = int(candidate), entry["logprob"]
    return orchestrator.Scores(values, ids, logprobs)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": {"type": "topk_reverse_kl", "k": 2}}))


def test_top_k_is_taken_by_rank_from_rows_of_k_or_k_plus_one_entries():
    scores = orchestrator.parse(TOKENS, answer(ROWS), 2)
    assert scores == [0.0, -3.0, -1.5]
    assert scores.token_ids.tolist()[1:] == [[1, 2], [9, 1]]
    assert scores.logprobs[1:].ravel().tolist() == pytest.approx([-0.1, -2.0, -0.4, -1.5])
    assert numpy.isnan(scores.logprobs[0]).all()


def test_a_slice_keeps_its_part_of_the_support():
    tail = orchestrator.parse(TOKENS, answer(ROWS), 2)[1:]
    assert tail == [-3.0, -1.5] and tail.token_ids.tolist() == [[1, 2], [9, 1]]


@pytest.mark.parametrize(
    "tokens,rows,k,said",
    [
        (TOKENS, ROWS[:2], 2, "scored 2 tokens of 3"),
        ([4, 8, 1], ROWS, 2, "do not hold the token 8"),
        (TOKENS, ROWS, 3, "--max-logprobs 3"),
        (TOKENS, [None, None, ROWS[2]], 2, "left token 1 of 3 without a score"),
    ],
)
def test_an_answer_that_does_not_fit_is_one_sentence(tokens, rows, k, said):
    with pytest.raises(ValueError, match=said):
        orchestrator.parse(tokens, answer(rows), k)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"prompt_logprobs": [null, {"7": {"logprob": null, "rank": 1}}]}',
        b'{"prompt_logprobs": [[]]}',
    ],
)
def test_an_answer_of_another_kind_is_one_sentence(content):
    with pytest.raises(ValueError, match="server answered something else than prompt_logprobs"):
        orchestrator.parse(TOKENS, content, 2)


def test_an_answer_without_scores_has_scored_nothing():
    for content in (b'{"choices": []}', b'{"prompt_logprobs": null}'):
        with pytest.raises(ValueError, match="scored 0 tokens of 3"):
            orchestrator.parse(TOKENS, content, 2)


def test_an_impossible_token_may_come_in_the_words_of_pythons_json():
    never = {"logprob": -math.inf, "rank": 7}
    content = answer([None, {**ROWS[1], "7": never}, ROWS[2] | {"8": never}])
    assert b"-Infinity" in content
    scores = orchestrator.parse(TOKENS, content, 3)
    assert scores == [0.0, -math.inf, -1.5] and scores.token_ids[1:].tolist() == [
        [1, 2, 7],
        [9, 1, 8],
    ]
    assert scores.logprobs[1:, 2].tolist() == [-math.inf] * 2


# What float32 makes of a float64, and ties of both kinds
LOGPROBS = st.sampled_from([-0.5, -0.5, -1.25, -0.0, 0.0, -9999.0, -math.inf]) | st.floats(-40, 0)


@st.composite
def scored_sequences(draw):
    """Tokens and rows in every order, with equal ranks and equal log-probs, and the sampled token in or out of the top K."""
    k = draw(st.integers(1, 4))
    tokens, rows = [draw(st.integers(0, 9))], [None]
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.permutations(range(10)))[: draw(st.integers(k, k + 2))]
        tokens.append(draw(st.sampled_from(ids)))
        rows.append(
            {str(i): {"logprob": draw(LOGPROBS), "rank": draw(st.integers(1, 5))} for i in ids}
        )
    return tokens, rows, k


@settings(max_examples=300, deadline=None)
@given(scored_sequences())
def test_every_bit_is_that_of_the_plain_way(sequence):
    tokens, rows, k = sequence
    ours, plain = (way(tokens, answer(rows), k) for way in (orchestrator.parse, plain_parse))
    assert repr(list(ours)) == repr(list(plain))  # to the last bit, signs of zeros too
    for mine, theirs in ((ours.token_ids, plain.token_ids), (ours.logprobs, plain.logprobs)):
        assert (
            mine.dtype == theirs.dtype
            and mine.shape == theirs.shape
            and mine.tobytes() == theirs.tobytes()
        )


@pytest.mark.parametrize("seed", range(3))
def test_every_bit_is_that_of_the_plain_way_in_answers_of_a_vllms_size(seed):
    generator, k, n = numpy.random.default_rng(seed), 32, 200
    tokens, rows = generator.integers(0, 150_000, n).tolist(), [None]
    for token in tokens[1:]:
        others = [i for i in generator.choice(150_000, k, replace=False).tolist() if i != token]
        logprobs = numpy.sort(generator.normal(-8, 4, len(others)).astype(numpy.float32))[
            ::-1
        ].tolist()
        row = (
            {str(token): {"logprob": -20.123456789, "rank": 77}}
            if generator.random() < 0.5 or len(others) < k
            else {}
        )
        row |= {
            str(i): {"logprob": x, "rank": r}
            for r, (i, x) in enumerate(zip(others, logprobs, strict=True), 1)
        }
        if str(token) not in row:  # one of the top K, and first in the row as vLLM has it
            place = int(generator.integers(0, k))
            row = {str(token): row.pop(str(others[place]))} | row
        rows.append(row)
    ours, plain = (way(tokens, answer(rows), k) for way in (orchestrator.parse, plain_parse))
    assert {len(row) for row in rows[1:]} == {k, k + 1}
    assert (
        ours == plain
        and (ours.token_ids == plain.token_ids).all()
        and ours.logprobs.tobytes() == plain.logprobs.tobytes()
    )


class Client:
    """Answers like the openai client that prime-rl made."""

    base_url = "http://teacher:8001/v1/"

    def __init__(self, header=None):
        self.asked = []
        self.default_headers = {} if header is None else {orchestrator.HEADER: header}

    async def post(self, url, cast_to, body):
        self.asked.append((url, body))
        return types.SimpleNamespace(content=answer(ROWS))


def test_the_request_is_prime_rls_own_with_k_and_without_text():
    client = Client()
    scores = asyncio.run(orchestrator.ask(client, "teacher", TOKENS, 2))
    url, body = client.asked[0]
    assert url == "http://teacher:8001/inference/v1/generate"
    assert body["token_ids"] == TOKENS
    own = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    assert body["sampling_params"] == own | {"prompt_logprobs": 2, "detokenize": False}
    assert scores.token_ids.shape == (3, 2)


def test_a_server_that_refuses_k_is_told_how_to_be_started():
    class Refusal(Exception):
        status_code = 400

    class Small(Client):
        async def post(self, url, cast_to, body):
            raise Refusal("Requested prompt logprobs of 32, which is greater than max allowed: 20")

    with pytest.raises(ValueError, match="--max-logprobs 32"):
        asyncio.run(orchestrator.ask(Small(), "teacher", TOKENS, 32))


def test_a_batch_that_is_asked_for_at_once_is_in_flight_in_parts_and_parsed_one_by_one(monkeypatch):
    flying, parsing, seen = set(), set(), []

    class Counting(Client):
        async def post(self, url, cast_to, body):
            number = body["token_ids"][0]
            flying.add(number)
            await asyncio.sleep(0)
            seen.append((len(flying), 0))
            return types.SimpleNamespace(content=number)

    def parse(token_ids, content, k):
        parsing.add(content)
        seen.append((len(flying), len(parsing)))
        time.sleep(1e-4)  # others could come in between
        parsing.remove(content)
        flying.remove(content)
        return content

    monkeypatch.setattr(orchestrator, "parse", parse)
    count = 3 * orchestrator.IN_FLIGHT

    async def batch():
        return await asyncio.gather(
            *(orchestrator.ask(Counting(), "teacher", [i], 2) for i in range(count))
        )

    for _ in range(2):  # each in an event loop of its own
        assert asyncio.run(batch()) == list(range(count))
    most = [max(column) for column in zip(*seen, strict=True)]
    assert most == [orchestrator.IN_FLIGHT, 1]


def test_a_request_that_fails_gives_its_place_back(monkeypatch):
    class Down(Client):
        async def post(self, url, cast_to, body):
            raise OSError("Connection error.")

    async def after_failures():
        for _ in range(2):
            with pytest.raises(OSError):
                await orchestrator.ask(Down(), "teacher", TOKENS, 2)
        return await asyncio.wait_for(orchestrator.ask(Client(), "teacher", TOKENS, 2), 10)

    monkeypatch.setattr(orchestrator, "IN_FLIGHT", 1)
    assert asyncio.run(after_failures()) == [0.0, -3.0, -1.5]


class RoutedExperts:
    def __init__(self, data, shape, dtype):
        self.data, self.shape, self.dtype = data, shape, dtype


class Sample:
    def __init__(self, env_name="problems"):
        self.env_name = env_name
        self.prompt_ids, self.completion_ids = TOKENS[:1], TOKENS[1:]
        self.token_ids, self.ref_logprobs, self.routed_experts = TOKENS, None, None


Sample.__module__ = RoutedExperts.__module__ = __name__


def carried(routed):
    array = numpy.frombuffer(routed.data, dtype=numpy.int32).reshape(routed.shape)
    return array[:, 0].tolist(), array[:, 1].copy().view(numpy.float32)


OWN = [0.0, -9.0, -9.0]
"""What prime-rl's own request brings."""


def v0_6_module(client=None):
    module = types.ModuleType("prime_rl.orchestrator.utils")

    async def compute_teacher_logprobs(clients, model_name, samples):
        return [list(OWN) for _ in samples]

    module.compute_teacher_logprobs = compute_teacher_logprobs
    module.setup_openai_client = lambda config: client
    orchestrator.hook_v0_6(module)
    return module


def test_v0_6_puts_the_support_on_the_samples_and_returns_the_flat_scores():
    module = v0_6_module(Client())
    samples = [Sample(), Sample()]
    flat = asyncio.run(
        module.compute_teacher_logprobs(
            [types.SimpleNamespace(extra_headers={})], "teacher", samples
        )
    )
    assert flat == [[0.0, -3.0, -1.5]] * 2 and all(type(row) is list for row in flat)
    assert (
        samples[0].routed_experts.shape == [3, 2, 2] and samples[0].routed_experts.dtype == "int32"
    )
    ids, logprobs = carried(samples[1].routed_experts)
    assert ids[1:] == [[1, 2], [9, 1]] and logprobs[2].tolist() == pytest.approx([-0.4, -1.5])


def client_module(client):
    module = types.ModuleType("prime_rl.utils.client")

    async def prefill_logprobs(openai, model, token_ids):
        return list(OWN)

    module.prefill_logprobs = prefill_logprobs
    orchestrator.hook_client(module)
    return module


def test_v0_7_and_v0_8_copy_the_support_to_each_sample_after_their_own_scoring():
    client = Client()
    clients = client_module(client)
    algo = types.ModuleType("prime_rl.orchestrator.algo.opd")

    class OPDAlgorithm:
        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                sample.ref_logprobs = await clients.prefill_logprobs(
                    client, "teacher", list(sample.token_ids)
                )

    algo.OPDAlgorithm = OPDAlgorithm
    orchestrator.hook_algorithm(algo)
    rollout = types.SimpleNamespace(samples=[Sample()])
    asyncio.run(OPDAlgorithm().score_rollout(rollout))
    sample = rollout.samples[0]
    assert type(sample.ref_logprobs) is list and sample.ref_logprobs == [0.0, -3.0, -1.5]
    assert carried(sample.routed_experts)[0][1:] == [[1, 2], [9, 1]]


class Node:
    def __init__(self, tokens):
        self.token_ids, self.routed_experts = tokens, None


def routing_module():
    module = types.ModuleType("prime_rl.orchestrator.algo.routing")
    module.given = []

    def assign_reference_logprobs(branch, values):
        module.given.append(values)

    module.assign_reference_logprobs = assign_reference_logprobs
    orchestrator.hook_routing(module)
    return module


def test_the_newest_version_gets_it_on_every_node_of_the_branch():
    module = routing_module()
    nodes = [Node(TOKENS[:1]), Node(TOKENS[1:])]
    branch = types.SimpleNamespace(nodes=nodes, token_ids=TOKENS)
    module.assign_reference_logprobs(branch, orchestrator.parse(TOKENS, answer(ROWS), 2))
    assert type(module.given[0]) is list
    assert [node.routed_experts.shape for node in nodes] == [(1, 2, 2), (2, 2, 2)]
    assert nodes[1].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


def test_self_distillation_cuts_the_hint_off_and_keeps_the_rest_of_the_support():
    module = routing_module()
    hint = [4]
    scores = orchestrator.parse(TOKENS, answer(ROWS), 2)[len(hint) :]
    nodes = [Node(TOKENS[1:])]
    module.assign_reference_logprobs(
        types.SimpleNamespace(nodes=nodes, token_ids=TOKENS[1:]), scores
    )
    assert nodes[0].routed_experts[:, 0].tolist() == [[1, 2], [9, 1]]


def test_router_replay_in_the_rollouts_is_refused():
    sample = Sample()
    sample.routed_experts = RoutedExperts(b"", [3, 12, 8], "uint8")
    with pytest.raises(ValueError, match="enable_return_routed_experts"):
        orchestrator.put(sample, orchestrator.parse(TOKENS, answer(ROWS), 2))
    module, node = routing_module(), Node(TOKENS)
    node.routed_experts = numpy.zeros((3, 12, 8), numpy.uint8)
    with pytest.raises(ValueError, match="enable_return_routed_experts"):
        module.assign_reference_logprobs(
            types.SimpleNamespace(nodes=[node]), orchestrator.parse(TOKENS, answer(ROWS), 2)
        )


@pytest.mark.parametrize("loss", [{"type": "sampled_reverse_kl"}, None])
def test_a_loss_without_a_support_leaves_prime_rls_own_request_alone(monkeypatch, loss):
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": loss}))
    module = client_module(Client())
    assert asyncio.run(module.prefill_logprobs(Client(), "teacher", TOKENS)) == OWN


def test_a_process_that_was_not_started_by_the_launcher_is_told_to_name_the_loss(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    with pytest.raises(ValueError, match="no loss is named in this process"):
        hooks.wanted_support()


def config(table=None, replay=False, path=hooks.IMPORT_PATH):
    loss = (
        types.SimpleNamespace(import_path=path, kwargs=table) if table else types.SimpleNamespace()
    )
    model = types.SimpleNamespace(name="a/model")
    return types.SimpleNamespace(
        trainer=types.SimpleNamespace(loss=loss, enable_router_replay=replay, model=model)
    )


def test_the_launcher_lifts_the_loss_table_out_of_the_config(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    hooks.lift(config({"type": "topk_reverse_kl", "k": "16"}))
    assert switch.switch() == {"loss": {"type": "topk_reverse_kl", "k": "16"}}
    assert hooks.wanted_support() == 16


def test_special_tokens_written_as_text_become_ids_where_the_tokenizer_is_known(monkeypatch):
    transformers = types.ModuleType("transformers")
    tokenizer = types.SimpleNamespace(
        encode=lambda text, add_special_tokens: {"<think>": [42]}[text]
    )
    transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    given = config(
        {
            "type": "topk_reverse_kl",
            "k": 2,
            "special_tokens": {"strings": ["<think>"]},
            "adapter": True,
        }
    )
    hooks.lift(given)
    for table in (given.trainer.loss.kwargs, switch.switch()["loss"]):
        assert registration.parse_loss(table).special_tokens.ids == (42,)
        assert registration.parse_loss(table).special_tokens.strings == ()
        assert table["adapter"] is True


def test_another_loss_in_the_config_leaves_the_run_as_it_is(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    hooks.lift(config({"x": 1}, path="somebody.elses"))
    assert switch.switch() == {"loss": None} and hooks.wanted_support() == 0


def test_a_loss_of_rl_tokens_is_named_in_the_file(monkeypatch, capfd):
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": {"type": "default"}}))
    with pytest.raises(
        ValueError, match='a loss of rl tokens; .* import_path = "prime_composer.upstream.loss_fn"'
    ):
        hooks.lift(config())
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    hooks.lift(config())
    assert "names no loss, nor does [trainer.loss]" in capfd.readouterr().err


def test_two_tables_that_disagree_are_refused(monkeypatch):
    hooks.lift(config({"type": "topk_reverse_kl", "k": 2}))
    with pytest.raises(ValueError, match="keep one of them"):
        hooks.lift(config({"type": "topk_reverse_kl", "k": 4}))


def test_router_replay_and_a_support_are_refused_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match="enable_router_replay = false"):
        hooks.lift(config({"type": "topk_reverse_kl", "k": 2}, replay=True))
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    hooks.lift(config({"type": "sampled_reverse_kl"}, replay=True))


def test_the_full_vocabulary_is_refused(monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER", "1")
    with pytest.raises(ValueError, match="give it a number k"):
        hooks.lift(config({"type": "topk_reverse_kl", "k": "full"}))
    assert math.isfinite(hooks.support_size({"type": "topk_reverse_kl", "k": 3}))


def one(values, ids, probabilities):
    return orchestrator.Scores(
        values, numpy.array(ids, numpy.int32), numpy.log(numpy.array(probabilities)).astype("f4")
    )


def test_two_teachers_are_mixed_in_probability_space():
    first = one([0.0, math.log(0.2)], [[0, 0], [5, 6]], [[1, 1], [0.7, 0.2]])
    second = one([0.0, math.log(0.5)], [[0, 0], [6, 7]], [[1, 1], [0.5, 0.4]])
    mixed = orchestrator.mix([3, 6], [first, second], [0.25, 0.75])
    # sampled token: .25 * .2 + .75 * .5; id 6: the same sum; id 7: .75 * .4; id 5: .25 * .7
    assert mixed[1] == pytest.approx(math.log(0.425))
    assert mixed.token_ids[1].tolist() == [6, 7]
    assert numpy.exp(mixed.logprobs[1]).tolist() == pytest.approx([0.425, 0.3], rel=1e-5)
    assert mixed[0] == 0.0 and numpy.isnan(mixed.logprobs[0]).all()
    assert (
        type(mixed[1]) is float
        and mixed.token_ids.dtype == numpy.int32
        and mixed.logprobs.dtype == numpy.float32
    )


OTHERS = [
    {"url": "http://a:8002/v1", "model": "a", "weight": 1},
    {"url": "http://b:8003/v1", "model": "b", "weight": 3},
]


@pytest.fixture
def others(monkeypatch):
    clients = {(entry["url"], "VLLM_API_KEY"): Client() for entry in OTHERS}
    monkeypatch.setattr(orchestrator, "_clients", clients)
    openai = types.ModuleType("openai")
    openai.AsyncOpenAI = None
    monkeypatch.setitem(sys.modules, "openai", openai)
    return list(clients.values())


def test_the_header_of_the_teachers_client_names_who_scores_in_its_place(others):
    own = Client(json.dumps(OTHERS))
    module = client_module(own)
    scores = asyncio.run(module.prefill_logprobs(own, "teacher", TOKENS))
    assert [client.asked[0][1]["model"] for client in others] == ["a", "b"] and not own.asked
    assert list(scores) == pytest.approx([0.0, -3.0, -1.5])  # both said the same


def test_a_sampled_loss_asks_them_too_and_puts_nothing_on_the_wire(monkeypatch, others):
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": {"type": "sampled_reverse_kl"}}))
    own, sample = Client(json.dumps(OTHERS)), Sample()
    scores = asyncio.run(client_module(own).prefill_logprobs(own, "teacher", TOKENS))
    orchestrator.put(sample, scores)
    assert list(scores) == pytest.approx([0.0, -3.0, -1.5]) and sample.routed_experts is None
    assert others[0].asked[0][1]["sampling_params"]["prompt_logprobs"] == 1


@pytest.mark.parametrize("adapter,first", [(True, wire.MARK), (False, 0.0)])
@pytest.mark.parametrize(
    "table", [{"type": "topk_reverse_kl", "k": 2}, {"type": "sampled_reverse_kl"}]
)
def test_a_run_that_needs_the_adapter_is_shown_that_it_is_on_here_too(
    monkeypatch, others, table, adapter, first
):
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps({"loss": {**table, "adapter": adapter}}))
    own = Client(json.dumps(OTHERS))
    module = client_module(own)
    for client in (own, Client()):  # a mixture, and an environment's single teacher
        scores = asyncio.run(module.prefill_logprobs(client, "teacher", TOKENS))
        assert scores[0] == first
    old = v0_6_module(Client())
    for headers in ({orchestrator.HEADER: json.dumps(OTHERS)}, {}):
        (scores,) = asyncio.run(
            old.compute_teacher_logprobs(
                [types.SimpleNamespace(extra_headers=headers)], "teacher", [Sample()]
            )
        )
        assert scores[0] == first


def test_the_newest_version_shows_it_on_the_samples(monkeypatch):
    module = types.ModuleType("prime_rl.orchestrator.trajectories")

    def trace_to_samples(trace, *, env_name="", mm_token_type_ids_mapping=None):
        return [types.SimpleNamespace(ref_logprobs=scores and list(scores)) for scores in trace]

    module.trace_to_samples = trace_to_samples
    orchestrator.hook_samples(module)
    for adapter, first in ((True, wire.MARK), (False, 0.0)):
        monkeypatch.setenv(
            "PRIME_COMPOSER",
            json.dumps({"loss": {"type": "sampled_reverse_kl", "adapter": adapter}}),
        )
        scored, rl = module.trace_to_samples([OWN, None], env_name="sums")
        assert scored.ref_logprobs == [first, *OWN[1:]] and rl.ref_logprobs is None


def test_v0_6_has_one_client_and_its_header_knows_the_environments(others):
    module = v0_6_module()
    header = json.dumps({"sums": OTHERS[:1], "code": OTHERS[1:]})
    config = types.SimpleNamespace(extra_headers={orchestrator.HEADER: header})
    samples = [Sample("sums"), Sample("code"), Sample("code")]
    asyncio.run(module.compute_teacher_logprobs([config], "teacher", samples))
    assert [len(client.asked) for client in others] == [1, 2]
    with pytest.raises(ValueError, match="with one for the environment 'chess'"):
        asyncio.run(module.compute_teacher_logprobs([config], "teacher", [Sample("chess")]))


def test_a_teacher_that_does_not_answer_is_named(others):
    async def down(url, cast_to, body):
        raise OSError("Connection error.")

    others[1].post = down
    with pytest.raises(
        ValueError,
        match="The teacher b at http://b:8003/v1 did not score: Connection error. Start its",
    ):
        asyncio.run(orchestrator.ask_each(orchestrator.teachers_of(json.dumps(OTHERS)), TOKENS, 2))


def test_each_teacher_of_a_mixture_has_its_own_api_key(monkeypatch):
    given = []
    openai = types.ModuleType("openai")
    openai.AsyncOpenAI = lambda **settings: given.append(
        (settings["base_url"], settings["api_key"])
    )
    monkeypatch.setitem(sys.modules, "openai", openai)
    monkeypatch.setattr(orchestrator, "_clients", {})
    monkeypatch.setenv("VLLM_API_KEY", "usual")
    monkeypatch.setenv("MATH_KEY", "secret")
    gateway = [OTHERS[0], {**OTHERS[0], "api_key_var": "MATH_KEY"}]
    for teacher in orchestrator.teachers_of(json.dumps(gateway)) * 2:
        orchestrator.client_of(teacher)
    assert given == [(OTHERS[0]["url"], "usual"), (OTHERS[0]["url"], "secret")]


def test_a_server_that_wants_a_key_names_the_variable(others):
    class Refusal(Exception):
        status_code = 401

    async def locked(url, cast_to, body):
        raise Refusal("Unauthorized")

    others[0].post = locked
    with pytest.raises(
        ValueError,
        match="The teacher a at .* did not score: Unauthorized It wants .* variable VLLM_API_KEY",
    ):
        asyncio.run(orchestrator.ask_each(orchestrator.teachers_of(json.dumps(OTHERS)), TOKENS, 2))


def test_weights_are_shares():
    assert [teacher.weight for teacher in orchestrator.teachers_of(json.dumps(OTHERS))] == [
        0.25,
        0.75,
    ]


@pytest.mark.parametrize(
    "entry", [{"url": "u", "model": "m"}, {"url": "u", "model": "m", "weight": 0}, "u"]
)
def test_a_header_that_is_not_a_list_of_teachers_is_one_sentence(entry):
    for header in (json.dumps([entry]), "[]", "no JSON"):
        with pytest.raises(ValueError, match="must be a JSON list of"):
            orchestrator.teachers_of(header)
