"""A balanced step: its gradient against means that autograd takes one by one, and its shares."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.balance import Balance
from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step.balance import balanced, share_metrics
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.step.student_forward import student_inputs
from tests.local.helpers import random_samples

LENGTHS = [(3, 2), (2, 9), (4, 5), (2, 3)]
NAMES = ["a", "b", "b", "a"]


def samples_of() -> list[Sample]:
    samples = random_samples(LENGTHS, k=3)
    return [
        replace(one, problem=Problem("q", "a", environment=name))
        for one, name in zip(samples, NAMES, strict=True)
    ]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("micro_batch_tokens", [12, 24, 1000])
@pytest.mark.parametrize("by", ["sequence", "environment"])
def test_balanced_gradient_is_that_of_a_mean_of_means(
    student: tuple[Any, Any], by: str, micro_batch_tokens: int
) -> None:
    """For every packing, in float64."""
    model = copy.deepcopy(student[0]).double()
    samples = samples_of()
    table = {"type": "topk_reverse_kl", "k": 3}
    config = LOSS_TYPES["topk_reverse_kl"].model_validate({**table, "balance": {"by": by}})
    trainer = TrainerConfig(steps=1, micro_batch_tokens=micro_batch_tokens)
    batch = Batch(balanced(samples, config.balance))
    accumulate_gradients(model, setup_loss_fn(config), batch, trainer, 1)
    balanced_gradient = gradient(model)

    model.zero_grad()
    plain = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"].model_validate(table))
    sums = [plain(student_inputs(model, [sample])).loss for sample in samples]
    counts = [completion for _, completion in LENGTHS]
    if by == "sequence":
        mean = sum(one / count for one, count in zip(sums, counts, strict=True)) / 4
    else:
        mean = ((sums[0] + sums[3]) / (2 + 3) + (sums[1] + sums[2]) / (9 + 5)) / 2
    mean.backward()
    torch.testing.assert_close(balanced_gradient, gradient(model), rtol=1e-6, atol=1e-9)


def test_shares_of_a_step_are_counted_by_environment() -> None:
    """By hand; the KL is that of the student's own tokens that a teacher scored."""
    samples = balanced(samples_of(), Balance(weights={"a": 3.0}))
    given = replace(samples[3].rollout, inference_logprobs=torch.full((5,), torch.nan))
    samples[3] = replace(samples[3], rollout=given)
    metrics = share_metrics(samples)
    mu = [one.rollout.inference_logprobs[one.rollout.loss_mask] for one in samples]
    gaps = [m - one.scores.ref_logprobs for m, one in zip(mu, samples, strict=True)]
    assert metrics == pytest.approx(
        {
            "rollout/token_share/a": 5 / 19,
            "rollout/token_share/b": 14 / 19,
            "rollout/weight_share/a": 0.75,
            "rollout/weight_share/b": 0.25,
            "rollout/kl/a": float(gaps[0].mean()),
            "rollout/kl/b": float(torch.cat(gaps[1:3]).mean()),
        }
    )


def test_shares_of_a_single_environment_are_absent() -> None:
    samples = samples_of()
    assert share_metrics(samples[1:3]) == {} == share_metrics([])
    unscored = share_metrics([replace(one, scores=None) for one in samples])
    assert unscored.keys() == {"rollout/token_share/a", "rollout/token_share/b"}
    assert share_metrics(samples, of_teacher=False) == unscored
