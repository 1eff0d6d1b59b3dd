"""Inside prime-rl: a teacher with a tokenizer of its own, from messages to samples and weights."""

import asyncio
import json
import math
import sys
import types

import pytest
import torch

numpy = pytest.importorskip("numpy")
msgspec = pytest.importorskip("msgspec")
pytest.importorskip("fastapi", reason="vLLM's server is not installed")
pytest.importorskip("openai")

from prime_composer.contract import InvalidAnswer, Scores  # noqa: E402
from prime_composer.scoring.wire import (  # noqa: E402
    NAME,
    SCORE_PATH,
    VERSION,
    Facts,
    ScoreResponse,
)
from prime_composer.teachers import own_tokenizer as teachers_own_tokenizer  # noqa: E402
from prime_composer.upstream import wire  # noqa: E402
from prime_composer.upstream.orchestrator import hooks, messages  # noqa: E402
from prime_composer.upstream.orchestrator.client import Requests  # noqa: E402
from prime_composer.upstream.orchestrator.mixture import client_of  # noqa: E402
from prime_composer.upstream.settings import AdapterSettings  # noqa: E402
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR  # noqa: E402
from tests.scoring.conftest import vllm_without_its_libraries  # noqa: E402, F401
from tests.scoring.served_rows import Rows, Served  # noqa: E402
from tests.scoring.test_own_tokenizer import WholeRows, over  # noqa: E402
from tests.stand_in import Reply, serving  # noqa: E402
from tests.teachers.own import STUDENT, TEACHER, rollout_of, wrapped  # noqa: E402
from tests.upstream.test_orchestrator import algorithm_of, client_module, hooked  # noqa: E402

K = 4
LOSS = {"type": "topk_reverse_kl", "k": K}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Message:
    """A message of verifiers."""

    def __init__(self, role, content, **more):
        self.role, self.fields = role, {"role": role, "content": content, **more}

    def model_dump(self, exclude_none):
        return self.fields


class Node:
    def __init__(self, message, token_ids, sampled=0):
        self.message, self.token_ids, self.routed_experts = message, token_ids, None
        self.mask = [at >= len(token_ids) - sampled for at in range(len(token_ids))]
        self.sampled, self.reference_logprobs = sampled > 0, None


class Trace:
    """A rollout of one branch.

    ``asked`` is what is scored in the place of the branch's tokens; ``sample`` is made of it then.
    """

    def __init__(self, nodes):
        self.nodes, self.metrics, self.info = nodes, {}, {}
        ids = [token for node in nodes for token in node.token_ids]
        self.branches = [types.SimpleNamespace(nodes=nodes, token_ids=ids)]
        self.asked = self.sample = None


def sample_of(trace):
    """Return prime-rl's TrainingSample of a rollout, which keeps scores of sampled tokens."""
    mask = [part for node in trace.nodes for part in node.mask]
    own = iter([value for node in trace.nodes for value in node.reference_logprobs or []])
    return types.SimpleNamespace(
        token_ids=trace.branches[0].token_ids,
        mask=mask,
        ref_logprobs=[next(own) if is_sampled else 0.0 for is_sampled in mask],
        support=numpy.concatenate([node.routed_experts for node in trace.nodes]),
        advantages=None,
        ref_kl_weights=None,
    )


@pytest.fixture
def served(vllm_without_its_libraries):  # noqa: F811
    """Return the server of a teacher."""
    with Served(Rows(3, len(wrapped(TEACHER)))) as one:
        yield one


@pytest.fixture
def tokenizers(tmp_path):
    """Save the tokenizers of a teacher and a student; return their folders."""
    for name, merges in (("teacher", TEACHER), ("student", STUDENT)):
        tokenizer = wrapped(merges)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


