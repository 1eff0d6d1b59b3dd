"""A kind of scores from outside the package, from the server to a loss, on every road.

What the kind writes is one file, ``recent_ids.py``: the kind, and five lines that open a teacher
with it for a recipe. Besides it is named three times: to the server in ``PRIME_COMPOSER_KINDS``, in
a recipe as the teacher's ``backend``, and to prime-rl's processes as the adapter's ``scores``. No
file of the package knows it.
"""

import asyncio
import copy
import json
import re
import types
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

from prime_composer.backends.alignment import make_rollout  # noqa: E402
from prime_composer.backends.http import ServerError  # noqa: E402
from prime_composer.backends.protocols import SamplingParams  # noqa: E402
from prime_composer.contract import LossInputs, Support  # noqa: E402
from prime_composer.local.opening import open_engine  # noqa: E402
from prime_composer.losses import parse_loss, setup_loss_fn  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import parse_recipe  # noqa: E402
from prime_composer.scoring import kinds  # noqa: E402
from prime_composer.scoring.wire import ENVELOPE_BYTES, encode_ids  # noqa: E402
from prime_composer.step.batch import Sample  # noqa: E402
from prime_composer.step.student_forward import student_inputs  # noqa: E402
from prime_composer.teachers.mixture import mix  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402
from prime_composer.upstream import wire  # noqa: E402
from prime_composer.upstream.orchestrator import hooks as orchestrator_hooks  # noqa: E402
from prime_composer.upstream.orchestrator.client import Requests  # noqa: E402
from prime_composer.upstream.orchestrator.teachers import client_of  # noqa: E402
from prime_composer.upstream.settings import AdapterSettings  # noqa: E402
from prime_composer.upstream.trainer import hooks  # noqa: E402
from prime_composer.upstream.trainer.adapter import adapter  # noqa: E402
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR, HEADER  # noqa: E402
from tests.conftest import TINY_MODEL  # noqa: E402
from tests.scoring.conftest import post, question  # noqa: E402
from tests.scoring.own_kind import D, Rows, Served, V, reverse_kl  # noqa: E402
from tests.scoring.recent_ids import FLOOR, RECENT_IDS, RecentIds, recent  # noqa: E402
from tests.tiny_qwen import VOCAB, make_model  # noqa: E402
from tests.upstream import fake_prime_rl  # noqa: E402
from tests.vllm_process import QUICK, TeacherProcess, save_tokenizer  # noqa: E402

NAME = "tests.scoring.recent_ids:RECENT_IDS"
K = 4
LOSS = {"type": "topk_reverse_kl", "k": K}
WEIGHTS = (0.25, 0.75)
LENGTHS = (9, 7)
"""Of the sequences of a bin."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Name the kind to the server, and forget it afterwards."""
    monkeypatch.setattr(kinds, "KINDS", kinds.KINDS)
    before = dict(kinds.KINDS)
    monkeypatch.setenv(kinds.VARIABLE, NAME)
    yield
    for name in kinds.KINDS.keys() - before.keys():
        del kinds.KINDS[name]


@pytest.fixture
def served(vllm_without_its_libraries):
    """Return a function: servers of two teachers with a vocabulary of this size."""
    with ExitStack() as opened:

        def make(vocab_size=V):
            return [opened.enter_context(Served(Rows(seed, vocab_size))) for seed in (1, 2)]

        yield make


