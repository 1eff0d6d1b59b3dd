"""The student's forward: what it packs, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from prime_composer.contract import IN_TAIL
from prime_composer.step.batch import Sample
from prime_composer.step.student_forward import student_inputs
from tests.local.helpers import PROBLEM, random_samples, sample


def test_student_inputs_pack_the_trained_tokens(student: tuple[Any, Any]) -> None:
    """Tokens, segments, scores and advantages of all samples are packed in order."""
    first, second = random_samples([(3, 2), (2, 4)], k=3)
    samples = [
        Sample(one.rollout, PROBLEM, advantage=advantage, scores=one.scores)
        for one, advantage in ((first, 0.5), (second, -1.0))
    ]
    inputs = student_inputs(student[0], samples)
    tokens = first.rollout.completion_ids + second.rollout.completion_ids
    assert inputs.token_ids.tolist() == tokens
    assert inputs.segment_ids.tolist() == [0, 0, 1, 1, 1, 1]
    assert inputs.advantages.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0, -1.0]
    for packed, name in (
        (inputs.ref_logprobs, "ref_logprobs"),
        (inputs.support.token_ids, "token_ids"),
        (inputs.support.teacher_logprobs, "teacher_logprobs"),
    ):
        expected = torch.cat([getattr(one.scores, name) for one in (first, second)])
        assert torch.equal(packed, expected)
    mu = [one.rollout.inference_logprobs[one.rollout.loss_mask] for one in (first, second)]
    assert torch.equal(inputs.inference_logprobs, torch.cat(mu))
    with torch.no_grad():
        logprobs = student[0](second.rollout.token_ids[None]).logits[0].log_softmax(-1)
    expected = logprobs[1:-1].gather(-1, second.rollout.token_ids[2:, None])[:, 0]
    torch.testing.assert_close(inputs.trainer_logprobs[2:], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("temperature", "k"), [(1.0, 0), (0.7, 3)])
def test_student_inputs_have_logprobs_at_the_stops(
    student: tuple[Any, Any], temperature: float, k: int
) -> None:
    """At 1 and at the sampling temperature, of every trained token; what else there is stays."""
    samples = random_samples([(3, 2), (2, 4)], k=k)
    inputs = student_inputs(student[0], samples, temperature, stop_ids=(4, 11))
    with torch.no_grad():
        logits = torch.cat(
            [
                student[0](s.rollout.token_ids[None]).logits[0, s.rollout.start - 1 : -1]
                for s in samples
            ]
        )
    expected = logits.log_softmax(-1)[:, [4, 11]]
    assert inputs.stops.token_ids == (4, 11)
    torch.testing.assert_close(inputs.stops.logprobs, expected, rtol=0, atol=2e-5)
    if temperature == 1:
        assert inputs.stops.tempered is None
    else:
        tempered = (logits / temperature).log_softmax(-1)[:, [4, 11]]
        torch.testing.assert_close(inputs.stops.tempered, tempered, rtol=0, atol=2e-5)
    plain = student_inputs(student[0], samples, temperature)
    torch.testing.assert_close(inputs.trainer_logprobs, plain.trainer_logprobs)
    if k:
        torch.testing.assert_close(inputs.support.student_logprobs, plain.support.student_logprobs)
    with pytest.raises(ValueError, match=r"stops\.ids has 999999"):
        student_inputs(student[0], samples, stop_ids=(4, 999_999))


def test_ids_that_a_teacher_does_not_know_are_not_known_to_the_loss(
    student: tuple[Any, Any],
) -> None:
    """Of one rollout's teacher only; what its numbers are is not read."""
    first, second = random_samples([(3, 2), (2, 4)], k=3)
    known = torch.tensor([[True, False, True], [True, True, False]])
    odd = replace(
        first.scores,
        known=known,
        teacher_logprobs=torch.where(known, first.scores.teacher_logprobs, torch.nan),
        token_ids=torch.where(known, first.scores.token_ids, 10**6),
    )
    support = student_inputs(student[0], [replace(first, scores=odd), second]).support
    assert torch.equal(support.known, torch.cat([known, torch.ones(4, 3, dtype=torch.bool)]))
    masked = support.masked(torch.ones(6, dtype=torch.bool))
    for side in (masked.teacher_logprobs, masked.student_logprobs):
        assert side.isfinite().all() and (side[~support.known] == IN_TAIL).all()


def test_student_inputs_leave_out_what_no_sample_has(student: tuple[Any, Any]) -> None:
    """Without scores and advantages there is no teacher and no reward to read."""
    inputs = student_inputs(student[0], [sample(0), sample(1)])
    assert inputs.ref_logprobs is None and inputs.support is None and inputs.advantages is None
