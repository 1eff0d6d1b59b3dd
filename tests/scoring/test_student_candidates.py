"""The kind ``student_candidates``: a worker's sums against those of whole rows."""

import random
from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest
import torch

from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.cross_tokenizer.finish import token_scores
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.sums import Sums
from prime_composer.cross_tokenizer.teacher_rows import Rows
from prime_composer.cross_tokenizer.token_bytes import TokenBytes
from prime_composer.scoring import kinds, pair_tables, worker
from prime_composer.scoring.kinds import KindRequest
from prime_composer.scoring.pair_tables import Kept, PairTables, UnknownTables, WrongTables
from prime_composer.scoring.student_candidates import STUDENT_CANDIDATES, register
from prime_composer.scoring.wire import VERSION, Facts, ScoreRequest, SequenceRequest
from prime_composer.scoring.worker import Piece, Progress, RowsRequest, answer_group
from prime_composer.teachers.own_tokenizer import ByRows
from prime_composer.teachers.student_candidates import (
    MISSING,
    Part,
    Questions,
    read_answer,
    share_columns,
    tables_of,
)
from tests.cross_tokenizer.toys import byte_level, random_tokenizer

ALPHABET = "abc "


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Return the tables that a worker keeps, of this test alone."""
    register()
    made = Kept(4)
    monkeypatch.setattr(pair_tables, "KEPT_HERE", made)
    monkeypatch.setattr("prime_composer.scoring.student_candidates.KEPT_HERE", made)
    return made


def pair_of(seed, *, words, signs=(False, False), leads=(b"", b""), counts=(24, 10)):
    """Return a pair of random tokenizers."""
    teacher, student = (
        random_tokenizer(10 * seed + at, ALPHABET, counts[at], words=words, signs=signs[at])
        for at in range(2)
    )
    ends = len(teacher.of_id) - 1, len(student.of_id) - 1
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=40)) for _ in range(30)]
    return Pair(teacher, student, [ends[0]], ends[1], texts, leads)


def written(pair, seed):
    """Return a student's tokens: mostly those that it writes, and some that it would not."""
    rng = random.Random(seed)
    text = pair.student_lead.decode() + "".join(rng.choices(ALPHABET, k=24)).strip()
    ids = [*pair.student.encode(text)]
    if seed % 2:
        ordinary = [i for i, c in enumerate(pair.student.of_id) if c and not c.strip(b"abc")]
        at = rng.randrange(1, len(ids))
        ids[at:at] = rng.choices(ordinary, k=2)
    return [*ids, pair.student_end]


def logits_of(pair, plan, seed):
    """Return random rows of the teacher as logits. Its head has three entries too many."""
    rng = torch.Generator().manual_seed(seed)
    n, size = len(plan.teacher_ids) + 1, len(pair.teacher.of_id)
    logits = 2.5 * torch.randn(n, size + 3, generator=rng)
    logits[:, size:] = -30
    return logits


def asked(pair, plan, logits, k, *, pieces=1, listed=64):
    """Return the question about a completion, and what a worker answers in some pieces."""
    question = Questions(pair).of(plan, k)
    name = question.beside.tables.name
    if name not in pair_tables.KEPT_HERE:
        content = question.beside.tables.content
        pair_tables.KEPT_HERE.keep(PairTables.of(content, logits.shape[1]))
    next_ids = [*plan.teacher_ids, pair.teacher_ends[0]]
    n = len(next_ids)
    own = checked(question.beside.request, n, logits.shape[1])
    listed = min(listed, logits.shape[1])
    requests = KindRequest("sampled"), KindRequest("top_k", listed), own
    progress = Progress(RowsRequest(1, requests), 0, n)
    borders = np.linspace(0, n, pieces + 1).astype(int).tolist()
    for low, high in zip(borders, borders[1:], strict=False):
        if high > low:
            piece = Piece(low, low, next_ids[low:high], progress)
            answer_group(lambda h: h, logits.shape[1], logits, [piece])
    assert not progress.error, progress.error
    arrays = {name: array.numpy() for name, array in progress.arrays.items()}
    return question, Scores(
        torch.from_numpy(arrays["sampled"]),
        torch.from_numpy(arrays["top_ids"]).long(),
        torch.from_numpy(arrays["top_logprobs"]),
        beside=arrays,
    )


