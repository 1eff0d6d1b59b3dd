"""Inside prime-rl: a teacher with the student's tokens that reads prompts of its own."""

import asyncio
import json
import math
import os
import types

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("fastapi", reason="vLLM's server is not installed")
pytest.importorskip("openai")

from prime_composer.backends.protocols import Rollout  # noqa: E402
from prime_composer.contract import TeacherHead  # noqa: E402
from prime_composer.teachers.own_prompt import StudentAnswer  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from prime_composer.upstream import launches, left_prompts  # noqa: E402
from prime_composer.upstream.keys import SWITCH  # noqa: E402
from prime_composer.upstream.orchestrator import hooks, messages  # noqa: E402
from prime_composer.upstream.orchestrator.mixture import client_of  # noqa: E402
from prime_composer.upstream.teachers import read_entries  # noqa: E402
from prime_composer.upstream.trainer.questions import TeacherConnections, Wanted  # noqa: E402
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR, HEADER  # noqa: E402
from tests.scoring.conftest import vllm_without_its_libraries  # noqa: E402, F401
from tests.scoring.served_rows import Rows, Served  # noqa: E402
from tests.teachers.own import STUDENT, wrapped  # noqa: E402
from tests.upstream import test_own_tokenizer as own  # noqa: E402
from tests.upstream.test_orchestrator import client_module  # noqa: E402

switch = own.switch
student = own.student

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ mark }}{% endif %}"
)
PROMPT = {"system": "be kind", "template_args": {"mark": "b"}}
READ = ["system>be kind\nuser>ab c\nb", "system>be kind\nuser>ab c\nassistant>abcab\nuser>b\nb"]


@pytest.fixture
def tokenizers(tmp_path):
    """Save one tokenizer with two chat templates; return the folders' parent."""
    for name, template in (("teacher", TEMPLATE), ("student", own.TEMPLATE)):
        tokenizer = wrapped(STUDENT)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    messages.served_prompts.cache_clear()
    return tmp_path


@pytest.fixture
def served(vllm_without_its_libraries):  # noqa: F811
    """Return the server of a teacher."""
    with Served(Rows(3, len(wrapped(STUDENT)))) as one:
        yield one


@pytest.fixture
def other(served):
    """Return the server of another teacher."""
    with Served(Rows(4, len(wrapped(STUDENT)))) as two:
        yield two


def rows(served, prompt, turn):
    """Return log q of a turn's tokens behind a text, of the whole vocabulary in float64."""
    ids = wrapped(STUDENT).encode(prompt, add_special_tokens=False)
    both = torch.tensor([*ids, *turn])
    return served.engine.logprobs(both)[len(ids) - 1 : -1]


def own_prompt(tokenizers, **prompt):
    """Return settings of a teacher that reads a prompt of its own."""
    own = {"tokenizer": str(tokenizers / "teacher"), **prompt}
    return {"teacher_tokenizers": None, "teacher_prompts": {"m3": own}}


def turns_of(trace):
    """Return the student's tokens of each turn, and their places in the branch."""
    places, begin = [], 0
    for node in trace.nodes:
        at = [begin + place for place, is_sampled in enumerate(node.mask) if is_sampled]
        places += [at] if at else []
        begin += len(node.token_ids)
    ids = trace.branches[0].token_ids
    return [([ids[place] for place in at], at) for at in places]


def test_each_turn_is_scored_behind_the_teachers_prompt(served, switch, tokenizers, student):
    """Log q of sampled tokens and support, by the rows behind what the template wrote."""
    switch(**own_prompt(tokenizers, **PROMPT))
    trace = own.conversation(student, "abcab", "c ab")
    own.scored(served.url, trace)
    support = own.support_of(trace.sample.support)
    for (turn, places), prompt in zip(turns_of(trace), READ, strict=True):
        q = rows(served, prompt, turn)
        sampled = [trace.sample.ref_logprobs[place] for place in places]
        expected = q.gather(1, torch.tensor(turn).unsqueeze(1))[:, 0]
        assert sampled == pytest.approx(expected.tolist(), abs=1e-4)
        best = q.topk(own.K)
        assert support.token_ids[places].tolist() == best.indices.tolist()
        torch.testing.assert_close(
            support.teacher_logprobs[places].double(), best.values, atol=1e-4, rtol=0
        )
    starts = sorted(request.start for request in served.engine.asked)
    assert {len(student.encode(prompt)) for prompt in READ} <= {*starts}


def asked_of_orchestrator(trace):
    """Let prime-rl's orchestrator ask for the scores of a rollout, and return what it gets."""

    async def ask():
        hooks.SCORING.set(hooks.Scoring(True, [trace]))
        client = types.SimpleNamespace(default_headers={})
        return await client_module().prefill_logprobs(client, "m3", trace.branches[0].token_ids)

    return asyncio.run(ask())


PLACE = 7  # Of a rollout in its micro-batch


def rollout_of(trace):
    """Return a rollout as the trainer has it."""
    ids = torch.tensor(trace.branches[0].token_ids)
    mask = torch.tensor([trains for node in trace.nodes for trains in node.mask])
    return Rollout(ids, mask, torch.full(ids.shape, torch.nan), "length", 0)


def scores_of_trainer(served, rollout, hidden=False):
    """Return a teacher's scores of a rollout that the trainer asks for."""
    entries = [{"url": served.url, "model": served.model, "weight": 1.0}]
    place = slice(PLACE, PLACE + len(rollout.token_ids))
    connections = TeacherConnections(entries, own.K, hidden, own_prompts=[served.model])
    try:
        (scores,) = connections.ask([Wanted(place, rollout, read_entries(entries))])()
    finally:
        connections.frozen(read_entries(entries)[0]).scorer.close()
    return scores


