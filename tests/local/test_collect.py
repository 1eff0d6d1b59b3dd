"""The batch of a step: advantages, the environments' shares, and GKD's lambda."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prime_composer.local.collect import (
    Collector,
    group_advantages,
    mean_by_environment,
)
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from tests.conftest import TINY_RECIPE, changed
from tests.local.helpers import collect, opened

Raw = Callable[..., dict[str, Any]]


def test_advantage_is_reward_minus_the_groups_mean() -> None:
    """A group of equal rewards has no advantage."""
    assert group_advantages([0, 1, 0, 1], [1.0, 1.0, 0.0, 1.0]) == [0.5, 0.0, -0.5, 0.0]


def test_mean_by_environment_is_over_its_own_problems() -> None:
    """Means are weighted by counts; an environment without a problem is left out."""
    names = ("sums", "chains", "free")
    problems = [Problem("?", "#### 1", environment=name) for name in ("sums", "chains", "sums")]
    sources = dict.fromkeys(names)
    assert mean_by_environment("m", sources, problems, [1.0, 0.0, 0.0]) == {
        "m/sums": 0.5,
        "m/chains": 0.0,
    }
    # Sums over 1, 2 and 3 tokens: (4 + 2) / (1 + 3).
    assert mean_by_environment("m", sources, problems, [4.0, 5.0, 2.0], [1.0, 2.0, 3.0]) == {
        "m/sums": 1.5,
        "m/chains": 2.5,
    }
    assert mean_by_environment("m", {"sums": None}, problems[:1], [1.0]) == {}


def test_student_fraction_replaces_sequences_by_solutions(tiny_recipe: Raw) -> None:
    """With lambda 0 all sequences are the data's correct solutions; with 0.5 some are."""
    changes = {"loss": {"type": "generalized_jsd", "k": 8}, "trainer__batch_size": 12}
    with opened(tiny_recipe(**changes)) as engine:
        for fraction in (0.0, 0.5):
            recipe = parse_recipe(tiny_recipe(**changes, rollout__student_fraction=fraction))
            rewards = [collect(engine, recipe, step)[1]["rollout/reward"] for step in (1, 2)]
            assert all(0 < one < 1 if fraction else one == 1 for one in rewards)


@pytest.mark.parametrize("several", [False, True], ids=["data", "environments"])
def test_islands_ask_the_parts_of_one_undivided_order(several: bool) -> None:
    """One after the other, each step's parts are the batches of a run with all steps by itself.

    With one kind of problems they are also the parts of its batches of three times the size.
    """
    raw = changed(TINY_RECIPE, trainer__seed=3)
    if several:
        data = {"source": "generated", "size": 40}
        del raw["data"]
        raw["environments"] = {"a": {**data, "ratio": 1}, "b": {**data, "seed": 9, "ratio": 2}}
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)

    engine = SimpleNamespace(problems=SimpleNamespace(problem_set=problems))

    def batch(step: int, size: int, island: tuple[int, int] | None) -> list[str]:
        trainer = recipe.trainer.model_copy(update={"batch_size": size})
        own, made = recipe.model_copy(update={"trainer": trainer}), Collector.__new__(Collector)
        made.__dict__ |= {"engine": engine, "recipe": own, "island": island}
        return [problem.question for problem in made.problems(step)]

    for step in range(1, 30):
        parts = [batch(step, 6, (index, 3)) for index in range(3)]
        assert parts == [batch(3 * step - 2 + index, 6, None) for index in range(3)]
        if not several:
            assert [one for part in parts for one in part] == batch(step, 18, None)