def checked(request, n, vocab_size, **changes):
    """Return a request as the server reads it from what a client sends."""
    sent = ScoreRequest(VERSION, [SequenceRequest([1] * (n + 1), 1)], [STUDENT_CANDIDATES.name])
    STUDENT_CANDIDATES.write(msgspec.structs.replace(request, **changes), sent, n)
    facts = Facts("m", vocab_size, 1, 512, "float32", [STUDENT_CANDIDATES.name], "0.32")
    return STUDENT_CANDIDATES.read(sent, sent.sequences[0], facts)


def support(scores, row):
    """Return the log-probs of a row's known ids."""
    known = scores.all_known[row]
    ids, logprobs = scores.token_ids[row][known], scores.teacher_logprobs[row][known]
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))


def check_same(pair, plan, logits, found, k, *, fixed):
    """Check scores against those of whole rows in this process; return how many ids are known."""
    rows = logits.double().softmax(-1)
    sums = Sums(pair).candidates(rows, plan, 64)
    whole, totals = token_scores(pair, plan, sums, Rows(rows), k, fixed=fixed)
    scores, its = found
    assert torch.equal(scores.scored, whole.scored)
    at = whole.scored
    for row in at.nonzero()[:, 0].tolist():
        own = float(whole.ref_logprobs[row])
        # Where the student would write nothing else here, the rest is rounding.
        near = 1e-3 if own > -1e-6 else 1e-4
        assert float(scores.ref_logprobs[row]) == pytest.approx(own, abs=near)
        assert support(scores, row) == pytest.approx(support(whole, row), abs=near)
    assert its["off_path_bound"] >= totals["off_path_bound"] - 1e-4
    names = ("tokens", "scored", "aligned", "noncanonical", "unresolved_mass")
    for name in names:
        assert its[name] == pytest.approx(totals[name], abs=1e-3), name
    return int(whole.all_known[at].sum())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        {"words": True},
        {"words": False},
        {"words": True, "counts": (40, 0)},  # nothing but bytes: few boundaries align
        {"words": False, "counts": (4, 40)},
        {"words": True, "signs": (True, True), "leads": (b"", b" ")},
        {"words": True, "signs": (True, False), "leads": (b" ", b"")},
        {"words": False, "signs": (False, True), "leads": (b" ", b" ")},
    ],
)
def test_sums_of_a_server_equal_those_of_whole_rows(kind, fixed):
    known = 0
    for seed in range(3):
        pair = pair_of(seed, **kind)
        plan = plan_of(pair, written(pair, seed))
        logits = logits_of(pair, plan, seed)
        question, read = asked(pair, plan, logits, 8, listed=len(pair.teacher.of_id))
        found = ByRows(pair, fixed=fixed).scores(plan, read, 8, logits.shape[1], question)
        known += check_same(pair, plan, logits, found, 8, fixed=fixed)
    assert known > 50


def test_improbable_texts_have_the_same_scores_on_both_roads():
    """Tokens of several bytes are so improbable that a row's sum is rounded by as much as these."""
    scored = unscored = 0
    for seed, lower in product(range(3), (8.0, 10.0, 12.0)):
        pair = pair_of(seed, words=False, counts=(40, 4))
        plan = plan_of(pair, written(pair, 2 * seed))
        logits = logits_of(pair, plan, seed)
        long = [at for at, content in enumerate(pair.teacher.of_id) if len(content or b"") > 1]
        logits[:, long] -= lower
        question, read = asked(pair, plan, logits, 8, listed=len(pair.teacher.of_id))
        listed = logits.log_softmax(-1).topk(logits.shape[1])
        here = Scores(read.ref_logprobs, listed.indices, listed.values)
        for found in (
            ByRows(pair).scores(plan, here, 8, logits.shape[1]),
            ByRows(pair).scores(plan, read, 8, logits.shape[1], question),
        ):
            check_same(pair, plan, logits, found, 8, fixed=False)
        masses = masses_across(pair, plan, logits.double().softmax(-1))
        for at, mass in masses.items():
            assert bool(found[0].scored[at]) == (mass > 1e-6), (at, mass)
        scored += sum(1e-6 < mass < 1e-5 for mass in masses.values())
        unscored += sum(mass <= 1e-6 for mass in masses.values())
    assert scored > 3 and unscored > 3


