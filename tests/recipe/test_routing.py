"""Who scores which problem, and with which weights."""

from typing import Any

import pytest

from prime_composer.problems.config import Problem
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import RecipeError

SHORT, LONG = TeacherId("short"), TeacherId("long")
TWO = {"short": {"model": "s"}, "long": {"model": "l", "weight": 3.0}}


def routing(**changes: Any) -> Routing:
    raw = {
        "student": {"model": "x"},
        "loss": {"type": "topk_reverse_kl"},
        "data": {},
        "trainer": {"steps": 1},
        **changes,
    }
    return Routing.of_recipe(parse_recipe(raw))


def test_routing_of_a_policy_teacher_is_empty() -> None:
    """A policy teacher is no model of its own, and without a teacher there is none."""
    policy = routing(teacher={"policy": {}})
    assert policy.teachers == {} and policy.of(Problem("?", "#### 1")) == {}
    plain = routing(loss={"type": "sft"})
    assert plain.teachers == {} and plain.of_environment("problems") == {}


def test_routing_goes_from_general_to_particular() -> None:
    several = routing(
        data=None,
        teachers=TWO,
        environments={
            "all": {"size": 20},
            "one": {"size": 20, "teacher": "short"},
            "mixed": {"size": 20, "teacher": {"short": 1, "long": 1}},
        },
    )
    assert several.of_environment("all") == {SHORT: 0.25, LONG: 0.75}
    assert several.of_environment("one") == {SHORT: 1.0}
    assert several.of_environment("mixed") == {SHORT: 0.5, LONG: 0.5}
    row = Problem("?", "#### 1", environment="one", teacher="long")
    assert several.of(row) == {LONG: 1.0}
    assert several.of(Problem("?", "#### 1", environment="one")) == {SHORT: 1.0}


def test_routing_of_an_unknown_teacher_is_refused() -> None:
    """A row that names a teacher which is not in the recipe is refused with the choices."""
    several = routing(teachers=TWO)
    with pytest.raises(RecipeError, match="names the teacher 'nobody'; .teachers. has short, long"):
        several.of(Problem("?", "#### 1", teacher="nobody"))
