"""``[reference]``, the model that G-OPD extrapolates the teacher from."""

from typing import Any

import pytest

from prime_composer.problems.config import Problem
from prime_composer.recipe.loading import apply_override, parse_recipe
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId
from tests.recipe.helpers import refusal

BASE: dict[str, Any] = {
    "student": {"model": "s"},
    "teacher": {"model": "t", "url": "http://host:8001"},
    "loss": {"type": "sampled_reverse_kl"},
    "data": {"source": "generated"},
    "trainer": {"steps": 3, "batch_size": 4},
}
BASELINE = {"type": "sampled_reverse_kl", "mode": "signed", "baseline": "topk_kl"}
TWO = {"a": {"model": "t"}, "b": {"model": "u"}}


def with_reference(reference: dict[str, Any], **tables: Any) -> dict[str, Any]:
    raw = {**BASE, **tables, "reference": reference}
    return {name: table for name, table in raw.items() if table is not None}


@pytest.mark.parametrize(
    ("reference", "tables", "complaint"),
    [
        ({}, {}, "exactly one of `model`, the table `prepare` and `start = true`"),
        ({"model": "r", "start": True}, {}, "not model and start"),
        ({"policy": {}}, {}, "exactly one of"),
        ({"model": "r", "policy": {}}, {}, "use [teacher.policy]"),
        ({"start": True, "url": "http://r:1"}, {}, "`start = true` opens the student's weights"),
        ({"model": "r", "on_overflow": "drop"}, {}, "on_overflow = 'drop' is the teacher's key"),
        ({"model": "r", "reward_scale": 1}, {}, "reward_scale = 1 is the teacher itself"),
        ({"model": "r", "reward_scale": 0}, {}, "reference.reward_scale"),
        ({"model": "t"}, {}, "[reference] is the model of [teacher]"),
        ({"model": "t", "url": "http://host:8001"}, {}, "is the model of [teacher]"),
        ({"model": "u"}, {"teacher": None, "teachers": TWO}, "is the model of [teachers.b]"),
        ({"start": True}, {"teacher": {"model": "s"}}, "is the model of [teacher]"),
        ({"model": "r"}, {"teacher": {"policy": {}}}, "extrapolates a teacher that is a model"),
        ({"model": "r"}, {"loss": {"type": "topk_reverse_kl"}}, "[loss] type = 'topk_reverse_kl'"),
        (
            {"model": "r"},
            {"loss": BASELINE},
            "without a baseline",
        ),
        (
            {"model": "r"},
            {"loss": {**BASELINE, "k": "full"}},
            "without a baseline",
        ),
        ({"model": "r"}, {"loss": {"type": "sft"}}, "goes with a loss of type"),
    ],
)
def test_reference_that_makes_no_sense_is_refused(
    reference: dict[str, Any], tables: dict[str, Any], complaint: str
) -> None:
    """The message names the table and the remedy."""
    assert complaint in refusal(with_reference(reference, **tables))


@pytest.mark.parametrize(
    ("reference", "tables"),
    [
        ({"model": "r"}, {}),
        ({"model": "t", "url": "http://other:8001"}, {}),
        ({"start": True, "reward_scale": 0.5}, {}),
        ({"model": "r", "url": "http://r:1"}, {"teacher": None, "teachers": TWO}),
        (
            {"start": True},
            {
                "rollout": {"group_size": 2},
                "loss": {
                    "type": "compose",
                    "distillation": {"d": {"weight": 1, "loss": {"type": "sampled_reverse_kl"}}},
                },
            },
        ),
    ],
)
def test_reference_beside_a_teacher_is_accepted(
    reference: dict[str, Any], tables: dict[str, Any]
) -> None:
    parse_recipe(with_reference(reference, **tables))


def test_reference_scores_all_problems_and_weighs_nothing() -> None:
    """It is opened as the teachers are, and takes no part in their mixture."""
    recipe = parse_recipe(with_reference({"start": True}, teacher=None, teachers=TWO))
    routing, problem = Routing.of_recipe(recipe), Problem("?", "#### 1")
    assert list(routing.teachers) == [TeacherId("a"), TeacherId("b"), REFERENCE]
    assert routing.teachers[REFERENCE].model == "s"
    assert routing.of(problem) == {TeacherId("a"): 0.5, TeacherId("b"): 0.5}
    assert routing.readers(problem) == [TeacherId("a"), TeacherId("b"), REFERENCE]
    assert (REFERENCE.table, REFERENCE.display) == ("reference", "reference")
    assert REFERENCE not in Routing.of_recipe(parse_recipe(BASE)).teachers
    assert Routing.of_recipe(parse_recipe(BASE)).readers(problem) == [TeacherId()]


def test_a_model_from_the_command_line_replaces_start() -> None:
    raw = with_reference({"start": True})
    apply_override(raw, "reference.model=r")
    assert parse_recipe(raw).reference.model == "r"
