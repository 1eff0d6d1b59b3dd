"""The validator: a right answer passes on every road, and is refused once an invariant breaks."""

import json
import math
from contextlib import closing
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.answers import IMPOSSIBLE, InvalidAnswer, check_scores
from prime_composer.backends.protocols import SamplingParams
from prime_composer.contract import Scores
from prime_composer.samplers.server import ServerSampler
from prime_composer.teachers.responses import read_json_response
from prime_composer.teachers.server import ServerScorer
from prime_composer.upstream.orchestrator.client import whole_sequence
from tests.stand_in import Reply, serving

VOCAB = 12
START = 2
"""Position of the first sampled token."""

few = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def answer_of(seed, n, k, sampled="anywhere", masked=False):
    """Return a teacher's right answer: log-softmaxes of float32 logits, their top K, a sample.

    ``sampled`` is "inside" or "outside" of it. With ``masked``, four ids that are not sampled have
    no probability.
    """
    generator = numpy.random.default_rng(seed)
    logits = generator.normal(0, 2, (n, VOCAB))
    if masked:
        logits[:, generator.permutation(VOCAB)[:4]] = -math.inf
    logprobs = logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))
    ranked = numpy.argsort(-logprobs, axis=1, kind="stable")
    places = {"inside": (0, k), "outside": (k, VOCAB), "anywhere": (0, 8)}[sampled]
    place = generator.integers(*places, n)
    tokens = ranked[numpy.arange(n), place]
    return SimpleNamespace(
        own=torch.tensor(logprobs[numpy.arange(n), tokens], dtype=torch.float32),
        ids=torch.tensor(ranked[:, :k]),
        logprobs=torch.tensor(numpy.take_along_axis(logprobs, ranked, 1)[:, :k]).float(),
        sampled=torch.tensor(tokens),
        ranks=place + 1,
        k=k,
    )


def scores_of(a, known=None, start=START):
    """Return an answer as scores. Some have shapes that no ``Scores`` may have."""
    scores = object.__new__(Scores)
    arrays = {"ref_logprobs": a.own, "token_ids": a.ids, "teacher_logprobs": a.logprobs}
    vars(scores).update(arrays, hidden=(), known=known, start=start, scored=None)
    return scores


def check(a, known=None, **changes):
    """Run the validator, as every scorer does."""
    asked = {"k": a.k, "vocab_size": VOCAB, "origin": "The engine of m"}
    check_scores([(scores_of(a, known), a.sampled, 7)], **asked | changes)


seeds = st.integers(0, 10**6)
rows = st.integers(1, 4)


@few
@given(seeds, rows, st.sampled_from([0, 1, 3, VOCAB]), st.booleans())
def test_right_scores_pass(seed, n, k, masked):
    """Masked ids are in the support of the full vocabulary only, as -inf or as vLLM's -9999."""
    answer = answer_of(seed, n, k, masked=masked)
    check(answer)
    answer.logprobs[answer.logprobs.isinf()] = IMPOSSIBLE
    check(answer)
    check(answer, vocab_size=None)


def put(name, value, last=False):
    """Return a change of one cell of the last row."""

    def change(a):
        array = getattr(a, name)
        array[(-1, -1) if array.ndim == 2 and last else (-1, 0) if array.ndim == 2 else -1] = value

    return change


def scaled(a):
    """Raise the mass of the support and the sampled token above 1, no entry above 0."""
    a.logprobs[-1] = a.logprobs[-1] * 1e-3


def swapped(a):
    for array in (a.ids, a.logprobs):
        array[-1] = array[-1].flip(0)


def shift(amount):
    """Move the sampled token's own log-prob."""

    def change(a):
        a.own[-1] += amount

    return change


def twice(a):
    a.ids[-1, 2] = a.ids[-1, 0]


def above_the_last(a):
    a.own[-1] = a.logprobs[-1, -1] + 1e-3


def cut(name, columns=False):
    def change(a):
        array = getattr(a, name)
        setattr(a, name, array[:, 1:] if columns else array[1:])

    return change


