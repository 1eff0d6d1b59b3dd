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


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
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
    metrics = share_metrics(balanced(samples_of(), Balance(weights={"a": 3.0})))
    assert metrics == pytest.approx(
        {
            "rollout/token_share/a": 5 / 19,
            "rollout/token_share/b": 14 / 19,
            "rollout/weight_share/a": 0.75,
            "rollout/weight_share/b": 0.25,
        }
    )


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens"), [("topk_forward_kl", 1), ("generalized_jsd", 1000)]
)
def test_kl_of_a_step_is_measured_by_environment(
    student: tuple[Any, Any], name: str, micro_batch_tokens: int
) -> None:
    """In float64 from the student's logits; of the student's own tokens, not of given ones."""
    model = copy.deepcopy(student[0]).double()
    samples = samples_of()
    given = torch.full_like(samples[3].rollout.inference_logprobs, torch.nan)
    samples[3] = replace(samples[3], rollout=replace(samples[3].rollout, inference_logprobs=given))
    terms: dict[str, list[float]] = {"a": [], "b": []}
    for one in samples[:3]:
        with torch.no_grad():
            log_p = model(one.rollout.token_ids[None]).logits[0, :-1].double().log_softmax(-1)
        labels = one.rollout.token_ids[one.rollout.loss_mask].tolist()
        for row, y in enumerate(labels):
            p = log_p[one.rollout.loss_mask[1:]][row]
            ids = one.scores.token_ids[row].tolist()
            q = one.scores.teacher_logprobs[row].double().tolist()
            value = sum(float(p[v].exp() * (p[v] - q[i])) for i, v in enumerate(ids))
            outside = float(p[y] - one.scores.ref_logprobs[row].double())
            terms[one.problem.environment].append(value + (0.0 if y in ids else outside))
    config = LOSS_TYPES[name].model_validate({"k": 3})
    trainer = TrainerConfig(steps=1, micro_batch_tokens=micro_batch_tokens)
    metrics = accumulate_gradients(model, setup_loss_fn(config), Batch(samples), trainer, 1)
    for name, own in terms.items():
        assert metrics[f"distillation/kl/{name}"] == pytest.approx(sum(own) / len(own), rel=1e-6)
    whole = sum(terms.values(), [])
    assert metrics["distillation/kl"] == pytest.approx(sum(whole) / len(whole), rel=1e-6)


@pytest.mark.parametrize("without", ["a teacher", "own tokens", "a teacher's numbers"])
def test_kl_of_a_step_that_has_none_is_absent(student: tuple[Any, Any], without: str) -> None:
    samples, of_teacher = samples_of(), without != "a teacher's numbers"
    table: dict[str, Any] = {"type": "topk_reverse_kl", "k": 3}
    if without == "own tokens":
        nan = [torch.full_like(one.rollout.inference_logprobs, torch.nan) for one in samples]
        samples = [
            replace(one, rollout=replace(one.rollout, inference_logprobs=mu))
            for one, mu in zip(samples, nan, strict=True)
        ]
    if without == "a teacher":
        table = {"type": "sft"}
    loss = setup_loss_fn(LOSS_TYPES[table["type"]].model_validate(table))
    batch = Batch(samples, of_teacher=of_teacher)
    model = copy.deepcopy(student[0])
    metrics = accumulate_gradients(model, loss, batch, TrainerConfig(steps=1), 1)
    assert metrics and not [name for name in metrics if name.startswith("distillation")]


def test_shares_are_of_the_teachers_that_rows_name() -> None:
    teachers = ["math", "code", "math", None]
    samples = [
        replace(one, problem=replace(one.problem, environment="problems", teacher=teacher))
        for one, teacher in zip(samples_of(), teachers, strict=True)
    ]
    metrics = share_metrics(samples)
    counts = [completion for _, completion in LENGTHS]
    by_name = {"math": counts[0] + counts[2], "code": counts[1], "problems": counts[3]}
    assert metrics == pytest.approx(
        {f"rollout/token_share/{name}": count / 19 for name, count in by_name.items()}
    )


def test_shares_of_a_single_environment_are_absent() -> None:
    samples = samples_of()
    assert share_metrics(samples[1:3]) == {} == share_metrics([])
    assert share_metrics(samples).keys() == {"rollout/token_share/a", "rollout/token_share/b"}


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
