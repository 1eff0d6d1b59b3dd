"""Gradients of a step: micro-batches, token mean, a sum's channels, and means of metrics."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_student
from prime_composer.contract import Mean, Scores
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import (
    MetricAverages,
    NonFiniteLoss,
    accumulate_gradients,
    prepare_micro_batches,
)
from tests.conftest import TINY_RECIPE
from tests.local.helpers import PROBLEM, VOCAB, opened, random_samples, tiny_models

Raw = Callable[..., dict[str, Any]]
LENGTHS = [(3, 5), (7, 2), (2, 9), (4, 4), (6, 1)]


@pytest.fixture(scope="module")
def tiny_model() -> torch.nn.Module:
    model, _ = load_student(tiny_models(TINY_RECIPE)["student"])
    return model.double()


def gradients(
    model: torch.nn.Module, samples: list[Sample], **config: Any
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=samples[0].scores.token_ids.shape[-1]))
    accumulate_gradients(model, loss, Batch(samples), TrainerConfig(steps=1, **config), step=1)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_micro_batches_keep_every_rollout_and_the_budget(tiny_model: torch.nn.Module) -> None:
    """Every rollout is in one micro-batch; rows times the longest row fit unless it is alone."""
    samples = random_samples([(2, n) for n in (3, 30, 7, 7, 12, 1, 50)], k=2)
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=2))

    def groups(budget: int) -> list[list[int]]:
        config = TrainerConfig(steps=1, micro_batch_tokens=budget)
        batches = prepare_micro_batches(tiny_model, loss, Batch(samples), config)
        return [[int(name.removeprefix("rollout ")) for name in batch.names] for batch in batches]

    assert len(groups(1)) == 7 and len(groups(1000)) == 1
    assert sorted(index for group in groups(40) for index in group) == list(range(7))
    for group in groups(40):
        longest = max(samples[index].length for index in group)
        assert len(group) == 1 or longest * len(group) <= 40


def test_gradient_is_that_of_the_token_mean(tiny_model: torch.nn.Module) -> None:
    """It is that of the tail KL per token, written out with a plain forward, for any grouping."""
    samples = random_samples(LENGTHS, k=8)
    ours = [gradients(tiny_model, samples, micro_batch_tokens=budget) for budget in (1, 24, 1000)]
    tiny_model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in samples:
        ids, start = one.rollout.token_ids, one.rollout.start
        probs = tiny_model(ids[None]).logits[0].softmax(-1)
        for t in range(start, len(ids)):
            tokens += 1
            p = probs[t - 1][one.scores.token_ids[t - start]]
            q = one.scores.teacher_logprobs[t - start].exp()
            outcomes = zip([*p, 1 - p.sum()], [*q, 1 - q.sum()], strict=True)
            total = total + sum(a * (a / b).log() for a, b in outcomes)
    (total / tokens).backward()
    for name, parameter in tiny_model.named_parameters():
        for found in ours:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-7, atol=1e-10)


def test_bfloat16_logprobs_are_those_of_one_distribution() -> None:
    """With matrix products in bfloat16 the student's probabilities still add up to 1."""
    model, _ = load_student(tiny_models(TINY_RECIPE)["student"])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    samples = []
    for one in random_samples(LENGTHS, k=2):
        n = len(one.rollout.completion_ids)
        ids = torch.arange(VOCAB).expand(n, -1)
        scores = Scores(torch.zeros(n), ids, torch.zeros(n, VOCAB))
        samples.append(Sample(one.rollout, PROBLEM, scores=scores))
    config = TrainerConfig(steps=1, dtype="bfloat16")
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k="full"))
    (micro_batch,) = prepare_micro_batches(model, loss, Batch(samples), config)
    mass = micro_batch.inputs.support.student_logprobs.double().exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


def test_gradient_checkpointing_recomputes_to_the_same_gradient(tiny_recipe: Raw) -> None:
    """Each layer's forward runs twice, no dropout wakes up, and the gradient is the same."""
    samples = random_samples(LENGTHS, k=8)
    measured = {}
    for checkpointing in (False, True):
        with opened(tiny_recipe(trainer__gradient_checkpointing=checkpointing)) as engine:
            model, calls = engine.model.double(), []
            (layer,) = model.model.layers
            layer.self_attn.register_forward_hook(
                lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
            )
            measured[checkpointing] = gradients(model, samples, micro_batch_tokens=1000), len(calls)
            assert not any(part.training for part in layer.modules() if part is not layer)
    assert measured[False][1] == 1 and measured[True][1] == 2
    for name, gradient in measured[False][0].items():
        torch.testing.assert_close(measured[True][0][name], gradient, rtol=1e-9, atol=1e-12)


def test_infinite_score_stops_before_the_backward(tiny_model: torch.nn.Module) -> None:
    """The error names step, rollout and loss."""
    samples = random_samples(LENGTHS, k=8)
    samples[3].scores.teacher_logprobs[-1] = math.inf
    message = r"step 1: the loss 'topk_reverse_kl' of rollout 3 is (nan|-?inf)"
    with pytest.raises(NonFiniteLoss, match=message):
        gradients(tiny_model, samples)


def test_metrics_are_averaged_by_what_they_count() -> None:
    """Plain tensors are averaged over tokens, and others over their own number."""
    averages = MetricAverages()
    assert averages.empty and averages.result() == {}
    none = Mean(torch.tensor(math.nan), torch.tensor(0))
    averages.add({"kl": torch.tensor(1.0), "left": none}, 3)
    assert averages.result() == {"kl": 1.0, "left": 0.0}
    averages.add({"kl": torch.tensor(5.0), "left": Mean(torch.tensor(2.0), torch.tensor(4))}, 1)
    averages.add({"left": Mean(torch.tensor(7.0), torch.tensor(1))}, 0)
    # (3 * 1 + 1 * 5) / 4 tokens, (4 * 2 + 1 * 7) / 5 of those that are left
    assert averages.result() == {"kl": 2.0, "left": 3.0}
    assert not averages.empty
