"""Rollouts that are longer than their teacher's window: an error, the head alone, or left out."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.local.engine import Engine
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.config import Problem
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.step.batch import Sample
from prime_composer.step.overflow import Rule, fit
from tests.local.helpers import Narrow, collect, open_run, run

Raw = Callable[..., dict[str, Any]]


def sample(prompt: int = 3, completion: int = 5) -> Sample:
    logprobs = [-0.1 * (i + 1) for i in range(completion)]
    rollout = make_rollout([7] * prompt, [9] * completion, logprobs, "length", 0)
    return Sample(rollout, Problem("q", "#### 1"), "text", 1.0, 0.5)


def test_head_keeps_what_the_teacher_can_read() -> None:
    """Text, reward and advantage are those of the whole rollout."""
    one = sample()
    head = fit(one, 3, 6, "score_head")
    assert head is not None and head.length == 6
    assert head.rollout.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert torch.equal(head.rollout.inference_logprobs[3:], one.rollout.inference_logprobs[3:6])
    assert (head.text, head.reward, head.advantage) == ("text", 1.0, 0.5)
    assert one.length == 8


def test_hint_takes_room_from_the_completion() -> None:
    """The teacher reads 10 tokens in place of the prompt's 3."""
    head = fit(sample(), 10, 12, "score_head")
    assert head is not None and head.length == 3 + 2


@pytest.fixture
def narrow(tiny_recipe: Raw) -> Iterator[Callable[..., tuple[Recipe, Engine, Narrow]]]:
    engines = []

    def make(rule: str, window: int) -> tuple[Recipe, Engine, Narrow]:
        recipe, engine = open_run(tiny_recipe(teacher__on_overflow=rule))
        engines.append(engine)
        assert engine.teachers is not None
        scorer = Narrow(engine.teachers.scorers[TeacherId()], window)
        engine.teachers.scorers[TeacherId()] = scorer  # type: ignore[index]
        return recipe, engine, scorer

    yield make
    for engine in engines:
        engine.__exit__(None, None, None)


def collected(made: tuple[Recipe, Engine, Narrow]) -> tuple[Any, dict[str, float]]:
    recipe, engine, _ = made
    return collect(engine, recipe, 1)


def test_step_trains_on_heads_with_the_scores_of_the_whole(narrow: Any) -> None:
    whole, _ = collected(narrow("error", 1000))
    longest = max(one.length for one in whole.samples)
    batch, metrics = collected(narrow("score_head", longest))
    cut = [one.length == longest for one in whole.samples]
    assert metrics["rollout/teacher_cut"] == sum(cut) / len(cut) > 0
    assert metrics["rollout/teacher_dropped"] == 0
    for before, after, is_cut in zip(whole.samples, batch.samples, cut, strict=True):
        assert after.length == before.length - is_cut
        n = after.length - after.rollout.start
        torch.testing.assert_close(
            after.scores.teacher_logprobs, before.scores.teacher_logprobs[:n], atol=1e-5, rtol=0
        )
        assert len(after.scores.ref_logprobs) == n


def test_step_leaves_out_what_does_not_fit(narrow: Any) -> None:
    whole, metrics = collected(narrow("error", 1000))
    assert not any(name.startswith("rollout/teacher_") for name in metrics)
    longest = max(one.length for one in whole.samples)
    batch, metrics = collected(narrow("drop", longest))
    kept = [one.rollout.token_ids.tolist() for one in whole.samples if one.length < longest]
    assert [one.rollout.token_ids.tolist() for one in batch.samples] == kept
    dropped = len(whole.samples) - len(kept)
    assert metrics["rollout/teacher_dropped"] == dropped / len(whole.samples) > 0


def test_evaluation_counts_what_was_scored(narrow: Any) -> None:
    """The KL is a mean over the tokens that the teacher could read."""
    recipe, engine, scorer = narrow("score_head", 10)
    evaluation = Evaluator(engine, recipe)
    problems = engine.problems.problem_set.held_out[:4]
    measured = evaluation._divergence_sums(engine.teachers, problems)
    sums, tokens = measured["reverse_kl"], measured["tokens"]
    assert len(sums) == len(tokens) == 4 and max(scorer.lengths, default=0) < 10
    assert all(value >= -1e-6 for value in sums)
    assert all((value == 0) == (count == 0) for value, count in zip(sums, tokens, strict=True))


LONG_HINT = "{hint} " * 60 + "{question}"
"""With any solution longer than the tiny recipe's window of 128 tokens."""


def test_hint_that_leaves_no_room_is_an_error_or_counted(tiny_recipe: Raw, tmp_path: Path) -> None:
    raw = tiny_recipe(
        teacher={"policy": {"hint": "reference", "template": LONG_HINT}},
        loss={"type": "self_distillation", "k": 8},
        trainer={"steps": 1, "batch_size": 4},
    )
    with pytest.raises(ValueError, match="longest prompt with its hint has .* raise rollout.max"):
        run(raw, tmp_path / "error")
    raw["teacher"]["on_overflow"] = "score_head"
    run(raw, tmp_path / "run")
    step = read_metrics(tmp_path / "run")[1]
    assert step["rollout/teacher_dropped"] == 1.0 and step["rollout/teacher_cut"] == 0.0
    assert "rollout/without_hint" not in step and step["grad_norm"] == 0


@pytest.mark.parametrize(("before", "rule"), [(3, "drop"), (6, "score_head"), (9, "score_head")])
def test_sample_without_room_for_a_token_is_dropped(before: int, rule: Rule) -> None:
    assert fit(sample(), before, 6, rule) is None