def masses_across(pair, plan, rows):
    """Return the teacher's mass across each place within its tokens, over its own path to there."""
    found = {}
    for at, position in enumerate(plan.positions):
        if position is not None and position.skip > 0:
            found[at] = 0.0
            for part in position.straddling:
                path = 1.0
                for row in range(part.row, position.row):
                    path *= float(rows[row, plan.teacher_ids[row]])
                ids = pair.tables.order[part.tokens]
                found[at] += float(rows[part.row, ids].sum()) / path
    return found


def test_mass_of_a_heads_padding_belongs_to_nobody():
    """Also where a token of the teacher straddles the position: its mass is of another row."""
    straddled = 0
    for seed in range(3):
        pair = pair_of(seed, words=False, counts=(24, 10))
        plan = plan_of(pair, written(pair, seed))
        straddled += sum(one is not None and len(one.straddling) > 0 for one in plan.positions)
        logits = logits_of(pair, plan, seed)
        logits[:, len(pair.teacher.of_id) :] = 2.0
        question, read = asked(pair, plan, logits, 8, listed=len(pair.teacher.of_id))
        found = ByRows(pair).scores(plan, read, 8, logits.shape[1], question)
        check_same(pair, plan, logits, found, 8, fixed=False)
    assert straddled > 10


def test_blocks_and_pieces_of_a_prefill_change_nothing(monkeypatch):
    pair = pair_of(1, words=True)
    plan = plan_of(pair, written(pair, 3))
    logits = logits_of(pair, plan, 3)
    _, whole = asked(pair, plan, logits, 8)
    monkeypatch.setitem(worker.BLOCK_BYTES, "cpu", 1)  # a row at a time
    monkeypatch.setattr("prime_composer.scoring.student_candidates.AT_ONCE", 3)
    for pieces in (1, 3, len(logits)):
        _, other = asked(pair, plan, logits, 8, pieces=pieces)
        for name, array in whole.beside.items():
            exact = array.dtype.kind == "i"
            np.testing.assert_allclose(other.beside[name], array, rtol=0 if exact else 2e-3)


def test_row_shares_its_columns_between_its_parts():
    """Short lists are whole; long ones get the rest alike, and the sampled token is in each."""
    parts = [Part(0, None, 0, np.arange(n), forced=[n - 1]) for n in (500, 3, 400, 0)]
    share_columns(parts, 64, 96)
    assert [part.columns for part in parts] == [45, 4, 46, 1]
    assert [part.offset for part in parts] == [0, 45, 49, 95]
    crowd = [Part(0, None, 0, np.arange(9), forced=[8]) for _ in range(40)]
    share_columns(crowd, 64, 96)
    assert [part.columns for part in crowd[:32]] == [3] * 32 and crowd[32].columns == 0


def test_cut_lists_have_exact_totals_and_sampled_tokens(monkeypatch):
    """Other tokens have nearly all of their mass, or are left to the tail."""
    monkeypatch.setattr("prime_composer.teachers.student_candidates.FEWEST", 8)
    listed = left_out = 0
    for seed in range(4):
        pair = pair_of(seed, words=seed < 2, counts=(80, 24))
        plan = plan_of(pair, written(pair, seed))
        logits = logits_of(pair, plan, seed)
        question, read = asked(pair, plan, logits, 2)
        found, _ = read_answer(pair, question, read)
        whole = Sums(pair).candidates(logits.double().softmax(-1), plan, len(pair.student.of_id))
        torch.testing.assert_close(found.total, whole.total, atol=0, rtol=1e-4)
        torch.testing.assert_close(found.end, whole.end, atol=1e-7, rtol=1e-4)
        torch.testing.assert_close(found.nobody, whole.nobody, atol=1e-6, rtol=1e-3)
        places = [at for at, position in enumerate(plan.positions) if position is not None]
        for row, at in enumerate(places):
            right = {
                int(i): masses
                for i, *masses in zip(
                    whole.ids[row], whole.closed[row], whole.open[row], strict=True
                )
            }
            sampled = plan.positions[at].token
            for i, *masses in zip(found.ids[row], found.closed[row], found.open[row], strict=True):
                if i >= 0:
                    both, exact = float(sum(masses)), float(sum(right[int(i)]))
                    near = 1e-4 if i == sampled else MISSING
                    assert both == pytest.approx(exact, rel=near, abs=1e-9)
                    assert both <= exact * (1 + 1e-4) + 1e-9
                    listed += 1
            left_out += int((whole.closed[row] + whole.open[row] > 0).sum()) - int(
                (found.ids[row] >= 0).sum()
            )
    assert listed > 200 and left_out > 100


