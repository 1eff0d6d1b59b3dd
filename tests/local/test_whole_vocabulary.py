"""Losses with k = "full": hidden states and heads from the scorers to the gradient."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import load_student
from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.local import evaluate as evaluate_module
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.tracker import read_metrics
from prime_composer.losses import parse_loss, setup_loss_fn
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError, TrainerConfig
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.step.student_forward import student_inputs
from tests.conftest import TINY_RECIPE
from tests.local.helpers import (
    VOCAB,
    open_run,
    random_samples,
    run,
    tiny_models,
)
from tests.local.test_several_teachers import raw

Raw = Callable[..., dict[str, Any]]
LENGTHS = [(3, 5), (7, 2), (2, 9), (4, 1)]
FULL = {"loss__k": "full", "loss__normalization": "full"}


@pytest.fixture(scope="module")
def student() -> torch.nn.Module:
    model, _ = load_student(tiny_models(TINY_RECIPE)["student"])
    return model.double()


def heads() -> list[TeacherHead]:
    """Two heads of other widths, in float64."""
    g = torch.Generator().manual_seed(3)
    return [
        TeacherHead(torch.randn(VOCAB, width, generator=g, dtype=torch.float64), origin=f"T{width}")
        for width in (5, 8)
    ]


def with_states(samples: list[Sample], shares: list[list[float]]) -> list[Sample]:
    """Give each sample the hidden states of the teachers with a share in it, and log q of both."""
    g, teachers = torch.Generator().manual_seed(4), heads()
    scored = []
    for one, weights in zip(samples, shares, strict=True):
        n = len(one.rollout.token_ids) - one.rollout.start
        states = [
            torch.randn(n, head.weight.shape[1], generator=g, dtype=torch.float64)
            for head in teachers
        ]
        given = [
            HiddenStates(own, head, weight)
            for own, head, weight in zip(states, teachers, weights, strict=True)
            if weight
        ]
        own = mixture(given).gather(-1, one.rollout.token_ids[one.rollout.start :, None])[:, 0]
        none = torch.empty(n, 0)
        scores = Scores(own.log(), none.long(), none.double(), tuple(given))
        scored.append(replace(one, scores=scores))
    return scored


def mixture(hidden: list[HiddenStates] | tuple[HiddenStates, ...]) -> Tensor:
    """Return q of the whole vocabulary, [n, V], written out."""
    return sum(
        one.weight * (one.states.double() @ one.head.weight.double().T).softmax(-1)
        for one in hidden
    )


def gradients(model: torch.nn.Module, samples: list[Sample], loss: dict[str, Any], **config: Any):
    model.zero_grad()
    bound, trainer = setup_loss_fn(parse_loss(loss)), TrainerConfig(steps=1, **config)
    measured = accumulate_gradients(model, bound, Batch(samples), trainer, step=1)
    return measured, {name: p.grad.clone() for name, p in model.named_parameters()}


def plain(model: torch.nn.Module, samples: list[Sample], temperature: float = 1.0):
    """Return KL(p || q) per token and its gradients, by a plain forward and softmax."""
    model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in samples:
        start = one.rollout.start
        logits = model(one.rollout.token_ids[None]).logits[0, start - 1 : -1]
        p = (logits / temperature).softmax(-1)
        q = mixture(one.scores.hidden).log().div(temperature).softmax(-1)
        total = total + (p * (p / q).log()).sum()
        tokens += len(p)
    (total / tokens).backward()
    return total.item() / tokens, {name: p.grad.clone() for name, p in model.named_parameters()}


ONE = [[1.0, 0.0]] * 4


@pytest.mark.parametrize(
    ("shares", "temperature"),
    [(ONE, 1.0), ([[0.0, 1.0], [1.0, 0.0], [0.3, 0.7], [0.5, 0.5]], 1.0), (ONE, 2.5)],
    ids=["one teacher", "several", "temperature"],
)
def test_gradient_is_that_of_the_kl_over_whole_softmaxes(
    student: torch.nn.Module, shares: list[list[float]], temperature: float
) -> None:
    """One teacher, or rollouts of each of two and of their mixtures, in several micro-batches.

    A temperature divides the logits of both.
    """
    samples = with_states(random_samples(LENGTHS, k=1), shares)
    expected, expected_gradients = plain(student, samples, temperature)
    for budget in (1000, 20):
        loss = {"type": "topk_reverse_kl", "k": "full", "temperature": temperature}
        measured, found = gradients(student, samples, loss, micro_batch_tokens=budget)
        assert measured["loss"] == pytest.approx(expected, rel=1e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-11)


def test_gradient_in_bfloat16_is_the_same_in_small_batches() -> None:
    """Half precision is a percent off the numbers of one micro-batch in float32."""
    model, _ = load_student(tiny_models(TINY_RECIPE)["student"])
    samples = with_states(random_samples(LENGTHS, k=1), [[1.0, 0.0]] * 4)
    loss = {"type": "topk_reverse_kl", "k": "full"}
    measured, expected = gradients(model, samples, loss, micro_batch_tokens=1000)
    for budget in (8, 1000):
        small, found = gradients(model, samples, loss, micro_batch_tokens=budget, dtype="bfloat16")
        assert small["loss"] == pytest.approx(measured["loss"], rel=0.02)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), (budget, name)


def test_states_of_another_head_are_refused(student: torch.nn.Module) -> None:
    """A server's own log-prob of one token is not that of hidden state and head."""
    samples = with_states(random_samples(LENGTHS, k=1), [[0.0, 1.0]] * 4)

    def served(one: Sample) -> Sample:
        (hidden,) = one.scores.hidden
        return replace(one, scores=replace(one.scores, hidden=(replace(hidden, head=head),)))

    head = replace(samples[0].scores.hidden[0].head, tolerance=1e-3, origin="The server at U")
    samples = [served(one) for one in samples]
    assert student_inputs(student, samples).hidden_states is not None
    samples[2].scores.hidden[0].states[4] += 0.01
    message = r"The server at U gave a hidden state at position 6 of rollout 2"
    with pytest.raises(InvalidAnswer, match=message):
        student_inputs(student, samples)
    samples[2].scores.hidden[0].states[4] = torch.nan
    with pytest.raises(InvalidAnswer, match=message):
        student_inputs(student, samples)


