"""The baselines of the study against a few lines written down independently."""

import math

import pytest
import torch

from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.token_bytes import TokenBytes
from tests.cross_tokenizer.toys import byte_level
from tests.studies.another_tokenizer_baselines import ByLongestPrefix, ByRank

TEACHER = byte_level([("a", "b"), ("ab", "c"), ("c", "a")], words=False)
STUDENT = byte_level([("a", "b"), ("b", "c")], words=False)
END_S = STUDENT.token_to_id("<end>")
END_T = TEACHER.token_to_id("<end>")


def ids_of(tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


@pytest.fixture
def pair() -> TokenizerPair:
    teacher, student = TokenBytes(TEACHER, "the teacher"), TokenBytes(STUDENT, "the student")
    return TokenizerPair(teacher, student, [END_T], END_S, [])


def read_of(rows: torch.Tensor, teacher_ids: tuple[int, ...]) -> Scores:
    """The teacher's scores of its own tokens and an end, as its scorer gives them."""
    sampled = torch.tensor([*teacher_ids, END_T])
    logprobs, ids = rows.log().sort(dim=-1, descending=True)
    return Scores(rows.log().gather(1, sampled[:, None])[:, 0], ids, logprobs)


def random_rows(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, TEACHER.get_vocab_size(), generator=generator).mul(3).softmax(-1)


def text_in_tokens() -> list[int]:
    # "abcca": the teacher has abc ca. Both have tokens that begin at bytes 0 and 3.
    return [*ids_of(STUDENT, "ab", "c", "c", "a"), END_S]


ALIGNED = {0: 0, 2: 1, 4: 2}
"""Student token -> row of the teacher where both begin: bytes 0 and 3, and the end."""


def test_bpm_gives_a_teacher_token_to_its_longest_prefix(pair):
    plan, rows = plan_of(pair, text_in_tokens()), random_rows(3)
    assert list(plan.teacher_ids) == ids_of(TEACHER, "abc", "ca")
    k, size = 6, rows.shape[1]
    scores, totals = ByLongestPrefix(pair).scores(plan, read_of(rows, plan.teacher_ids), k, size)
    assert scores.scored.tolist() == [True, False, True, False, True]
    assert totals["aligned"] == 3 and totals["tokens"] == 5

    vocabulary = STUDENT.get_vocab()
    for at, row in ALIGNED.items():
        mass = dict.fromkeys(vocabulary.values(), 0.0)
        for token, index in TEACHER.get_vocab().items():
            start = next(
                (token[:n] for n in range(len(token), 0, -1) if token[:n] in vocabulary), token
            )
            mass[vocabulary[start]] += float(rows[row, index])
        best = sorted(mass, key=mass.__getitem__, reverse=True)[:k]
        assert scores.token_ids[at].tolist() == best
        assert scores.teacher_logprobs[at].exp().tolist() == pytest.approx(
            [mass[i] for i in best], rel=1e-5
        )
        own = text_in_tokens()[at]
        assert float(scores.ref_logprobs[at]) == pytest.approx(
            math.log(max(mass[own], 1e-6)), abs=1e-5
        )
    # "abc" is a teacher token that the student writes as ab c: it counts for ab, and not for a.
    assert vocabulary["ab"] == ByLongestPrefix(pair).prefix[TEACHER.token_to_id("abc")]


def test_ranks_are_those_of_the_aligned_rows(pair):
    plan, rows = plan_of(pair, text_in_tokens()), random_rows(3, 1)
    k, size = TEACHER.get_vocab_size() + 2, rows.shape[1]
    scores, _ = ByRank(pair).scores(plan, read_of(rows, plan.teacher_ids), k, size)
    assert scores.scored is None  # a token without ranks still has its own log-prob
    assert scores.known.all(-1).tolist() == [True, False, True, False, True]
    assert scores.known.any(-1).tolist() == [True, False, True, False, True]
    for at, row in ALIGNED.items():
        expected = sorted(rows[row].tolist(), reverse=True) + [0.0, 0.0]
        assert scores.teacher_logprobs[at].exp().tolist() == pytest.approx(expected, rel=1e-5)