def sequences(vocab_size=V):
    """Return token ids of which many come again."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 6, (n,), generator=generator).tolist() for n in LENGTHS]


def check(loss, expected, pairs):
    """Check a loss against that of ``reverse_kl``, and the gradients of both.

    Args:
        loss, expected: numbers with a graph.
        pairs: tensors that ``loss`` is differentiated for, and the same in float64.
    """
    torch.testing.assert_close(loss.detach().double(), expected.detach(), atol=2e-5, rtol=1e-5)
    ours, plain = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(loss, ours, allow_unused=True)
    for one, other in zip(gradients, torch.autograd.grad(expected, plain), strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-4)
        assert other.abs().max() > 1e-3


def loss_of(inputs):
    """Return the loss over its inputs."""
    return setup_loss_fn(parse_loss(LOSS))(inputs).loss


PACKAGE = Path(kinds.__file__).parents[1]
ROAD = (
    *("scoring/wire.py", "scoring/worker.py", "scoring/requests.py", "scoring/engine.py"),
    *("scoring/endpoint.py", "teachers/client.py", "teachers/responses.py", "teachers/mixture.py"),
    *(
        "teachers/server.py",
        "teachers/vllm.py",
        "local/engine.py",
        "local/opening.py",
        "local/collect.py",
    ),
    *("upstream/wire.py", "upstream/orchestrator/client.py", "upstream/trainer/teachers.py"),
)


def test_no_file_of_the_package_knows_it_and_the_road_knows_no_kind_by_name():
    """So a kind touches one file, its own."""
    named = [str(path) for path in PACKAGE.rglob("*.py") if "recent_ids" in path.read_text()]
    compared = re.compile(r"""["'](sampled|top_k|given)["']""")
    assert named == [] and [name for name in ROAD if compared.search(text_of(name))] == []


def text_of(name):
    return (PACKAGE / name).read_text()


def test_some_places_are_empty_and_some_ids_below_the_floor(served):
    """The example is one: a server leaves both out, and says so."""
    (one, _) = served()
    ids = sequences()[0]
    with closing(ServerScorer(one.url, kind=RECENT_IDS)) as scorer:
        (scores,) = scorer.score([make_rollout(ids[:1], ids[1:], [0.0] * 8, "length", 0)], K)
    log_q = one.engine.logprobs(ids)
    below = 0
    for row, t in enumerate(range(1, 9)):
        asked = recent(ids[: t + 1], K)
        expected = [i >= 0 and (i == ids[t] or log_q[t - 1, i] >= FLOOR) for i in asked]
        below += sum(i >= 0 for i in asked) - sum(expected)
        assert scores.token_ids[row].tolist() == asked
        assert scores.known[row].tolist() == expected
        for i, known, value in zip(asked, expected, scores.teacher_logprobs[row], strict=True):
            assert not known or float(value) == pytest.approx(float(log_q[t - 1, i]), abs=1e-5)
    assert below > 0 and not scores.known.all(1)[0]
    assert [request.kind for request in one.engine.asked[0].requests] == ["sampled", "recent_ids"]


def test_one_machine_trains_on_it_with_two_teachers(served, tiny_recipe):
    raw = tiny_recipe(loss=LOSS)
    raw["student"] = {"prepare": {**TINY_MODEL, "sft_steps": 5, "seed": 2}}
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    folder = prepare_models(recipe, problems)["student"]
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    servers = served(size)
    del raw["teacher"]
    raw["teachers"] = {
        name: {
            "model": one.model, "url": one.url, "weight": weight,
            "backend": "tests.scoring.recent_ids:open_teacher",
        }
        for name, one, weight in zip("ab", servers, WEIGHTS, strict=True)
    }  # fmt: skip
    recipe = parse_recipe(raw)
    with open_engine(recipe, problems, prepare_models(recipe, problems), lambda _: None) as engine:
        prompts = [engine.problems.prompt(problem) for problem in problems.practice[:3]]
        rollouts = engine.sampler.generate(prompts, SamplingParams(max_tokens=8), seed=3)
        samples = [Sample(*pair) for pair in zip(rollouts, problems.practice, strict=False)]
        scored = engine.score(samples).samples
        assert any(not sample.scores.known.all() for sample in scored)
        loss = loss_of(student_inputs(engine.model, scored))
        plain = copy.deepcopy(engine.model).double()
        expected = 0
        for rollout in rollouts:
            ids = rollout.token_ids
            log_p = plain(ids[None]).logits[0].log_softmax(-1)
            teachers = of_both(servers, ids)
            expected = expected + reverse_kl(log_p, teachers, ids.tolist(), rollout.start, K).sum()
        check(loss, expected, list(zip(engine.model.parameters(), plain.parameters(), strict=True)))


def of_both(servers, ids):
    """Return weights and log q of the teachers, for ``reverse_kl``."""
    return [(w, one.engine.logprobs(ids)) for w, one in zip(WEIGHTS, servers, strict=True)]


def micro_batch(**more):
    """Return prime-rl's micro-batch of v0.7 and later: two sequences."""
    trained = torch.ones(1, sum(LENGTHS), dtype=torch.bool)
    trained[0, [0, 1, LENGTHS[0], LENGTHS[0] + 1]] = False
    return {
        "input_ids": torch.tensor([sum(sequences(), [])]),
        "loss_mask": trained,
        "temperatures": torch.ones(1, sum(LENGTHS)),
        "ref_kl_weights": trained.float(),
        "rl_weights": torch.zeros(1, sum(LENGTHS)),
        "routed_experts": None,
        "sequence_lengths": list(LENGTHS),
        "env_names": ["sums"] * sum(LENGTHS),
        **more,
    }


class Output(torch.nn.Linear):
    """Stands in for prime-rl's plain head."""

    def __init__(self):
        super().__init__(D, V, bias=False)

    def forward(self, hidden_states, labels=None, temperature=None):
        return {"logits": super().forward(hidden_states)}


def train_step(monkeypatch, servers, tensors, **settings):
    """Do what prime-rl's trainer does with a micro-batch, and check loss and gradients."""
    switch(monkeypatch, **settings)
    module = fake_prime_rl.loss_module("v0.7")
    fake_prime_rl.put(monkeypatch, module)
    adapter.cache_clear()
    hooks.hook_loss(module)
    state, head = adapter(), fake_prime_rl.head_module(Output)()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    n, ids, mask = sum(LENGTHS), tensors["input_ids"], tensors["loss_mask"][0]
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, n, D, generator=generator).requires_grad_()
    state.batch_came([tensors])
    state.begin(tensors)
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    logits = head(hidden, labels, temperature=tensors["temperatures"])["logits"][0]
    own = logits.log_softmax(-1).gather(1, labels[0, :, None])[:, 0]
    parts = torch.cat([torch.full((1,), -1.0), own[:-1]]).split(LENGTHS)
    state.micro_batch.place(parts)
    loss = 0
    for part, its in zip(parts, mask.split(LENGTHS), strict=True):
        fields = state.aligned(part)
        loss = loss + loss_of(LossInputs(part, part.detach(), None, None, its, **only(fields)))
    plain, weight = (x.detach().double().requires_grad_() for x in (hidden, head.weight))
    expected, first = 0, 0
    for tokens in sequences():
        log_p = (plain[0, first : first + len(tokens)] @ weight.T).log_softmax(-1)
        teachers = of_both(servers, tokens)
        expected = expected + reverse_kl(log_p, teachers, tokens, 2, K).sum()
        first += len(tokens)
    check(loss, expected, [(hidden, plain), (head.weight, weight)])
    if state._teachers is not None:
        for frozen in state._teachers._frozen.values():
            frozen.scorer.close()
    adapter.cache_clear()