@pytest.fixture(autouse=True)
def switch(monkeypatch, tokenizers):
    """Return a function that sets this process's settings; at first a teacher of its own."""

    def set_to(**more):
        settings = {
            "teacher_tokenizers": {"m3": str(tokenizers / "teacher")},
            "student_tokenizer": str(tokenizers / "student"),
        }
        for name, value in AdapterSettings(loss=LOSS, k=K, **settings | more).to_env().items():
            monkeypatch.setenv(name, value)

    set_to()
    base = types.ModuleType("prime_rl.orchestrator.algo.base")
    base.iter_trainable_traces = lambda episodes: [(e, t) for e in episodes for t in e.traces]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(hooks, "REQUESTS", Requests())
    messages.own_tokenizer.cache_clear()
    yield set_to
    messages.own_tokenizer.cache_clear()


@pytest.fixture
def student():
    return wrapped(STUDENT)


def conversation(student, *turns, said=None):
    """Return a rollout: a question, and turns of the student with words of the user between.

    Args:
        student: its tokenizer.
        turns: what the student wrote.
        said: what the last turn's message has in the place of it.
    """
    nodes = [Node(Message("user", "ab c"), student.encode("user:ab c\n"))]
    for at, text in enumerate(turns):
        if at:
            nodes.append(Node(Message("user", "b"), student.encode("user:b\n")))
        content = said if said is not None and at == len(turns) - 1 else text
        written = [*student.encode(text), student.eos_token_id]
        tokens = [*student.encode("assistant:"), *written]
        nodes.append(Node(Message("assistant", content), tokens, len(written)))
    return Trace(nodes)


def assign_reference_logprobs(branch, values):
    """Do what prime-rl does with the scores of a branch: keep those of sampled tokens."""
    values = iter(values)
    for node in branch.nodes:
        own = [next(values) for _ in node.token_ids]
        if any(node.mask):
            pairs = zip(own, node.mask, strict=True)
            node.reference_logprobs = [value for value, is_sampled in pairs if is_sampled]


def opd(client):
    """Return prime-rl's algorithm over our hooks, for a rollout in an episode."""
    routing = hooked(
        "orchestrator.algo.routing",
        hooks.hook_routing,
        assign_reference_logprobs=assign_reference_logprobs,
    )
    trajectories = hooked(
        "orchestrator.trajectories",
        hooks.hook_samples,
        trace_to_samples=lambda trace: [sample_of(trace)],
    )
    clients = client_module()

    async def score_episode(traces):
        for trace in traces:
            for branch in trace.branches:
                ids = trace.asked or branch.token_ids
                scores = await clients.prefill_logprobs(client, "m3", ids)
                routing.assign_reference_logprobs(branch, scores)

    async def score(trace):
        episode = types.SimpleNamespace(traces=[trace])
        await algorithm_of("OPDAlgorithm", score_episode).score_episode(episode)
        (trace.sample,) = trajectories.trace_to_samples(trace)

    return score


def scored(url, *rollouts):
    """Score rollouts by the teacher that is served at ``url``."""

    async def run():
        client = client_of(url, API_KEY_VAR)
        score = opd(client)
        try:
            for rollout in rollouts:
                await score(rollout)
        finally:
            await client.close()
            client_of.cache_clear()

    asyncio.run(run())


def expected(served, student, *turns):
    """Return the scores of turns in this process, each after its own messages."""
    teacher = wrapped(TEACHER)
    scorer, _ = over(WholeRows(served.engine))
    prompt, found = "user:ab c\nassistant:", []
    for text in turns:
        scorer.prompts = lambda _, prompt=prompt: teacher.encode(prompt)
        found += scorer.score([rollout_of(student, "?", text)], K)
        prompt += f"{text}\nuser:b\nassistant:"
    return found


def by_id(scores, row):
    """Return the known log-probs of a row by token id."""
    known = scores.all_known[row]
    pairs = scores.token_ids[row][known], scores.teacher_logprobs[row][known]
    return dict(zip(*(part.tolist() for part in pairs), strict=True))


