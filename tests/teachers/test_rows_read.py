"""What a teacher's rows that were read say of the student's tokens, whole rows or some ids."""

import random
from itertools import product
from typing import Any

import pytest
import torch

from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import Totals, token_scores
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan, plan_of
from prime_composer.cross_tokenizer.sums import Sums
from prime_composer.cross_tokenizer.teacher_rows import TeacherRows
from prime_composer.cross_tokenizer.token_bytes import TokenBytes
from prime_composer.teachers.own_tokenizer import ByRows
from tests.cross_tokenizer.toys import byte_level, random_tokenizer

ALPHABET = "abc "


def pair_of(seed: int, *, words: bool, counts: tuple[int, int] = (24, 10)) -> TokenizerPair:
    """Return a pair of random tokenizers."""
    teacher, student = (
        random_tokenizer(10 * seed + at, ALPHABET, counts[at], words=words, signs=False)
        for at in range(2)
    )
    ends = len(teacher.of_id) - 1, len(student.of_id) - 1
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=40)) for _ in range(30)]
    return TokenizerPair(teacher, student, [ends[0]], ends[1], texts)


def written(pair: TokenizerPair, seed: int) -> list[int]:
    """Return a student's tokens of a random text."""
    text = "".join(random.Random(seed).choices(ALPHABET, k=24)).strip()
    return [*pair.student.encode(text), pair.student_end]


def logits_of(pair: TokenizerPair, plan: ReadingPlan, seed: int) -> torch.Tensor:
    """Return random rows of the teacher as logits. Its head has three entries too many."""
    rng = torch.Generator().manual_seed(seed)
    n, size = len(plan.teacher_ids) + 1, len(pair.teacher.of_id)
    logits = 2.5 * torch.randn(n, size + 3, generator=rng)
    logits[:, size:] = -30
    return logits


def read_of(
    pair: TokenizerPair, plan: ReadingPlan, logits: torch.Tensor, count: int | None = None
) -> Scores:
    """Return what a scorer gives of rows: some ids of each, and its next token's log-prob."""
    log_q = logits.log_softmax(-1)
    next_ids = torch.tensor([*plan.teacher_ids, pair.teacher_ends[0]])
    top = log_q.topk(min(count or logits.shape[1], logits.shape[1]))
    return Scores(log_q.gather(1, next_ids[:, None])[:, 0], top.indices, top.values)


def support(scores: Scores, row: int) -> dict[int, float]:
    """Return the log-probs of a row's known ids."""
    known = scores.all_known[row]
    ids, logprobs = scores.token_ids[row][known], scores.teacher_logprobs[row][known]
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))


def check_same(
    pair: TokenizerPair, plan: ReadingPlan, logits: torch.Tensor, found: tuple[Scores, Totals]
) -> None:
    """Check scores against those of whole rows in float64."""
    rows = logits.double().softmax(-1)
    sums = Sums(pair).candidates(rows, plan, 64)
    whole, totals = token_scores(pair, plan, sums, TeacherRows(rows), 8)
    scores, its = found
    assert scores.scored is not None and whole.scored is not None
    assert torch.equal(scores.scored, whole.scored)
    for row in whole.scored.nonzero()[:, 0].tolist():
        own = float(whole.ref_logprobs[row])
        # Where the student would write nothing else here, the rest is rounding.
        near = 1e-3 if own > -1e-6 else 1e-4
        assert float(scores.ref_logprobs[row]) == pytest.approx(own, abs=near)
        assert support(scores, row) == pytest.approx(support(whole, row), abs=near)
    for name in ("tokens", "scored", "aligned", "noncanonical", "unresolved_mass"):
        assert its[name] == pytest.approx(totals[name], abs=1e-3), name


def test_improbable_texts_have_scores_by_their_mass() -> None:
    """Tokens of several bytes are so improbable that a row's sum is rounded by as much as these."""
    scored = unscored = 0
    for seed, lower in product(range(3), (8.0, 10.0, 12.0)):
        pair = pair_of(seed, words=False, counts=(40, 4))
        plan = plan_of(pair, written(pair, 2 * seed))
        logits = logits_of(pair, plan, seed)
        long = [at for at, content in enumerate(pair.teacher.of_id) if len(content or b"") > 1]
        logits[:, long] -= lower
        found = ByRows(pair).scores(plan, read_of(pair, plan, logits), 8, logits.shape[1])
        check_same(pair, plan, logits, found)
        masses = masses_across(pair, plan, logits.double().softmax(-1))
        assert found[0].scored is not None
        for at, mass in masses.items():
            assert bool(found[0].scored[at]) == (mass > 1e-6), (at, mass)
        scored += sum(1e-6 < mass < 1e-5 for mass in masses.values())
        unscored += sum(mass <= 1e-6 for mass in masses.values())
    assert scored > 3 and unscored > 3


def masses_across(pair: TokenizerPair, plan: ReadingPlan, rows: torch.Tensor) -> dict[int, float]:
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


@pytest.mark.parametrize("count", [12, 400])
def test_what_was_not_read_of_the_next_row_is_counted(count: int) -> None:
    """Mass that follows the rollout's own tokens and was not read may be another id's."""
    unlisted = 0.0
    for seed in range(3):
        pair = pair_of(seed, words=False, counts=(4, 40))
        plan = plan_of(pair, written(pair, 2 * seed))
        logits = logits_of(pair, plan, seed)
        _, totals = ByRows(pair).scores(
            plan, read_of(pair, plan, logits, count), 8, logits.shape[1]
        )
        unlisted += totals["unlisted"]
    assert (unlisted > 1e-3) == (count < 400)


def test_first_token_of_a_path_makes_a_student_token_unsure() -> None:
    """The teacher writes "ab" as "a", "b", and has "abc": what follows "a" may be "b"."""
    merges: Any = ([("b", "c"), ("a", "bc")], [("a", "b")])
    teacher, student = (TokenBytes(byte_level(one, words=False), "a toy") for one in merges)
    ends = len(teacher.of_id) - 1, len(student.of_id) - 1
    pair = TokenizerPair(teacher, student, [ends[0]], ends[1], [])
    plan = plan_of(pair, [*student.encode("cc"), ends[1]])
    for mass, is_known in ((0.3, False), (1e-4, True)):
        rows = torch.full((3, len(teacher.of_id)), 1e-9)
        for content, share in ((b"abc", 0.2), (b"c", 0.4), (b"a", mass)):
            rows[:, teacher.of_id.index(content)] = share
        read = read_of(pair, plan, rows.log())
        found, _ = ByRows(pair).scores(plan, read, 8, rows.shape[1])
        assert (student.encode("ab")[0] in support(found, 1)) == is_known
