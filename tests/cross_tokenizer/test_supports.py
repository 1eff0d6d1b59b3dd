"""Whole supports against the distribution over all texts: which ids are in them, with which Q."""

import math

import pytest
import torch

from prime_composer.cross_tokenizer.finish import UNRESOLVED, Positions
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.sums import Sums
from prime_composer.cross_tokenizer.teacher_rows import TeacherRows
from prime_composer.cross_tokenizer.token_bytes import TokenBytes
from tests.cross_tokenizer.test_target import EVERY, finished, scores_of, toy
from tests.cross_tokenizer.toys import byte_level


@pytest.mark.parametrize("seed", [0, 2])
def test_support_has_the_ids_that_are_certain_and_no_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known id lacks at most a twentieth of its mass, and one that is not known lacks more.

    Where the teacher has one tokenization of the text before, and a space begins a word.
    """
    monkeypatch.setattr("prime_composer.cross_tokenizer.finish.SMALLEST_BRANCH", 1e-12)
    this = toy(seed, words=True)
    vocabulary, end = len(this.pair.student.of_id), this.pair.student_end
    inside = outside = ends = 0
    for ids in this.rollouts(10, seed):
        rows = this.teacher.rows(this.pair.student.bytes_of(ids).decode())
        plan = plan_of(this.pair, ids)
        found = Sums(this.pair).candidates(rows, plan, EVERY)
        scores, _ = scores_of(this.pair, rows, ids, vocabulary)
        steps = [float(rows[j, token]) for j, token in enumerate(plan.teacher_ids)]
        closed, _, _, norms = finished(this.pair, plan, found, rows)
        for at, position in enumerate(plan.positions):
            if position is None or float(found.off_path[at]) > 1e-12:
                continue
            norm = norms[at]
            path, known = math.prod(steps[: position.row]), scores.all_known[at]
            pairs = scores.token_ids[at][known], norm * scores.teacher_logprobs[at][known].exp()
            support = dict(zip(*(part.tolist() for part in pairs), strict=True))
            own = this.exact.get((*ids[:at], position.token), 0.0) / path
            assert (position.token in support) == (own > 1e-6)
            for token in {*range(vocabulary)} - {position.token}:
                exact = this.exact.get((*ids[:at], token), 0.0) / path
                least = support.get(token, closed[at, token]) * (1 - 1e-4)
                is_certain = least <= exact <= least * (1 + 3e-4) / (1 - UNRESOLVED)
                if token == end:
                    assert support.get(end, 0.0) == pytest.approx(exact, rel=1e-4)
                    ends += exact > 0
                elif exact > 1e-6:
                    assert is_certain == (token in support)
                    inside += token in support
                    outside += token not in support
                else:
                    assert token not in support
    assert inside > 15 and outside > 30 and ends > 1


def test_sampled_token_is_a_candidate_whatever_its_mass() -> None:
    this, improbable = toy(0, words=True), 0
    for ids in this.rollouts(10, 4):
        rows = this.teacher.rows(this.pair.student.bytes_of(ids).decode())
        plan = plan_of(this.pair, ids)
        two, every = (Sums(this.pair).candidates(rows, plan, count) for count in (2, EVERY))
        mass = every.closed + every.open
        for index, position in enumerate(p for p in plan.positions if p is not None):
            assert int(two.ids[index, 0]) == position.token
            own = float(two.closed[index, 0] + two.open[index, 0])
            assert own == pytest.approx(float(mass[index, 0]))
            improbable += int((mass[index] > own).sum()) > 2 and own > 0
    assert improbable > 3


def test_every_end_of_the_teacher_counts_for_the_students_end() -> None:
    """Two of the teacher's ids end its turn, with .3 and .2: the student's end has .5."""
    tokenizer = byte_level([], words=False)
    teacher = TokenBytes(tokenizer, "the teacher", 258)
    student = TokenBytes(tokenizer, "the student", 300)
    pair = TokenizerPair(teacher, student, [256, 257], 256, [])
    (letter,) = teacher.encode("a")
    row = torch.zeros(1, 258, dtype=torch.float64)
    row[0, letter], row[0, 256], row[0, 257] = 0.5, 0.3, 0.2
    scores, _ = scores_of(pair, row, (256,), 4)
    assert float(scores.ref_logprobs[0]) == pytest.approx(math.log(0.5))
    known = scores.all_known[0]
    pairs = scores.token_ids[0][known], scores.teacher_logprobs[0][known].exp()
    support = dict(zip(*(part.tolist() for part in pairs), strict=True))
    assert support == pytest.approx({256: 0.5, letter: 0.5}, abs=1e-5)


@pytest.mark.parametrize(("other", "expected"), [(0.0, 0.0), (1e-30, 1.0)])
def test_off_path_bound_of_a_word_that_the_teacher_would_never_write(
    other: float, expected: float
) -> None:
    """24 letters without a space, of pairs with probability 1e-8: one over their product is more
    than a float32 holds. A single letter, which begins another tokenization, has ``other``."""
    tokenizer = byte_level([("a", "a")], words=False)
    teacher = TokenBytes(tokenizer, "the teacher", 258)
    student = TokenBytes(byte_level([], words=False), "the student", 257)
    pair = TokenizerPair(teacher, student, [257], 256, [])
    one, two = tokenizer.token_to_id("a"), tokenizer.token_to_id("aa")
    ids = [student.encode("a")[0]] * 24
    plan = plan_of(pair, ids)
    assert plan.teacher_ids == (two,) * 12
    rows = torch.zeros(13, 258)
    rows[:, two], rows[:, one], rows[:, 257] = 1e-8, other, 1.0
    candidates = Sums(pair).candidates(rows, plan, EVERY)
    positions = Positions(pair, plan, candidates, TeacherRows(rows))
    assert positions.off_path[-1] == pytest.approx(expected)
    assert positions.off_path[:7] == pytest.approx(0.0, abs=1e-4)


def test_tokens_across_an_improbable_word_that_are_impossible_have_no_mass() -> None:
    """12 letters of probability 1e-8 each; tokens of some of them and a "b" have probability 0."""
    tokenizer = byte_level([("a", "a" * i + "b") for i in range(12)], words=False)
    teacher = TokenBytes(tokenizer, "the teacher", 269)
    student = TokenBytes(byte_level([], words=False), "the student", 257)
    pair = TokenizerPair(teacher, student, [268], 256, [])
    letter = student.encode("a")[0]
    plan = plan_of(pair, [letter] * 12)
    rows = torch.zeros(13, 269)
    rows[:, tokenizer.token_to_id("a")], rows[:, 268] = 1e-8, 1.0
    found = Sums(pair).candidates(rows, plan, EVERY)
    masses = torch.zeros(12, 257).scatter_add(1, found.ids, found.closed + found.open)
    expected = torch.zeros(12, 257)
    expected[:, letter] = 1e-8
    torch.testing.assert_close(masses, expected, rtol=1e-5, atol=0.0)