def test_run_by_hidden_states_equals_a_run_on_all_ids(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, step by step, as by log-probs of every id."""
    table = tiny_recipe(**FULL, loss__type="todi", trainer__steps=2)
    run(table, tmp_path / "states")
    config = type(parse_recipe(table).loss)
    monkeypatch.setattr(config, "comparison_need", "support")
    run(table, tmp_path / "ids")
    states, ids = (read_metrics(tmp_path / name) for name in ("states", "ids"))
    key = "todi/divergence"
    assert [row[key] for row in states[1:]] == pytest.approx(
        [row[key] for row in ids[1:]], rel=1e-4
    )
    assert "todi/student_mass" in ids[-1] and "todi/student_mass" not in states[-1]


def test_mixture_by_hidden_states_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KL by hidden states is the one by the log-probs of every id, per rollout."""
    table = raw(**FULL, environments__sums__teacher={"short": 1, "long": 3}, eval__kl_size=6)
    recipe, engine = open_run(table)
    with engine:
        evaluator = Evaluator(engine, recipe)
        problems = engine.problems.problem_set.held_out[:6]
        assert len({len(engine.teachers.routing.of(problem)) for problem in problems}) == 2
        by_ids = evaluator._divergence_sums(engine.teachers, problems)
        monkeypatch.setattr(evaluate_module, "FULL_VOCABULARY_UP_TO", 1)
        by_states = evaluator._divergence_sums(engine.teachers, problems)
    assert by_states["tokens"] == by_ids["tokens"]
    for name in ("reverse_kl", "forward_kl", "entropy", "teacher_entropy"):
        assert by_states[name] == pytest.approx(by_ids[name], abs=1e-4)


def test_temperature_of_masses_is_refused(tiny_recipe: Raw) -> None:
    with pytest.raises(RecipeError, match="set k = 'full' or normalization = 'renorm'"):
        parse_recipe(tiny_recipe(loss__temperature=2.0))


@pytest.mark.parametrize(("share", "support"), [(1, 12), (3, 12), (3, "full")])
def test_overlap_is_measured_where_both_top_k_are_known(share: int, support: Any) -> None:
    """A mixture's top K is none of its teachers', and its whole vocabulary is exact."""
    table = raw(eval__kl_size=4, eval__kl_support=support, loss__type="sampled_reverse_kl")
    names = {"long": 1} if share == 1 else {"short": 1, "long": share}
    table["environments"]["sums"]["teacher"] = table["environments"]["chains"]["teacher"] = names
    recipe, engine = open_run(table)
    with engine:
        measured = Evaluator(engine, recipe).student()
    assert ("eval/overlap" in measured) == (share == 1 or support == "full")
    if "eval/overlap" in measured:
        assert 0 < measured["eval/overlap"] <= 1 and measured["eval/overlap_advantage"] <= 0
