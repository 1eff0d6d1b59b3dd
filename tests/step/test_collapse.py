"""What a step says of how answers end, against counts by hand."""

import math
import random
from dataclasses import replace

import pytest
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores
from prime_composer.problems.config import Problem
from prime_composer.step.batch import Sample
from prime_composer.step.collapse import collapse_metrics, end_metrics, repeated_tokens
from prime_composer.step.overflow import fit

NAN = math.nan


def sample(ids, log_mu, finish="stop", log_q=None):
    """Return a sample with two tokens of prompt."""
    n = len(ids)
    rollout = Rollout(
        torch.tensor([50, 51, *ids]),
        torch.tensor([False, False] + [True] * n),
        torch.tensor([NAN, NAN, *log_mu]),
        finish,
        0,
    )
    none = torch.empty(n, 0)
    scores = None if log_q is None else Scores(torch.tensor(log_q), none.long(), none)
    return Sample(rollout, Problem("q", "a"), scores=scores)


LOOP = [9, *[1, 2] * 10]


def test_collapse_counts_rollouts_and_tokens_that_repeat():
    samples = [sample([1, 2, 3], [-1.0, -2.0, -3.0]), sample(LOOP, [-0.5] * 21, "length")]
    assert collapse_metrics(samples) == pytest.approx(
        {
            "rollout/repeated": 1 / 2,
            "rollout/repeated_tokens": 18 / 24,
            "rollout/entropy": (6 + 10.5) / 24,
            "rollout/student_truncated": 1 / 2,
            "rollout/student_tokens": 12,
        }
    )


def repeats_by_hand(ids, mask, period, copies, tokens):
    """Return how many tokens come after the first copy of the piece that repeats longest."""
    last = max(t for t, one in enumerate(mask) if one)
    first = last
    while mask[first]:
        first -= 1
    text, longest = ids[first + 1 : last + 1], 0
    for p in range(1, min(period, len(text) - 1) + 1):
        length = p
        while length < len(text) and text[-length - 1] == text[-length - 1 + p]:
            length += 1
        if length >= max(tokens, copies * p):
            longest = max(longest, length - p)
    return longest


@pytest.mark.parametrize("limits", [(64, 4, 16), (4, 2, 2), (20, 3, 6), (1, 2, 2)])
def test_repeated_tokens_are_those_of_a_search_by_hand(limits):
    """In answers of few ids, some of which loop, with gaps and with what comes after them."""
    draw, loops = random.Random(0), 0
    for _ in range(200):
        piece = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
        answer = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        answer += piece * draw.randrange(9) + piece[: draw.randrange(len(piece))]
        after = draw.randrange(3)
        ids = [0, *answer, *[1] * after]
        mask = [False, *[draw.random() < 0.95 for _ in answer], *[False] * after]
        if True in mask:
            log_mu = torch.full((len(ids),), -1.0)
            one = Rollout(torch.tensor(ids), torch.tensor(mask), log_mu, "length", 0)
            found = repeated_tokens(one, *limits)
            assert found == repeats_by_hand(ids, mask, *limits)
            loops += found > 0
    assert loops > 20


def test_collapse_leaves_out_what_the_student_did_not_sample():
    given = sample(LOOP, [NAN] * 21)
    assert collapse_metrics([given]) == end_metrics([given]) == {}
    given = replace(given, rollout=replace(given.rollout, finish_reason="length"))
    branch = replace(sample([1, 2], [-1.0, -1.0], "length"), first=False)
    assert collapse_metrics([given, sample([1], [-1.0]), branch]) == {
        "rollout/repeated": 0,
        "rollout/repeated_tokens": 0,
        "rollout/entropy": 1.0,
        "rollout/student_truncated": 0,
        "rollout/student_tokens": 3,
    }


def test_ends_are_the_probabilities_of_the_last_tokens():
    cut = sample([4, 5], [-1.0, -0.1], "length", [-1.0, -0.1])
    stopped = [
        sample([4, 5], [-1.0, math.log(0.5)], log_q=[-9.0, math.log(0.2)]),
        sample([4], [math.log(0.3)], log_q=[math.log(0.4)]),
    ]
    assert end_metrics([cut, *stopped]) == pytest.approx(
        {"rollout/end_student": 0.4, "rollout/end_teacher": 0.3}, rel=1e-6
    )
    assert end_metrics([cut]) == {}


def test_ends_without_a_teacher_are_the_students_alone():
    assert end_metrics([sample([4], [math.log(0.5)])]) == pytest.approx(
        {"rollout/end_student": 0.5}
    )


def test_ends_of_a_rollout_that_is_cut_are_none():
    """For a teacher's window, its last token is one of the middle."""
    one = sample([4, 5, 6], [-1.0, -2.0, -3.0], log_q=[-1.0, -2.0, -3.0])
    head = fit(one, 2, 4, "score_head")
    assert head is not None and head.rollout.token_ids.tolist() == [50, 51, 4, 5]
    assert end_metrics([head]) == {}


def test_ends_by_extrapolated_scores_are_the_students_alone():
    """lambda log q + (1 - lambda) log r may be above 0: q = 0.9, r = 0.016 and lambda = 1.25."""
    log_q = 1.25 * math.log(0.9) - 0.25 * math.log(0.016)
    one = sample([4], [math.log(0.5)], log_q=[log_q])
    assert end_metrics([one])["rollout/end_teacher"] == pytest.approx(2.465, abs=1e-3)
    assert end_metrics([one], of_teacher=False) == pytest.approx({"rollout/end_student": 0.5})


def test_ends_that_do_not_train_are_not_read():
    """A teacher had no score of the last token, so that its row is another's."""
    one = sample([4, 5], [-1.0, -2.0], log_q=[-1.0, -2.0])
    mask = one.rollout.loss_mask.clone()
    mask[-1] = False
    assert end_metrics([replace(one, rollout=replace(one.rollout, loss_mask=mask))]) == {}


def test_collapse_of_a_prompt_that_repeats_is_none():
    """The prompts 50, 51 of equal rollouts, and what came before an answer, are no answers."""
    one = sample([51] * 3, [-1.0] * 3)
    assert collapse_metrics([one, one, one])["rollout/repeated"] == 0


def test_collapse_reads_the_last_answer_of_a_conversation():
    one = sample(LOOP, [-0.5] * 21, "length")
    longer = Rollout(
        torch.cat([one.rollout.token_ids, torch.tensor([7, 8])]),
        torch.cat([one.rollout.loss_mask, torch.tensor([False, False])]),
        torch.cat([one.rollout.inference_logprobs, torch.tensor([NAN, NAN])]),
        "length",
        0,
    )
    metrics = collapse_metrics([replace(one, rollout=longer)])
    assert metrics["rollout/repeated_tokens"] == 18 / 21 and metrics["rollout/entropy"] == 0.5