def only(fields):
    return {name: fields[name] for name in ("support", "token_ids")}


def switch(monkeypatch, **settings):
    """Turn the adapter on, as prime-rl's launcher does for its processes."""
    settings = AdapterSettings(loss=LOSS, k=K, scores=NAME, **settings)
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)


def entries(servers):
    return [
        {"url": one.url, "model": one.model, "weight": weight}
        for one, weight in zip(servers, WEIGHTS, strict=True)
    ]


def test_prime_rls_orchestrator_asks_for_it_and_its_trainer_reads_it(served, monkeypatch):
    """By the hook of v0.7 and later, prime-rl's own openai client and its field on the wire."""
    servers = served()
    switch(monkeypatch)
    monkeypatch.setattr(orchestrator_hooks, "REQUESTS", Requests())
    module = types.ModuleType("prime_rl.utils.client")

    async def prefill_logprobs(openai, model, token_ids):
        raise AssertionError("prime-rl asks by itself")

    module.prefill_logprobs = prefill_logprobs
    orchestrator_hooks.hook_client(module)
    client = types.SimpleNamespace(default_headers={HEADER: json.dumps(entries(servers))})

    async def both():
        calls = (module.prefill_logprobs(client, "m", tokens) for tokens in sequences())
        found = await asyncio.gather(*calls)
        for one in servers:
            await client_of(one.url, API_KEY_VAR).close()
        return found

    sent = asyncio.run(both())
    packed = torch.cat([torch.from_numpy(wire.pack(one.scores).copy()) for one in sent])
    train_step(monkeypatch, servers, micro_batch(routed_experts=packed[None]))


def test_prime_rls_trainer_asks_for_it(served, monkeypatch):
    servers = served()
    teachers = entries(servers)
    train_step(monkeypatch, servers, micro_batch(), asked_by="trainer", teachers=teachers)


def test_server_that_does_not_know_it_is_named(served, monkeypatch):
    monkeypatch.delenv(kinds.VARIABLE)
    (one, _) = served()
    ids = sequences()[0]
    rollout = make_rollout(ids[:1], ids[1:], [0.0] * 8, "length", 0)
    with closing(ServerScorer(one.url, kind=RECENT_IDS)) as scorer:
        with pytest.raises(ServerError, match="'recent_ids' .*PRIME_COMPOSER_KINDS"):
            scorer.score([rollout], K)
        with pytest.raises(ServerError, match="log-probs of recent ids need"):
            scorer.score([rollout], K, binary=False)
        assert scorer.score([rollout], 0)[0].k == 0  # the sampled token's own


