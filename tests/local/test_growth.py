"""Short to long: the budget of each step, whom it reaches, and what takes it for no fault."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.environments.episodes import Episode
from prime_composer.environments.tasks import Task
from prime_composer.local.collect import Clock, Collector
from prime_composer.local.engine import Engine
from prime_composer.local.probe.run import impatient
from prime_composer.local.run_dir.plan import plan
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.rollout import GrowthConfig, RolloutConfig
from prime_composer.recipe.schema import RecipeError, ReplayConfig, TrainerConfig
from prime_composer.samplers.transformers import TransformersSampler
from tests.command import numbers
from tests.local.helpers import Silent, rollout, run, weights
from tests.local.test_teacher_samples import OWN, STUDENT, Writer, numbered, writers

Raw = Callable[..., dict[str, Any]]
GROWTH = {"start": 3, "steps": 4}
LIMITS = [3, 4, 6, 8]
"""Of steps 1 to 4 on the way to 8: 3 + 5/3, 3 + 10/3 and 3 + 15/3, without what is behind the
point."""


@pytest.mark.parametrize(
    ("start", "steps", "largest", "limits"),
    [
        (3, 4, 8, [*LIMITS, 8, 8]),
        (8, 5, 32, [8, 14, 20, 26, 32, 32]),
        (7, 2, 8, [7, 8, 8]),
        (1, 6, 3, [1, 1, 1, 2, 2, 3, 3]),
        (1, 3, 100_000_000, [1, 50_000_000, 100_000_000]),
    ],
)
def test_budget_of_a_step_is_on_a_line(
    start: int, steps: int, largest: int, limits: list[int]
) -> None:
    growth = GrowthConfig(start=start, steps=steps)
    assert [growth.limit(step, largest) for step in range(1, len(limits) + 1)] == limits


class Recording(Writer):
    """A sampler that writes down what it was asked for."""

    def __init__(self, token: int, asked: list[tuple[int, int]]):
        super().__init__(token)
        self.asked = asked

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        self.asked.append((self.token, params.max_tokens))
        return super().generate(prompts, params, seed)


def collector(engine: Engine, **rollout: Any) -> Collector:
    config = RolloutConfig(max_tokens=8, **rollout)
    return Collector(engine, TrainerConfig(steps=9), config, ReplayConfig(), Clock())


def test_budget_reaches_student_and_teachers() -> None:
    """Any sampler gets it, one from outside the package too."""
    problems, asked = numbered(40, lambda i: "sums" if i % 2 else "chains"), []
    engine = writers(problems, OWN)
    assert engine.teachers is not None
    samplers = [Recording(STUDENT, asked)]
    engine.sampler = samplers[0]
    for scorer in engine.teachers.scorers.values():
        scorer.sampler = Recording(scorer.token, asked)
        samplers.append(scorer.sampler)
    growing = {"other_source": "teacher", "student_fraction": 0.5, "growth": GROWTH}
    seen = {}
    for step in (1, 2, 3, 4, 5):
        one = collector(engine, **growing)
        one.sample(problems, step)
        seen[step] = one.metrics
    tokens = [sampler.token for sampler in samplers]
    for step, limit in enumerate((*LIMITS, 8)):
        assert sorted(asked[3 * step : 3 * step + 3]) == [(one, limit) for one in sorted(tokens)]
        assert seen[step + 1] == {"rollout/max_tokens": limit}
    one = collector(engine)
    one.sample(problems, 1)
    assert asked[-1] == (STUDENT, 8) and one.metrics == {}


def test_budget_reaches_each_turn_of_an_environment() -> None:
    asked: list[int] = []

    def play(sampler: Any, tasks: Any, params: SamplingParams, seed: int) -> list[Episode]:
        asked.append(params.max_tokens)
        return [Episode([rollout(0)], 1.0, "text", 1, 0, False)]

    engine = writers([], {})
    engine.environments = SimpleNamespace(run=play)
    for step in (1, 2, 3, 4):
        collector(engine, growth=GROWTH).sample([Task("?", "", "talk")], step)
    assert asked == LIMITS


@pytest.fixture(scope="module")
def whole(
    tiny_recipe: Raw, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, int]]]:
    """Run the tiny recipe with growth, and write down how many answers were asked, how long."""
    asked, original = [], TransformersSampler.generate

    def generate(self: Any, prompts: Any, params: SamplingParams, seed: int) -> list[Rollout]:
        asked.append((len(prompts), params.max_tokens))
        return original(self, prompts, params, seed)

    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersSampler, "generate", generate)
        run(raw_of(tiny_recipe), run_dir)
    return run_dir, asked


def raw_of(tiny_recipe: Raw) -> dict[str, Any]:
    return tiny_recipe(
        rollout__growth=GROWTH,
        trainer__steps=5,
        checks={"collapse": {"longer": 1.5, "shorter": 0.7, "steps": 1, "action": "stop"}},
    )


def test_run_samples_short_to_long_and_evaluates_whole_answers(
    whole: tuple[Path, list[tuple[int, int]]],
) -> None:
    run_dir, asked = whole
    steps = [limit for prompts, limit in asked if prompts == 6]  # trainer.batch_size
    assert steps == [*LIMITS, 8]
    evaluated = [limit for prompts, limit in asked if prompts == 4]  # eval.size and eval.kl_size
    assert len(evaluated) >= 8 and set(evaluated) == {8}
    records = read_metrics(run_dir)[1:]
    assert [record["rollout/max_tokens"] for record in records] == steps
    assert all(record["rollout/tokens"] <= record["rollout/max_tokens"] for record in records)
    assert records[0]["rollout/truncated"] > 0.5


def test_growing_answers_are_no_collapse(whole: tuple[Path, list[tuple[int, int]]]) -> None:
    """Cuts and lengths count from the first step with max_tokens on.

    A run that compared with step 1, with 3 tokens, would stop at 6 tokens: twice as long.
    """
    records = read_metrics(whole[0])[1:]
    lengths = [record["rollout/tokens"] for record in records]
    assert lengths[2] > 1.5 * lengths[0] and lengths[3] > 5
    measured = ["rollout/student_tokens", "rollout/student_truncated", "rollout/growth"]
    for name in measured:
        assert [name in record for record in records] == [False, False, False, True, True]
    assert records[3]["rollout/growth"] == 1.0
    assert all("rollout/repeated" in record for record in records)


def test_run_that_grows_resumes_bit_exactly(
    whole: tuple[Path, list[tuple[int, int]]], tiny_recipe: Raw, tmp_path: Path
) -> None:
    """It was cut after step 2, and the budget of step 3 is neither the first nor the largest."""
    raw, cut = raw_of(tiny_recipe), tmp_path / "cut"
    assert run(raw, cut, Silent(interrupt_at=3)).steps == 2
    run(raw, cut, resume=True)
    assert [record["rollout/max_tokens"] for record in read_metrics(cut)[1:]] == [*LIMITS, 8]
    assert numbers(cut) == numbers(whole[0])
    resumed, expected = weights(cut), weights(whole[0])
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


def test_dry_run_counts_what_may_be_sampled(tiny_recipe: Raw) -> None:
    """6 answers a step: 6 (3 + 4 + 6 + 8 + 8) tokens of 6 * 5 * 8."""
    recipe = parse_recipe(raw_of(tiny_recipe))
    text = "\n".join(plan(recipe, load_problem_set(recipe.sources)))
    assert "at most 8 new tokens each, 3 in step 1 and all from step 4 on\n" in text
    assert "30 rollouts, at most 174 new tokens\n" in text


def test_probe_measures_the_largest_step(tiny_recipe: Raw) -> None:
    assert impatient(parse_recipe(raw_of(tiny_recipe))).rollout.growth is None


DEFAULT = {"loss": {"type": "default"}, "rollout__group_size": 2}
REPLAY = {"weight": 1.0, "loss": {"type": "dpo"}}
SIBLING = {"teacher": {"policy": {"hint": "sibling"}}, "rollout__group_size": 2}


@pytest.mark.parametrize(
    ("growth", "changes", "words"),
    [
        ({"start": 0}, {}, ["rollout.growth.start", "greater than or equal to 1", "raise it"]),
        ({"steps": 1}, {}, ["rollout.growth.steps", "greater than or equal to 2", "raise it"]),
        ({"start": 3.5}, {}, ["rollout.growth.start", "integer"]),
        ({"end": 9}, {}, ["rollout.growth.end"]),
        ({"start": 8}, {}, ["rollout.growth.start = 8", "rollout.max_tokens = 8", "lower it"]),
        ({"steps": 5}, {}, ["rollout.growth.steps = 5", "trainer.steps = 4", "lower it"]),
        (
            {},
            {"rollout__student_fraction": 0.0, "loss": {"type": "sft"}},
            ["rollout.student_fraction = 0", "rollout.other_source = 'teacher'"],
        ),
        ({}, DEFAULT, ['[loss] type = "default"', "rewards", "Leave [rollout.growth] out"]),
        (
            {},
            {
                "loss": {"type": "compose", "rl": {"weight": 0.0}, "replay": REPLAY},
                "rollout__group_size": 2,
            },
            ["rewards", "Leave [rollout.growth] out"],
        ),
        ({}, SIBLING, ['teacher.policy.hint = "sibling"', "rewards"]),
    ],
)
def test_growth_that_does_not_fit_is_refused(
    growth: dict[str, Any], changes: dict[str, Any], words: list[str], tiny_recipe: Raw
) -> None:
    """By key and remedy, before anything is opened."""
    raw = tiny_recipe(**{"rollout__growth": GROWTH | growth} | changes)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(raw)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": {"policy": {"hint": "reference"}}},
        {"loss": {"type": "generalized_jsd", "k": 8}, "rollout__student_fraction": 0.5},
        {
            "loss": {"type": "sft"},
            "rollout__student_fraction": 0.0,
            "rollout__other_source": "teacher",
        },
    ],
)
def test_growth_goes_with_what_reads_no_rewards(changes: dict[str, Any], tiny_recipe: Raw) -> None:
    parse_recipe(tiny_recipe(rollout__growth=GROWTH, **changes))