def check_turns(own, support, mask, turns):
    """Check log-probs and payload of a branch against the scores of its turns."""
    places, most = [at for at, is_sampled in enumerate(mask) if is_sampled], 0
    for turn in turns:
        assert turn.scored.all()
        here, places = places[: len(turn)], places[len(turn) :]
        assert [own[at] for at in here] == pytest.approx(turn.ref_logprobs.tolist(), abs=1e-4)
        for row, at in enumerate(here):
            q = by_id(turn, row)
            assert by_id(support, at) == pytest.approx(q, abs=1e-4)
            most = max(most, len(q))
    others = [at for at, is_sampled in enumerate(mask) if not is_sampled]
    assert most == K and not places and not support.all_known[others].any()


def support_of(payload):
    return Scores.of_bytes(torch.from_numpy(payload.copy()), torch.zeros(len(payload)))


def test_own_tokenizer_scores_each_turn(served, student):
    trace = conversation(student, "abcab", "c ab")
    scored(served.url, trace)
    sample = trace.sample
    turns = expected(served, student, "abcab", "c ab")
    check_turns(sample.ref_logprobs, support_of(sample.support), sample.mask, turns)
    teacher = wrapped(TEACHER)
    prompts = ["user:ab c\nassistant:", "user:ab c\nassistant:abcab\nuser:b\nassistant:"]
    starts = sorted(request.start for request in served.engine.asked)
    assert starts == sorted(len(teacher.encode(prompt)) for prompt in prompts)
    assert trace.metrics["xtok/unscored_turns"] == trace.metrics["xtok/unscored"] == 0
    assert 0 < trace.metrics["xtok/aligned"] < 1
    assert sample.ref_logprobs[0] == wire.MARK


def test_own_tokenizer_beside_a_prompt_of_its_own(served, student, switch, tokenizers):
    """The teacher reads each turn behind its own system message, in its own tokens."""
    own = {"tokenizer": str(tokenizers / "teacher"), "system": "be kind"}
    switch(teacher_prompts={"m3": own})
    scored(served.url, conversation(student, "abcab", "c ab"))
    teacher, system = wrapped(TEACHER), "system:be kind\n"
    prompts = ["user:ab c\nassistant:", "user:ab c\nassistant:abcab\nuser:b\nassistant:"]
    starts = sorted(request.start for request in served.engine.asked)
    assert starts == sorted(len(teacher.encode(system + prompt)) for prompt in prompts)


def test_turn_that_the_teacher_would_write_otherwise_is_left_out(served, student):
    """Its tokens have no weight in the distillation loss, and are counted."""
    trace = conversation(student, "abcab", " c ab", said="c ab")
    scored(served.url, trace)
    sample = trace.sample
    nodes = [node for node in trace.nodes if node.sampled]
    first, second = (sum(node.mask) for node in nodes)
    of_turns = [at for at, is_sampled in enumerate(sample.mask) if is_sampled]
    assert all(math.isnan(sample.ref_logprobs[at]) for at in of_turns[first:])
    assert trace.metrics["xtok/unscored_turns"] == 0.5
    assert trace.metrics["xtok/unscored"] == pytest.approx(second / (first + second))
    stamp(sample)
    weights = [sample.ref_kl_weights[at] for at in of_turns]
    assert weights == [1.0] * first + [0.0] * second
    assert not any(map(math.isnan, sample.ref_logprobs))
    assert all(sample.ref_logprobs[at] < 0 for at in of_turns[:first])


def stamp(sample):
    """Do what prime-rl does with a sample of a distilling algorithm, over our hook."""

    def stamp_loss_routing(sample, action_loss_type):
        sample.rl_weights = [0.0] * len(sample.token_ids)
        sample.ref_kl_weights = [float(is_sampled) for is_sampled in sample.mask]

    module = hooked(
        "orchestrator.algo.routing", hooks.hook_stamps, stamp_loss_routing=stamp_loss_routing
    )
    module.stamp_loss_routing(sample, "ref_kl")