IDS = encode_ids([[5, -1], [6, 5]])
WRONG = {
    "no parameters": ({}, "the kind recent_ids and its parameters go together"),
    "not asked": ({"kinds": ["sampled"], "own": (2, {"floor": -1.0}, IDS)}, "go together"),
    "other columns": ({"own": (3, {"floor": -1.0}, IDS)}, "recent ids: not 3"),
    "an id outside": ({"own": (1, {"floor": -1.0}, encode_ids([[1], [100]]))}, "id 100"),
    "no rows": ({"own": (1, {"floor": -1.0}, "")}, "recent ids: not 1"),
    "rows of another length": ({"own": (1, {"floor": -1.0}, encode_ids([[1]]))}, "multiple of 4"),
    "no floor": ({"own": (2, {}, IDS)}, "a floor is needed"),
    "k negative": ({"own": (-1, {"floor": -1.0}, IDS)}, "cannot be read"),
    "of another kind": (
        {"own": (2, {"floor": -1.0}, IDS), "others": {"top_k": {"k": 1}}},
        r"parameters of \['top_k'\], where those of \['recent_ids'.*\] are known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_400_and_never_reach_the_engine(app, engine, name):
    changes, words = WRONG[name]
    parameters = dict(changes.get("others", {}))
    if "own" in changes:
        k, shared, rows = changes["own"]
        parameters["recent_ids"] = {"k": k, "shared": shared, "rows": rows}
    asked = changes.get("kinds", ["sampled", "recent_ids"])
    answer = post(app, question(([5, 6, 7], 1, {"parameters": parameters}), kinds=asked))
    assert answer.status_code == 400 and engine.asked == []
    assert re.search(words, answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recent_ids", "name a kind of scores as 'my_package.my_module:KIND'"),
        ("tests.scoring.recent_ids:FLOOR", "'FLOOR' is no object of a subclass of"),
        ("tests.scoring.nowhere:KIND", "cannot be imported"),
        ("tests.scoring.test_own_kind:OTHER", "there is another kind 'recent_ids'"),
    ],
)
def test_server_with_a_wrong_name_says_so_at_its_start(app, monkeypatch, name, words):
    monkeypatch.setenv(kinds.VARIABLE, f"{NAME},{name}")
    with pytest.raises(ValueError, match=f"PRIME_COMPOSER_KINDS='{name}'.*{words}"):
        kinds.register_named()


OTHER = RecentIds()


def test_loss_without_a_support_refuses_it_inside_prime_rl():
    settings = AdapterSettings(loss={"type": "sampled_reverse_kl"}, scores=NAME)
    with pytest.raises(ValueError, match="scores = .* compares a support .* Leave scores out"):
        settings.derived(parse_loss(settings.loss))


def test_switch_without_it_is_as_older_versions_read_it():
    assert "scores" not in json.loads(AdapterSettings(loss=LOSS, k=K).to_env()["PRIME_COMPOSER"])


def test_given_numbers_beyond_a_question_come_in_parts(served, monkeypatch):
    """Each part has its own rows, and what is known of them."""
    (one, _) = served()
    ids = sequences()[0]
    rollout = make_rollout(ids[:1], ids[1:], [0.0] * 8, "length", 0)
    with closing(ServerScorer(one.url, kind=RECENT_IDS)) as scorer:
        (whole,) = scorer.score([rollout], K)
        known = scorer.client.known
        limits = msgspec.structs.replace(known.facts.limits, question_bytes=ENVELOPE_BYTES + 100)
        monkeypatch.setattr(known, "facts", msgspec.structs.replace(known.facts, limits=limits))
        (parts,) = scorer.score([rollout], K)
    assert len(one.engine.asked) > 3
    assert torch.equal(parts.known, whole.known) and torch.equal(parts.token_ids, whole.token_ids)
    torch.testing.assert_close(parts.teacher_logprobs, whole.teacher_logprobs)


@pytest.mark.vllm
def test_vllm_serves_it_beside_another_teacher(served, tmp_path):
    """A real server's teacher, mixed with a stand-in's, against the model's own float64."""
    model, beside = make_model(tied=True, seed=3), served(VOCAB)[0]
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", VOCAB)
    options = ["--dtype", "float32", "--enable-chunked-prefill", "--max-num-batched-tokens", 16]
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 8, (40,), generator=generator).tolist()
    rollout = make_rollout(ids[:3], ids[3:], [0.0] * 37, "length", 0)
    scores = []
    with TeacherProcess(tmp_path / "model", tmp_path / "log", *options, *QUICK) as server:
        for url in (server.url, beside.url):
            with closing(ServerScorer(url, kind=RECENT_IDS)) as scorer:
                scores += scorer.score([rollout], K)
    mixed = mix(torch.tensor(ids[3:]), scores, WEIGHTS)
    with torch.no_grad():
        log_q = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    teachers = list(zip(WEIGHTS, (log_q, beside.engine.logprobs(ids)), strict=True))
    logits = torch.randn(40, VOCAB, generator=generator).requires_grad_()
    plain = logits.detach().double().requires_grad_()
    student = logits.log_softmax(-1)[2:-1].gather(1, mixed.token_ids.clamp(min=0))
    support = Support(mixed.token_ids, mixed.teacher_logprobs, student, mixed.known)
    nothing = torch.zeros(37)
    loss = loss_of(
        LossInputs(nothing.clone().requires_grad_(), nothing, None, None, nothing == 0,
                   support=support)
    )  # fmt: skip
    check(loss, reverse_kl(plain.log_softmax(-1), teachers, ids, 3, K).sum(), [(logits, plain)])
