"""What the probe says of a teacher with a tokenizer of its own, against counts by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.local.probe.report import TokenizerPairFacts
from prime_composer.local.probe.tokenizers import pair_facts
from prime_composer.problems.config import Problem
from prime_composer.step.batch import Sample
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from tests.local.helpers import probed
from tests.teachers.own import STUDENT, TEACHER, own_recipe, rollout_of, scorer_of, wrapped


def facts_of(
    scorer: OwnTokenizerScorer, student: Any, rollouts: list[Rollout]
) -> TokenizerPairFacts:
    samples = [Sample(rollout, Problem("", "")) for rollout in rollouts]
    return pair_facts(scorer, samples, student, wrapped(TEACHER), 4)


def test_pair_facts_are_counts_of_tokens_and_boundaries() -> None:
    # The teacher writes abc|ab| |c, the student a|bc|a|b| c and its end.
    scorer, student = scorer_of(STUDENT, shift=3)
    facts = facts_of(scorer, student, [rollout_of(student, "ab ", "abcab c")])
    assert (facts.positions, facts.k) == (6, 4)
    assert facts.aligned == pytest.approx(4 / 6)
    assert facts.teacher_tokens == pytest.approx(4 / 6)
    assert facts.noncanonical == facts.unscored == 0
    assert facts.student_prompt == "ab " and facts.teacher_prompt == "!!!ab "
    # "c" may follow: the student's bc and " c" begin with these.
    assert facts.open_tokens == 2 and sorted(facts.often_open) == [" ", "b"]
    assert 0 < facts.closed_mass < 1 and 0 < facts.support_mass <= facts.best_mass < 1


def test_pair_facts_count_tokens_that_nobody_would_write() -> None:
    scorer, student = scorer_of(STUDENT)
    apart = [*student.encode("b"), *student.encode("c"), student.eos_token_id]
    cut = [*student.encode("a"), student.eos_token_id, *student.encode("abc")]
    prompt = student.encode("ab")
    rollouts = [
        Rollout.not_sampled(torch.tensor([*prompt, *ids]), len(prompt), "length")
        for ids in (apart, cut)
    ]
    facts = facts_of(scorer, student, rollouts)
    unscored = len(student.encode("abc"))
    assert facts.unscored == pytest.approx(unscored / (3 + 2 + unscored))
    assert facts.noncanonical == pytest.approx(1 / 5)


def test_probe_measures_a_teacher_with_its_own_tokenizer(
    tiny_recipe: Callable[..., dict[str, Any]],
) -> None:
    report = probed(own_recipe(tiny_recipe, trainer__steps=1))
    assert report.passed, [finding for finding in report.findings if finding.state == "failed"]
    teacher = report.teachers["teacher"]
    assert teacher.same_tokenizer is False and teacher.same_prompts is None
    assert teacher.head_bfloat16 is None and "agreement" in teacher.unmeasured
    assert teacher.support is not None and teacher.throughput[-1].tokens_per_second is not None
    assert teacher.support.by_k[-1].reverse_kl > 0 and teacher.support.entropy > 0
    pair = teacher.tokenizers
    assert pair is not None and 0 < pair.aligned < 1 and pair.k == 8
    named = [one for one in report.findings if one.name == "[teacher] tokenizers"]
    assert named[0].state == "ok"
    assert any("noncanonical" in one.text for one in named) == (pair.noncanonical > 0.05)
