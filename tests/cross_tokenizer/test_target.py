"""Against the distribution over all texts: what one prefill gives of the student's own tokens."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from prime_composer.cross_tokenizer.finish import NEVER, Positions, token_scores
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan, plan_of
from prime_composer.cross_tokenizer.sums import Candidates, Sums
from prime_composer.cross_tokenizer.teacher_rows import TeacherRows
from prime_composer.cross_tokenizer.token_bytes import TokenBytes
from tests.cross_tokenizer.toys import ToyTeacher, byte_level, pushed_forward, random_tokenizer

ALPHABET = "ab "
EVERY = 1000
"""Candidates: the whole vocabulary."""


@dataclass
class Toy:
    teacher: ToyTeacher
    pair: TokenizerPair
    exact: dict[tuple[int, ...], float]

    def rollouts(self, count: int, seed: int) -> Iterator[tuple[int, ...]]:
        """Yield what a student may sample: the target's tokens, half of the time any of them."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            ids: tuple[int, ...] = ()
            while len(ids) < 6 and (not ids or ids[-1] != self.pair.student_end):
                after = [i for i in range(len(self.pair.student.of_id)) if (*ids, i) in self.exact]
                mass = np.array([self.exact[*ids, i] for i in after])
                share = 0.5 * mass / mass.sum() + 0.5 / len(after)
                ids = (*ids, int(rng.choice(after, p=share)))
            yield ids


