"""A balanced step: its gradient against means that autograd takes one by one, and its shares."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from prime_composer.contract import given
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.balance import Balance
from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step.balance import balanced, share_metrics
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import accumulate_gradients, gradient_shares
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


def test_shares_are_of_the_teachers_that_rows_name() -> None:
    teachers = ["math", "code", "math", None]
    samples = [
        replace(one, problem=replace(one.problem, environment="problems", teacher=teacher))
        for one, teacher in zip(samples_of(), teachers, strict=True)
    ]
    metrics = share_metrics(samples, of_teacher=False)
    counts = [completion for _, completion in LENGTHS]
    by_name = {"math": counts[0] + counts[2], "code": counts[1], "problems": counts[3]}
    assert metrics == pytest.approx(
        {f"rollout/token_share/{name}": count / 19 for name, count in by_name.items()}
    )


def test_shares_of_a_single_environment_are_absent() -> None:
    samples = samples_of()
    assert share_metrics(samples[1:3]) == {} == share_metrics([])
    unscored = share_metrics([replace(one, scores=None) for one in samples])
    assert unscored.keys() == {"rollout/token_share/a", "rollout/token_share/b"}
    assert share_metrics(samples, of_teacher=False) == unscored


@pytest.mark.parametrize("knobs", [{}, {"balance": {"weights": {"a": 3.0}}}], ids=["", "balance"])
def test_gradient_shares_are_norms_of_the_parts(student: tuple[Any, Any], knobs: Any) -> None:
    """Of the gradient of one environment's tokens alone; a schedule sees the step once."""
    model, _ = student
    config = LOSS_TYPES["taid"](k=3, total_steps=9, **knobs)
    loss, trainer = setup_loss_fn(config), TrainerConfig(steps=1, micro_batch_tokens=24)
    samples = samples_of()
    if config.balance is not None:
        samples = balanced(samples, config.balance)
    before = loss.state_dict()
    shares = gradient_shares(model, loss, Batch(samples), trainer, 1)
    assert loss.state_dict() == before and loss._step_total is None
    assert all(p.grad is None for p in model.parameters())
    norms = {}
    for name in ("a", "b"):
        own = [0.0 if one.problem.environment != name else given(one.weight) if knobs else 1.0
               for one in samples]  # fmt: skip
        inputs = student_inputs(model, samples)
        weights = torch.tensor(own)[given(inputs.segment_ids)]
        inputs = replace(inputs, balance=None, loss_weights=weights)
        setup_loss_fn(config.model_copy(update={"balance": None}))(inputs).loss.backward()
        norms[name] = float(gradient(model).norm())
        model.zero_grad()
    expected = {f"rollout/gradient_share/{n}": norms[n] / sum(norms.values()) for n in norms}
    assert shares == pytest.approx(expected, rel=1e-5)
    assert gradient_shares(model, loss, Batch(samples[1:3]), trainer, 1) == {}