@pytest.mark.parametrize("listed", [1, 12, 400])
def test_what_no_list_has_is_counted(listed):
    """Mass that follows the rollout's own tokens and is not listed may be another id's."""
    unlisted = 0.0
    for seed in range(3):
        pair = pair_of(seed, words=False, counts=(4, 40))
        plan = plan_of(pair, written(pair, 2 * seed))
        logits = logits_of(pair, plan, seed)
        question, read = asked(pair, plan, logits, 8, listed=listed)
        _, totals = ByRows(pair).scores(plan, read, 8, logits.shape[1], question)
        unlisted += totals["unlisted"]
    assert (unlisted > 0.1) == (listed < 400)


def test_first_token_of_a_path_makes_a_student_token_unsure():
    """The teacher writes "ab" as "a", "b", and has "abc": what follows "a" may be "b"."""
    merges = [("b", "c"), ("a", "bc")], [("a", "b")]
    teacher, student = (TokenBytes(byte_level(one, words=False), "a toy") for one in merges)
    ends = len(teacher.of_id) - 1, len(student.of_id) - 1
    pair = Pair(teacher, student, [ends[0]], ends[1], [])
    plan = plan_of(pair, [*student.encode("cc"), ends[1]])
    for mass, is_known in ((0.3, False), (1e-4, True)):
        rows = torch.full((3, len(teacher.of_id)), 1e-9)
        for content, share in ((b"abc", 0.2), (b"c", 0.4), (b"a", mass)):
            rows[:, teacher.of_id.index(content)] = share
        question, read = asked(pair, plan, rows.log(), 8, listed=1)
        found, _ = ByRows(pair).scores(plan, read, 8, rows.shape[1], question)
        assert (student.encode("ab")[0] in support(found, 1)) == is_known


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"shared": {"pair": "f" * 64}}, "pair and parts are needed"),
        ({"shared": {"pair": "../" + "f" * 61, "parts": 1}}, "64 hexadecimal digits"),
        ({"shared": {"pair": "f" * 64, "parts": 33}}, "1 to 32 are needed"),
        ({"shared": {"pair": "f" * 64, "parts": True}}, "1 to 32 are needed"),
        ({"k": 4097}, "1 to 4,096"),
        ({"numbers": [0, 0, 0]}, "fewer numbers"),
        ({"numbers": [-1, 5, 1, 2]}, "within 0 to 300"),
        ({"numbers": [6, 5, 1, 2]}, "within 0 to 300"),
        ({"numbers": [0, 301, 1, 2]}, "within 0 to 300"),
        ({"numbers": [0, 5, -2, 2]}, "bytes to skip"),
        ({"numbers": [0, 5, 2**16 + 1, 2]}, "bytes to skip"),
        ({"numbers": [0, 5, 1, 97]}, "more than its 96 columns"),
        ({"numbers": [0, 5, 1, -1]}, "more than its 96 columns"),
        ({"numbers": [0, 5, 1, 60, 0, 5, 1, 60], "parts": 2}, "more than its 96 columns"),
        ({"numbers": [0, 300, 1, 2] * 3, "parts": 3}, "more than 2 times the vocabulary"),
        ({"numbers": [0, 0, 0, 2] * 3, "parts": 3}, "more than 2 parts of a row that are of all"),
        ({"numbers": [0, 5, 1, 2, 1 << 24]}, "none of the 1"),
        ({"numbers": [0, 5, 1, 2, -2]}, "none of the 1"),
    ],
)
def test_numbers_that_no_client_sends_are_refused_by_name(changes, words):
    changes = dict(changes)
    shared = {"pair": "f" * 64, "parts": changes.pop("parts", 1)}
    numbers = np.array(changes.pop("numbers", [0, 5, 1, 2]) * 2, "<i4").tobytes()
    request = KindRequest(STUDENT_CANDIDATES.name, 96, shared, numbers)
    with pytest.raises(ValueError, match=words):
        checked(request, 2, 300, **changes)