BROKEN = {
    "entry above 0": ("anywhere", put("logprobs", 0.3), "log-prob of id .* is 0.3, where"),
    "mass above 1": ("anywhere", scaled, "mass of|by itself"),
    "negative id": ("anywhere", put("ids", -1), "the id -1, where an id from 0 to 11"),
    "id beyond": ("anywhere", put("ids", VOCAB, last=True), "the id 12, where"),
    "id twice": ("outside", twice, "has the id .* twice"),
    "own moved up": ("inside", shift(1e-3), "by itself and"),
    "own moved down": ("inside", shift(-2.0), "by itself and"),
    "own above the last": ("outside", above_the_last, "is outside the top 3|mass of"),
    "not ranked": ("anywhere", swapped, "where the most probable id first was"),
    "impossible entry": ("inside", put("logprobs", -math.inf, last=True), "mass of|by itself"),
    "row missing": ("anywhere", cut("logprobs"), "gave scores of shapes"),
    "own missing": ("anywhere", cut("own"), "gave scores of shapes"),
    "K - 1 ids": ("anywhere", cut("ids", columns=True), "gave scores of shapes"),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
@few
@given(seeds, rows)
def test_scores_that_break_an_invariant_are_refused(broken, seed, n):
    sampled, change, message = BROKEN[broken]
    answer = answer_of(seed, n, 3, sampled)
    change(answer)
    with pytest.raises(InvalidAnswer, match=message) as caught:
        check(answer)
    assert str(caught.value).startswith("The engine of m gave ")
    if "shapes" not in message:
        assert f"at sequence 7, position {START + n - 1}: " in str(caught.value)


@few
@given(seeds, rows)
def test_ids_that_are_not_known_are_left_out_of_the_check(seed, n):
    """Their numbers and ids may be anything. The whole vocabulary then has a mass below 1."""
    answer = answer_of(seed, n, VOCAB)
    known = torch.ones(n, VOCAB, dtype=torch.bool)
    known[:, [2, 5]] = False
    answer.ids[:, 2], answer.ids[:, 5] = answer.ids[:, 5].clone(), -7
    answer.logprobs[:, [2, 5]] = torch.tensor([math.nan, 3.0])
    answer.sampled, answer.own = answer.ids[:, 0], answer.logprobs[:, 0]
    check(answer, known=known, ranked=False)
    with pytest.raises(InvalidAnswer, match="id .* is nan"):
        check(answer, ranked=False)
    answer.logprobs[-1, 3] = 0.5
    with pytest.raises(InvalidAnswer, match="is 0.5, where"):
        check(answer, known=known, ranked=False)


@pytest.mark.parametrize("by_id", [False, True])
def test_full_vocabulary_has_each_id_once(by_id):
    """Ranked, or by id, as the student's own scores are."""
    answer = answer_of(3, 4, VOCAB)
    if by_id:
        order = answer.ids.argsort(dim=1)
        answer.ids, answer.logprobs = (t.gather(1, order) for t in (answer.ids, answer.logprobs))
    check(answer, ranked=not by_id)
    answer.ids[2, 5] = answer.ids[2, 0]
    with pytest.raises(InvalidAnswer, match=f"position {START + 2}: .* twice"):
        check(answer, ranked=not by_id)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("block", [2, 5])
def test_batch_names_sequence_and_position(monkeypatch, block, k):
    """Sequences are checked together, in blocks that begin and end anywhere."""
    monkeypatch.setattr("prime_composer.backends.answers.BLOCK", block * max(k, 1))
    answers = [answer_of(seed, n, k) for seed, n in enumerate((3, 1, 4))]
    some = torch.ones(4, k, dtype=torch.bool)
    some[0, 2:3] = False

    def check_all():
        known = [None, None, some if k == 3 else None]
        batch = [
            (scores_of(one, known[index], START + index), one.sampled, 7 + index)
            for index, one in enumerate(answers)
        ]
        check_scores(batch, k=k, vocab_size=VOCAB, origin="server", ranked=False)

    check_all()
    for index, row in ((0, 2), (1, 0), (2, 3)):
        right = float(answers[index].own[row])
        answers[index].own[row] = 0.3
        place = f"sequence {7 + index}, position {START + index + row}: .* is 0.3, where"
        with pytest.raises(InvalidAnswer, match=place):
            check_all()
        answers[index].own[row] = right
    answers[1].own = answers[1].own[:0]
    with pytest.raises(InvalidAnswer, match="sequence 8, 1 tokens"):
        check_all()


@pytest.mark.parametrize("value", [-math.inf, IMPOSSIBLE])
def test_masked_token_passes_where_it_may_not_train(value):
    """Inside a support that has all of the probability, and outside of one."""
    answer = answer_of(5, 3, VOCAB, masked=True)
    answer.logprobs[answer.logprobs.isinf()] = IMPOSSIBLE
    answer.sampled[1], answer.own[1] = answer.ids[1, -1], value
    check(answer, trained=False)
    with pytest.raises(InvalidAnswer, match=f"position {START + 1}: .* is {value:.6g}, where"):
        check(answer)
    answer.ids, answer.logprobs, answer.k = answer.ids[:, :2], answer.logprobs[:, :2], 2
    check(answer, trained=False)


@few
@given(seeds, rows)
def test_full_vocabulary_has_a_mass_of_one(seed, n):
    answer = answer_of(seed, n, VOCAB)
    answer.logprobs -= 0.01
    answer.own -= 0.01
    with pytest.raises(InvalidAnswer, match=r"mass of 0\.990\d+, where a mass of 1 was expected"):
        check(answer)
    check(answer, vocab_size=VOCAB + 1)


# --- JSON: what vLLM writes, for both endpoints ---


def json_rows(a):
    """Return the rows of an answer to prompt_logprobs; the own token's entry is the first."""
    first = {"3": {"logprob": -9.0, "rank": a.k + 1}}  # of the prompt's second token
    first |= {str(5 + i): {"logprob": -0.6 - i, "rank": 1 + i} for i in range(a.k)}
    written = [first]
    for token, own, rank, ids, logprobs in zip(
        a.sampled.tolist(),
        a.own.tolist(),
        a.ranks,
        a.ids.tolist(),
        a.logprobs.tolist(),
        strict=True,
    ):
        row = {str(token): {"logprob": own, "rank": int(rank), "decoded_token": " a"}}
        for place, (i, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
            row[str(i)] = {"logprob": logprob, "rank": place, "decoded_token": " b"}
        written.append(row)
    return [None, *written]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a server that answers what a test says, with a model of ``VOCAB`` tokens."""
    root = tmp_path_factory.mktemp("model")
    (root / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    state = SimpleNamespace(answer=b"")

    models = {"data": [{"id": "m", "root": str(root)}]}

    def answer(path, body):
        return Reply.of(models if path == "/v1/models" else state.answer)

    def score(a, written):
        rollout = make_rollout([4, 3], a.sampled.tolist(), [-1.0] * len(a.sampled), "stop", 0)
        state.answer = json.dumps({"choices": [{"index": 0, "prompt_logprobs": written}]}).encode()
        (scores,) = scorer.score([rollout], a.k)
        return scores

    def sample(answer, n, max_tokens):
        state.answer = json.dumps(answer).encode()
        return sampler.generate([[4, 3]], SamplingParams(n=n, max_tokens=max_tokens), seed=0)

    with (
        serving(answer) as url,
        closing(ServerScorer(url)) as scorer,
        closing(ServerSampler(url, seeded=False)) as sampler,
    ):
        yield SimpleNamespace(url=url, score=score, sample=sample)


def in_orchestrator(a, written):
    """Read an answer of ``/inference/v1/generate`` as prime-rl's orchestrator does."""
    content = json.dumps({"choices": [{"index": 0}], "prompt_logprobs": written}).encode()
    sequence = whole_sequence([4, 3, *a.sampled.tolist()])
    return read_json_response(content, sequence, a.k, "The teacher at http://t:8000")


@few
@given(seeds, rows, st.sampled_from([0, 1, 3]))
def test_right_json_passes_on_both_roads(server, seed, n, k):
    """A request with K = 0 asks for one entry, which serves the check."""
    answer = answer_of(seed, n, max(k, 1))
    written, answer.k = json_rows(answer), k
    scores = server.score(answer, written)
    assert scores.ref_logprobs.tolist() == answer.own.tolist()
    assert scores.teacher_logprobs.tolist() == answer.logprobs[:, :k].tolist()
    behind = in_orchestrator(answer, written).rows(slice(START - 1, None))
    assert behind.ref_logprobs.tolist() == answer.own.tolist()
    assert behind.token_ids.tolist() == answer.ids[:, :k].tolist()


def own_of(a):
    return str(int(a.sampled[-1]))


def best_of(a):
    return str(int(a.ids[-1, 0]))


def entry(key, field, value):
    """Return a change of one field of one entry in the last row."""

    def change(a, written):
        written[-1][key(a)][field] = value

    return change


def renamed(key):
    """Give the most probable entry another id."""

    def change(a, written):
        written[-1][key] = written[-1].pop(best_of(a))

    return change


OF_A_RUN = ("own -Infinity", "own -9999", "id beyond")
"""Only who knows that the token trains, or the teacher's size, refuses these."""

BROKEN_JSON = {
    "own NaN": entry(own_of, "logprob", math.nan),
    "own -Infinity": entry(own_of, "logprob", -math.inf),
    "own -9999": entry(own_of, "logprob", -9999.0),
    "own above 0": entry(own_of, "logprob", 0.3),
    "own null": entry(own_of, "logprob", None),
    "entry NaN": entry(best_of, "logprob", math.nan),
    "entry above 0": entry(best_of, "logprob", 3.0),
    "entry true": entry(best_of, "logprob", True),
    "rank a float": entry(best_of, "rank", 1.0),
    "id negative": renamed("-1"),
    "id a float": renamed("1.0"),
    "id huge": renamed(str(2**40)),
    "id beyond": renamed(str(VOCAB)),
    "own missing": lambda a, written: written[-1].pop(own_of(a)),
    "entry missing": lambda a, written: written[-1].pop(str(int(a.ids[-1, 1]))),
    "alien of mass 1": lambda a, written: written[-1].update(
        {str(int(min({*range(VOCAB)} - {*a.ids[-1].tolist()} - {*a.sampled.tolist()}))): {
            "logprob": -1e-4, "rank": 1}}),
    "wide row": lambda a, written: written[-1].update(
        {str(i): {"logprob": -20.0, "rank": i} for i in range(VOCAB, 40)}),
    "row missing": lambda a, written: written.pop(),
    "row null": lambda a, written: written.__setitem__(-1, None),
    "row empty": lambda a, written: written.__setitem__(-1, {}),
    "row too many": lambda a, written: written.append(written[-1]),
    "zeros": lambda a, written: [
        entry.update(logprob=0.0) for row in written[1:] for entry in row.values()],
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN_JSON)
def test_json_that_breaks_an_invariant_is_refused(server, broken):
    answer = answer_of(0, 3, 3, "outside")
    written = json_rows(answer)
    BROKEN_JSON[broken](answer, written)
    with pytest.raises(InvalidAnswer, match=f"^The .* at {server.url} ") as caught:
        server.score(answer, written)
    assert broken != "entry missing" or "--max-logprobs 3" in str(caught.value)
    if broken in OF_A_RUN:
        in_orchestrator(answer, written)
        return
    with pytest.raises(InvalidAnswer, match="^The teacher at http://t:8000 "):
        in_orchestrator(answer, written)


# --- Completions ---


def completions_of(seed, n, tokens):
    """Return an answer with n sampled completions."""
    generator = numpy.random.default_rng(seed)
    return {
        "choices": [
            {
                "index": index,
                "token_ids": generator.integers(0, VOCAB, tokens).tolist(),
                "finish_reason": "length",
                "logprobs": {"token_logprobs": (-generator.exponential(2, tokens)).tolist()},
            }
            for index in range(n)
        ]
    }


def last(path, value):
    """Return a change of the last value of a list in the last choice."""

    def change(answer):
        choice = answer["choices"][-1]
        (choice["token_ids"] if path == "token_ids" else choice["logprobs"][path])[-1] = value

    return change


def in_choice(**fields):
    return lambda answer: answer["choices"][-1].update(fields)


BROKEN_COMPLETIONS = {
    "mu NaN": last("token_logprobs", math.nan),
    "mu -9999": last("token_logprobs", -9999.0),
    "mu above 0": last("token_logprobs", 0.3),
    "mu true": last("token_logprobs", True),
    "one mu for all": in_choice(logprobs={"token_logprobs": [-1.0]}),
    "no mu": in_choice(logprobs=None),
    "id beyond": last("token_ids", VOCAB),
    "id a float": last("token_ids", 5.5),
    "too long": in_choice(token_ids=[1] * 9, logprobs={"token_logprobs": [-1.0] * 9}),
    "empty": in_choice(token_ids=[], logprobs={"token_logprobs": []}),
    "one too few": lambda answer: answer["choices"].pop(),
    "one too many": lambda answer: answer["choices"].append({**answer["choices"][0], "index": 2}),
    "one twice": in_choice(index=0),
    "gave up": in_choice(finish_reason="abort"),
}


def test_completions_are_put_in_order(server):
    answer = completions_of(0, 3, 4)
    found = server.sample({"choices": answer["choices"][::-1]}, 3, 4)
    assert [r.completion_ids for r in found] == [c["token_ids"] for c in answer["choices"]]


@pytest.mark.parametrize("broken", BROKEN_COMPLETIONS)
def test_completions_that_break_an_invariant_are_refused(server, broken):
    answer = completions_of(0, 2, 3)
    BROKEN_COMPLETIONS[broken](answer)
    with pytest.raises(InvalidAnswer, match=f"^The .* at {server.url} "):
        server.sample(answer, 2, 4)