def test_pair_that_does_not_align_is_refused_once(served, student, monkeypatch):
    """With its number and the remedy, as soon as enough tokens of the student's were seen."""
    monkeypatch.setattr(teachers_own_tokenizer, "WHOLE_UP_TO", 0)
    monkeypatch.setattr(teachers_own_tokenizer, "JUDGED_TOKENS", 12)
    monkeypatch.setattr(hooks, "log", lambda *_, **__: None)
    first, second = (conversation(student, "abcab c") for _ in range(2))
    with pytest.raises(ValueError) as refused:
        scored(served.url, first, second)
    assert first.metrics and not second.metrics
    # abc|ab| |c and a|bc|a|b| c: of six, bytes 0, 3, 5 and the end of the turn.
    message = str(refused.value)
    assert "66.67%" in message and "97%" in message and "teacher_tokenizers" in message
    assert "--engine local" in message


REFUSED = {
    "a rollout's tools": (lambda trace: setattr(trace, "tools", ["x"]), "has tools: .* Leave it"),
    "a node's tools": (lambda trace: setattr(trace.nodes[0], "tools", ["x"]), "has tools: "),
    "a tool's message": (
        lambda trace: setattr(trace.nodes[0], "message", Message("tool", "found")),
        "has tools: ",
    ),
    "tokens of no branch": (lambda trace: setattr(trace, "asked", [1, 2, 3]), "of no branch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rollout_whose_messages_it_cannot_read_is_refused(served, student, case):
    change, words = REFUSED[case]
    trace = conversation(student, "ab")
    change(trace)
    with pytest.raises(ValueError, match=words):
        scored(served.url, trace)


def test_only_what_the_student_sampled_is_asked_for(served, student, switch):
    """Not the prompt, nor the messages between its turns."""
    switch(teacher_tokenizers={"another": "x"})
    trace = conversation(student, "abcab", "c ab")
    scored(served.url, trace)
    sample, request = trace.sample, served.engine.asked[0]
    sampled = [at for at, trains in enumerate(sample.mask) if trains]
    assert [at for both in request.ranges for at in range(*both)] == sampled
    (branch,), support = trace.branches, support_of(sample.support)
    expected = served.engine.logprobs(branch.token_ids)
    for at in sampled:
        top = expected[at - 1].topk(K)
        assert support.token_ids[at].tolist() == top.indices.tolist()
        assert support.teacher_logprobs[at].tolist() == pytest.approx(top.values.tolist(), abs=1e-5)
    assert support.all_known.all(dim=1).nonzero()[:, 0].tolist() == sampled


def test_turn_of_several_branches_is_asked_for_in_the_first():
    """A rollout forks behind its first turn. What the student did not sample is asked for never."""

    def node(ids, sampled):
        return types.SimpleNamespace(token_ids=ids, mask=[sampled] * len(ids))

    def branch(*nodes):
        return types.SimpleNamespace(
            nodes=nodes, token_ids=[one for each in nodes for one in each.token_ids]
        )

    prompt, turn = node([7, 3], False), node([4, 5], True)
    branches = [branch(prompt, turn, node(ids, True)) for ids in ([9, 8], [6])]
    traces = [types.SimpleNamespace(branches=branches)]
    read = [messages.read_of(traces, one.token_ids).tolist() for one in branches]
    assert read == [[False, False, True, True, True, True], [False] * 4 + [True]]
    assert messages.read_of(traces, [7, 3, 4]) is None


def test_server_without_the_plugin_is_refused(student, monkeypatch):
    with (
        serving(lambda path, body: Reply.of({}, status=404)) as url,
        pytest.raises(InvalidAnswer, match="no scoring plugin.*prime-composer teacher"),
    ):
        scored(url, conversation(student, "ab"))


def test_server_with_another_tokenizer_is_refused(student):
    def answer(path, body):
        if path == SCORE_PATH:
            facts = Facts("m3", 262, 6, 512, "float32", ["sampled", "top_k"], "0.32.0")
            return Reply.of(msgspec.msgpack.encode(ScoreResponse(NAME, VERSION, facts, [])))
        if path == "/detokenize":
            return Reply.of({"prompt": "any"})
        return Reply.of({"tokens": [*wrapped(TEACHER).encode(body["prompt"])[:3], 7]})

    with (
        serving(answer) as url,
        pytest.raises(InvalidAnswer, match="other tokens than the tokenizer .*token 3 is 7, and"),
    ):
        scored(url, conversation(student, "ab"))