def test_numbers_of_another_pair_cost_their_own_answer_alone():
    """Ranges, skips and ids that do not fit the tables are clamped: nothing is read outside."""
    pair = pair_of(0, words=True)
    tables = Questions(pair).tables
    pair_tables.KEPT_HERE.keep(tables)
    rng = np.random.default_rng(0)
    n, size = 40, len(pair.teacher.of_id)
    low = rng.integers(0, size // 2, (n, 4))
    high = low + rng.integers(0, size // 2, (n, 4))
    skip = rng.choice([-1, 0, 1, 2, 7, 60000], (n, 4))
    skip[:, 2:] = np.maximum(skip[:, 2:], 1)
    parts = np.stack([low, high, skip, np.full((n, 4), 24)], -1).reshape(n, 16)
    forced = rng.integers(0, 4 << 24, (n, 8))
    numbers = np.concatenate([parts, forced], 1).astype("<i4")
    shared = {"pair": tables.name, "parts": 4}
    request = checked(KindRequest(STUDENT_CANDIDATES.name, 96, shared, numbers.tobytes()), n, size)
    logits = torch.randn(n, size, generator=torch.Generator().manual_seed(0))
    rows = kinds.Rows(logits, torch.zeros(n, dtype=torch.long), lambda h: h)
    found = STUDENT_CANDIDATES.arrays(rows, request, torch.from_numpy(numbers.copy()))
    assert all(bool(array.isfinite().all()) for array in found.values())
    assert int(found["candidate_ids"].max()) < len(pair.student.of_id)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"order": 500}, "order from .* to 500"),
        ({"parent": 500}, "parent from .* to 500"),
        ({"path_first": -2}, "path_first from -2"),
        ({"entries": 10**6}, "entries from .* to 1000000"),
        ({"ends": -1}, "ends from -1"),
        ({"widths": -1}, "widths from -1"),
        ({"start": 1}, "do not follow one another"),
        ({"lead": 1}, "do not follow one another"),
    ],
)
def test_tables_whose_indices_lead_outside_are_refused(change, words):
    tables = tables_of(pair_of(0, words=True))
    size = len(tables.parent)
    assert PairTables.of(tables.content, size).name == tables.name
    ((name, value),) = change.items()
    if name != "lead":
        value = np.concatenate([[value], getattr(tables, name)[1:]]).astype("<i4")
    with pytest.raises(WrongTables, match=words):
        PairTables.of(replace(tables, **{name: value}).content, size)


def test_tables_of_another_teacher_or_damaged_ones_are_refused():
    tables = tables_of(pair_of(0, words=True))
    size = len(tables.parent)
    with pytest.raises(WrongTables, match="where the served head has"):
        PairTables.of(tables.content, size - 1)
    for damaged in (b"", b"\xff" * 40, tables.content[:100], tables.content + b"abcd"):
        with pytest.raises(WrongTables):
            PairTables.of(damaged, size)
    own = replace(tables, parent=np.arange(size, dtype="<i4"))  # begins with itself, for ever
    with pytest.raises(WrongTables, match="begins with one of its own length"):
        PairTables.of(own.content, size)


def test_worker_keeps_the_tables_that_were_used_last(kept):
    kept.most = 2
    pairs = [tables_of(pair_of(seed, words=True)) for seed in range(3)]
    for tables in pairs[:2]:
        kept.keep(tables)
    kept.on(pairs[0].name, torch.device("cpu"))
    kept.keep(pairs[2])
    assert [tables.name in kept for tables in pairs] == [True, False, True]
    with pytest.raises(UnknownTables):
        kept.on(pairs[1].name, torch.device("cpu"))


def test_answer_that_no_teacher_gives_is_refused():
    pair = pair_of(0, words=True)
    plan = plan_of(pair, written(pair, 0))
    question, read = asked(pair, plan, logits_of(pair, plan, 0), 4)
    for name, value, words in (
        ("candidate_ids", len(pair.student.of_id), "the student has"),
        ("candidate_closed", -1.0, "no probability"),
        ("candidate_open", np.nan, "no probability"),
        ("candidate_end", 2.0, "no probability"),
    ):
        arrays = {key: array.copy() for key, array in read.beside.items()}
        arrays[name].flat[0] = value
        with pytest.raises(InvalidAnswer, match=words):
            read_answer(pair, question, replace(read, beside=arrays))