@cache
def toy(
    seed: int,
    *,
    words: bool,
    noncanonical: float = 0.0,
    signs: tuple[bool, bool] = (False, False),
    leads: tuple[str, str] = ("", ""),
) -> Toy:
    """Return a toy pair. Which entries are open is found by trying all continuations.

    ``signs`` says of teacher and student whether it is sentencepiece's.
    """
    teacher_tokens, student = (
        random_tokenizer(2 * seed + own, ALPHABET, 5, words=words, signs=signs[own])
        for own in range(2)
    )
    teacher = ToyTeacher(teacher_tokens, ALPHABET, 5, noncanonical, seed, leads[0])
    end = len(student.of_id) - 1
    pair = TokenizerPair(
        *(teacher_tokens, student, [teacher.end], end, []),
        leads=(leads[0].encode(), leads[1].encode()),
    )
    continuations = ["".join(c) for n in range(1, 5) for c in itertools.product(ALPHABET, repeat=n)]

    @cache
    def is_open(content: bytes, first: int) -> bool:
        text = content.decode()
        return any(student.encode(text + more)[0] != first for more in continuations)

    pair.is_open = is_open  # type: ignore[method-assign]
    tables = pair.tables
    found = np.zeros_like(tables.open)
    for token in teacher.ids:
        for skip in range(-len(pair.before), len(teacher_tokens.of_id[token] or b"")):
            entry = pair.tables.start[token] + skip
            found[entry] = is_open(pair.written(token, skip), int(tables.first[entry]))
    pair.tables = replace(tables, open=found, asks=found)
    return Toy(teacher, pair, pushed_forward(teacher, student, end, leads[1]))


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_brute_force_lies_between_what_is_certain_and_what_is_open(
    seed: int, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the teacher has one tokenization of the text before. Exact where nothing is open.
    monkeypatch.setattr("prime_composer.cross_tokenizer.finish.SMALLEST_BRANCH", 1e-12)
    assert bounded(toy(seed, words=words), seed) > 30


@pytest.mark.parametrize(
    ("signs", "leads"),
    [
        ((True, False), ("", "")),
        ((True, False), (" ", "")),
        ((False, True), ("", " ")),
        ((True, True), (" ", " ")),
    ],
)
def test_brute_force_bounds_sentencepiece_and_leads(
    signs: tuple[bool, bool], leads: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same for tokens with a sign for the space, and spaces in front of every text.
    monkeypatch.setattr("prime_composer.cross_tokenizer.finish.SMALLEST_BRANCH", 1e-12)
    toys = (toy(seed, words=seed == 0, signs=signs, leads=leads) for seed in range(2))
    assert sum(bounded(one, seed) for seed, one in enumerate(toys)) > 60


def bounded(this: Toy, seed: int) -> int:
    """Compare masses with brute force; return how many of them are above 0."""
    pair, exact = this.pair, this.exact
    count = 0
    for ids in this.rollouts(10, seed):
        plan = plan_of(pair, ids)
        rows = this.teacher.rows_of(plan.teacher_ids)
        found = Sums(pair).candidates(rows, plan, EVERY)
        steps = [float(rows[j, token]) for j, token in enumerate(plan.teacher_ids)]
        closed, open_, own_of, norm_of = finished(pair, plan, found, rows)
        for at, position in enumerate(plan.positions):
            if position is None or float(found.off_path[at]) > 1e-12:
                continue
            own, norm = own_of[at], norm_of[at]
            path = math.prod(steps[: position.row])
            unsure = open_[at]
            for token in range(pair.student_end):
                mass = exact.get((*ids[:at], token), 0.0) / path
                certain = closed[at, token]
                assert certain - 1e-9 <= mass <= certain + unsure + 1e-9
                count += mass > 0
            if unsure == 0:
                assert norm == pytest.approx(exact[ids[:at]] / path, rel=1e-9)
                target = exact[ids[: at + 1]] / exact[ids[:at]]
                assert own == pytest.approx(log_or_never(target), abs=1e-6)
    return count


def finished(
    pair: TokenizerPair, plan: ReadingPlan, found: Candidates, rows: torch.Tensor
) -> tuple[Any, ...]:
    """Return the certain mass of each token, all that is unsure, log Q of what was sampled, and
    the norm, of each position. All of them have a score."""
    positions = Positions(pair, plan, found, TeacherRows(rows))
    masses = positions.filtered(positions.refined(positions.masses))
    assert len(masses.total) == len(plan.positions)
    closed = np.zeros((len(masses.total), masses.width))
    closed[masses.positions, masses.tokens] = masses.closed
    unsure = np.bincount(masses.positions, masses.open, len(closed)) + masses.doubtful
    return closed, unsure, positions.own(masses), positions.norm(masses)


def log_or_never(probability: float) -> float:
    return max(NEVER, math.log(probability)) if probability else NEVER


def scores_of(
    pair: TokenizerPair, rows: torch.Tensor, ids: tuple[int, ...], k: int = 8, **options: bool
):
    plan = plan_of(pair, ids)
    found = Sums(pair).candidates(rows, plan, EVERY)
    return token_scores(pair, plan, found, TeacherRows(rows), k, **options)


def test_every_row_is_a_distribution_with_the_sampled_token_first() -> None:
    this = toy(1, words=False, noncanonical=0.1)
    count = 0
    for ids in this.rollouts(30, 7):
        rows = this.teacher.rows(this.pair.student.bytes_of(ids).decode())
        scores, _ = scores_of(this.pair, rows, ids)
        mass = torch.where(scores.all_known, scores.teacher_logprobs.exp(), 0.0).sum(-1)
        assert (mass < 1).all()
        for at, token in enumerate(ids):
            assert len({*scores.token_ids[at].tolist()}) == scores.k
            if scores.ref_logprobs[at] > NEVER + 1e-6:
                assert scores.token_ids[at, 0] == token
                torch.testing.assert_close(
                    scores.teacher_logprobs[at, 0], scores.ref_logprobs[at], atol=2e-6, rtol=0
                )
                count += 1
    assert count > 60


def test_equal_tokenizers_give_the_teachers_own_probabilities() -> None:
    tokens = random_tokenizer(3, ALPHABET, 5, words=True)
    teacher = ToyTeacher(tokens, ALPHABET, 5, noncanonical=0.0, seed=3)
    pair = TokenizerPair(tokens, tokens, [teacher.end], teacher.end, [])
    # Every continuation of a canonical text is canonical, so that no token changes another.
    closed = np.zeros_like(pair.tables.open)
    pair.tables = replace(pair.tables, open=closed, asks=closed)
    exact = pushed_forward(teacher, tokens, teacher.end)
    checked = 0
    for ids in Toy(teacher, pair, exact).rollouts(20, 1):
        written = [i for i in ids if i != teacher.end]
        rows = teacher.rows(tokens.bytes_of(written).decode())
        scores, _ = scores_of(pair, rows, ids)
        for at, token in enumerate(ids):
            own = float(scores.ref_logprobs[at])
            assert own == pytest.approx(log_or_never(float(rows[at, token])), abs=1e-6)
            checked += 1
    assert checked > 40


def test_a_student_of_single_bytes_gets_the_marginals_of_bytes() -> None:
    this = toy(1, words=False)
    student = random_tokenizer(0, ALPHABET, 0, words=False)
    pair = TokenizerPair(
        this.teacher.tokens, student, [this.teacher.end], len(student.of_id) - 1, []
    )
    exact = pushed_forward(this.teacher, student, pair.student_end)
    equal = 0
    for ids in Toy(this.teacher, pair, exact).rollouts(20, 2):
        rows = this.teacher.rows(student.bytes_of(ids).decode())
        plan = plan_of(pair, ids)
        found = Sums(pair).candidates(rows, plan, EVERY)
        scores, _ = token_scores(pair, plan, found, TeacherRows(rows), 8)
        for at in range(len(ids)):
            if float(found.off_path[at]) < 1e-12:
                target = math.log(exact[ids[: at + 1]] / exact[ids[:at]])
                assert float(scores.ref_logprobs[at]) == pytest.approx(target, abs=1e-6)
                equal += 1
    assert equal > 20


def test_a_fixed_support_does_not_depend_on_the_sampled_token() -> None:
    # Compared where the texts have one teacher path up to the last token.
    this = toy(1, words=True)
    student, compared = this.pair.student, 0
    for ids in this.rollouts(20, 9):
        found = {}
        for token in range(this.pair.student_end):
            other = (*ids[:-1], token)
            plan = plan_of(this.pair, other)
            position = plan.positions[-1]
            if other not in this.exact or position is None:
                continue
            rows = this.teacher.rows(student.bytes_of(other).decode())
            scores, _ = scores_of(this.pair, rows, other, fixed=True)
            last = scores.rows(slice(len(ids) - 1, len(ids)))
            support = torch.stack([last.token_ids, last.teacher_logprobs])[
                :, last.all_known
            ].tolist()
            found.setdefault(plan.teacher_ids[: position.row], []).append(support)
        for supports in found.values():
            assert all(support == supports[0] for support in supports)
            compared += len(supports) - 1
    assert compared > 10


@pytest.mark.parametrize("words", [True, False])
def test_pairs_of_tokens_are_canonical_where_the_student_writes_them(words: bool) -> None:
    """Those across a space are known without encoding them, unless a merge spans it."""
    known = 0
    for seed in range(3):
        teacher, student = (
            random_tokenizer(2 * seed + at, ALPHABET, 12, words=words) for at in (0, 1)
        )
        pair = TokenizerPair(teacher, student, [0], 0, [])
        ids = [
            i for i, content in enumerate(student.of_id) if content and not content.strip(b"ab ")
        ]
        left, right = np.array([*itertools.product(ids, ids)]).T
        written = [
            student.encode(student.bytes_of(each).decode()) == each
            for each in itertools.product(ids, ids)
        ]
        assert pair.are_canonical(left, right).tolist() == written
        before_space, with_space = pair._alone
        known += int((before_space[left] & with_space[right]).sum())
    assert known > 50


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    this = toy(2, words=True, noncanonical=0.1)
    (ids,) = this.rollouts(1, 11)
    rows = this.teacher.rows(this.pair.student.bytes_of(ids).decode())
    plan = plan_of(this.pair, ids)
    whole = Sums(this.pair).candidates(rows, plan, 20)
    monkeypatch.setattr("prime_composer.cross_tokenizer.sums.BLOCK", 1)
    parts = Sums(this.pair).candidates(rows, plan, 20)
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.closed, parts.closed)
    assert torch.equal(whole.total, parts.total) and torch.equal(whole.open, parts.open)


def test_a_token_that_the_student_would_not_write_is_improbable_and_left_out() -> None:
    this = toy(1, words=True)
    student = this.pair.student
    merged = next(
        (left, right, joined)
        for joined, content in enumerate(student.of_id)
        if content and len(content) > 1
        for cut in range(1, len(content))
        for left in [student.of_id.index(content[:cut])]
        if content[:cut] in student.of_id
        for right in [student.of_id.index(content[cut:])]
        if content[cut:] in student.of_id
    )
    left, right, _ = merged
    ids = (left, right, this.pair.student_end)
    rows = this.teacher.rows(student.bytes_of(ids).decode())
    scores, totals = scores_of(this.pair, rows, ids)
    assert float(scores.ref_logprobs[1]) == pytest.approx(NEVER)
    support = scores.token_ids[1][scores.all_known[1]]
    assert right not in support.tolist()
    assert totals["noncanonical"] == 1 and totals["scored"] == 3


def test_a_fixed_support_leaves_the_sampled_tokens_own_log_prob() -> None:
    this = toy(0, words=True)
    for ids in this.rollouts(20, 3):
        rows = this.teacher.rows(this.pair.student.bytes_of(ids).decode())
        one, _ = scores_of(this.pair, rows, ids)
        two, _ = scores_of(this.pair, rows, ids, fixed=True)
        torch.testing.assert_close(one.ref_logprobs, two.ref_logprobs)


def test_a_character_of_three_teacher_tokens_is_its_first_ones_path() -> None:
    # The teacher writes each byte by itself with probability .9; the student has the character.
    teacher = TokenBytes(byte_level([], words=False), "the teacher")
    merges = [("\u00e4", "\u00bd"), ("\u00e4\u00bd", "\u0142")]
    student = TokenBytes(byte_level(merges, words=False), "the student")
    character = bytes([0xE4, 0xBD, 0xA0]).decode()
    assert len(student.encode(character)) == 1 and len(teacher.encode(character)) == 3
    pair = TokenizerPair(teacher, student, [256], len(student.of_id) - 1, [])
    path = teacher.encode(character)
    rows = torch.full((4, 257), 0.1 / 256, dtype=torch.float64)
    for row, token in enumerate(path):
        rows[row, token] = 0.9
    scores, _ = scores_of(pair, rows, student.encode(character))
    assert float(scores.ref_logprobs[0]) == pytest.approx(3 * math.log(0.9), abs=0.01)


def test_ids_of_the_head_alone_write_nothing() -> None:
    tokenizer = byte_level([], words=False)
    padded = TokenBytes(tokenizer, "the student", 300)
    assert len(padded.of_id) == 300 and padded.of_id[299] is None
    pair = TokenizerPair(TokenBytes(tokenizer, "the teacher"), padded, [256], 256, [])
    plan = plan_of(pair, [padded.encode("a")[0], 299, padded.encode("b")[0]])
    assert [position is not None for position in plan.positions] == [True, True, False]