@pytest.mark.parametrize("hidden", [False, True])
def test_trainer_asks_behind_the_prompts_that_were_left(
    hidden, served, switch, tokenizers, student, tmp_path, monkeypatch
):
    """The orchestrator has the messages, and the trainer the tokens."""
    switch(asked_by="trainer", **own_prompt(tokenizers, **PROMPT))
    monkeypatch.setenv(SWITCH, f"@{launches.begin(tmp_path, os.environ[SWITCH])}")
    trace = own.conversation(student, "abcab", "c ab")
    assert all(map(math.isnan, asked_of_orchestrator(trace)[1:]))
    assert not served.engine.asked
    head = TeacherHead(served.engine.weight, tolerance=1e-4, origin="The teacher")
    monkeypatch.setattr(ServerScorer, "_teacher_head", lambda _: head)
    rollout = rollout_of(trace)
    scores = scores_of_trainer(served, rollout, hidden)
    assert scores.start == PLACE + rollout.start
    for (turn, places), prompt in zip(turns_of(trace), READ, strict=True):
        q = rows(served, prompt, turn)
        at = torch.tensor(places) - rollout.start
        sampled = q.gather(1, torch.tensor(turn).unsqueeze(1))[:, 0]
        torch.testing.assert_close(scores.ref_logprobs[at].double(), sampled, atol=1e-4, rtol=0)
        assert torch.equal(scores.token_ids[at], q.topk(own.K).indices)
        if hidden:
            (share,) = scores.hidden
            found = (share.states[at].double() @ share.head.weight.double().T).log_softmax(-1)
            torch.testing.assert_close(found, q, atol=1e-4, rtol=0)
    assert torch.equal(scores.all_scored, rollout.trained)


def test_prompt_that_was_not_left_is_named(served, student, switch, tmp_path, monkeypatch):
    """In processes without a launch, and of another launch."""
    monkeypatch.setattr(launches, "WAIT", 0)
    rollout = rollout_of(own.conversation(student, "abcab"))
    with pytest.raises(ValueError, match=f"launcher `rl`.*{SWITCH}=@FILE"):
        scores_of_trainer(served, rollout)
    monkeypatch.setenv(SWITCH, f"@{launches.begin(tmp_path, os.environ[SWITCH])}")
    with pytest.raises(ValueError, match="teacher_prompts.*'m3'.*let both processes reach"):
        scores_of_trainer(served, rollout)


def test_left_prompts_are_one_for_each_of_the_student(switch, tmp_path, monkeypatch):
    """Another one for the same tokens is refused, and those of some hours ago are removed."""
    monkeypatch.setenv(SWITCH, f"@{launches.begin(tmp_path, os.environ[SWITCH])}")
    read = Rollout.not_sampled(torch.tensor([3, 4, 5, 6]), 3, "length")
    now = [360_000.0]
    monkeypatch.setattr(left_prompts.time, "time", lambda: now[0])
    for _ in range(2):
        left_prompts.leave("m3", [StudentAnswer(read, [1, 2])])
    with pytest.raises(ValueError, match="'m3' has two prompts.*asked_by"):
        left_prompts.leave("m3", [StudentAnswer(read, [1, 7])])
    (file,) = tmp_path.rglob("prompts/*/*")
    now[0] += 3600 * left_prompts.HOURS_KEPT
    left_prompts.leave("m3", [])
    assert file.exists()
    now[0] += 3600
    left_prompts.leave("m3", [])
    assert not file.exists()


def test_question_of_the_task_goes_into_the_prompt(served, switch, tokenizers, student):
    """prompt_template writes the problem's own question, and not the student's prompt."""
    args = {"mark": "b"}
    switch(**own_prompt(tokenizers, prompt_template="c{question}", template_args=args))
    trace = own.conversation(student, "abcab")
    trace.task = own.types.SimpleNamespace(data=own.types.SimpleNamespace(question="ab"))
    own.scored(served.url, trace)
    ((turn, places),) = turns_of(trace)
    q = rows(served, "user>cab\nb", turn)
    expected = q.gather(1, torch.tensor(turn).unsqueeze(1))[:, 0].tolist()
    assert [trace.sample.ref_logprobs[at] for at in places] == pytest.approx(expected, abs=1e-4)
    assert served.engine.asked[-1].start == len(student.encode("user>cab\nb"))


def test_mixture_of_two_prompts_is_that_of_their_rows(served, other, switch, tokenizers, student):
    """One teacher reads its own prompt, the other one the student's tokens."""
    both = served, other
    switch(teachers_mixed=True, **own_prompt(tokenizers, **PROMPT))
    trace = own.conversation(student, "abcab")
    entries = [
        {"url": f"{one.url}/v1", "model": one.model, "weight": weight}
        for one, weight in zip(both, (1.0, 3.0), strict=True)
    ]

    async def run():
        client = client_of(both[0].url, API_KEY_VAR).with_options(
            default_headers={HEADER: json.dumps(entries)}
        )
        await own.opd(client)(trace)
        client_of.cache_clear()

    asyncio.run(run())
    ((turn, places),) = turns_of(trace)
    q = rows(both[0], READ[0], turn).exp() / 4
    q += rows(both[1], "user:ab c\nassistant:", turn).exp() * 3 / 4
    expected = q.log().gather(1, torch.tensor(turn).unsqueeze(1))[:, 0].tolist()
    assert [trace.sample.ref_logprobs[at] for at in places] == pytest.approx(expected, abs=1e-4)
