"""Recipes with several teachers and environments: what does not fit is named with its key."""

import math
from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError

ON_SUPPORT = {"type": "generalized_jsd", "k": 4}
PAIRED = {"group_size": 2, "student_fraction": 0.5, "other_source": "teacher"}
SMALL_MODEL = {"layers": 1, "hidden_size": 16, "sft_steps": 1}


def raw(**changes: Any) -> dict[str, Any]:
    """Return a recipe of two teachers and two environments, with ``section__key=value`` changes."""
    table: dict[str, Any] = {
        "student": {"prepare": dict(SMALL_MODEL)},
        "teachers": {"short": {"model": "s"}, "long": {"model": "l", "weight": 3.0}},
        "loss": {"type": "topk_reverse_kl", "k": 8},
        "environments": {
            "sums": {"teacher": "short"},
            "chains": {"seed": 1, "operations": [2]},
        },
        "trainer": {"steps": 2, "batch_size": 6},
    }
    for key, value in changes.items():
        place, names = table, key.split("__")
        for name in names[:-1]:
            place = place.setdefault(name, {})
        if value is None:
            del place[names[-1]]
        else:
            place[names[-1]] = value
    return table


def test_recipe_of_two_teachers_is_valid() -> None:
    """Without a change, nothing is refused."""
    assert list(parse_recipe(raw()).teachers) == ["short", "long"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"model": "x"}}, r"\[teacher\] and \[teachers.\*\]: keep one"),
        ({"data": {}}, r"\[data\] and \[environments.\*\]: keep one"),
        (
            {"environments__sums__teacher": "shrot"},
            r"environments.sums.teacher names 'shrot'; \[teachers\] has short, long",
        ),
        ({"environments__sums__teacher": {"short": 0}}, "each weight above 0"),
        ({"environments__sums__teacher_key": "by"}, "generated problems have none"),
        ({"teachers__short__weight": 0}, "teachers.short.weight"),
        ({"teachers__short": {"policy": {}}}, "has one teacher"),
        ({"teachers__a.b": {"model": "x"}}, "a name is made of letters"),
        (
            {"teachers__short__modell": "x"},
            "unknown key teachers.short.modell; did you mean model",
        ),
        (
            {"environments__sums__ratio": math.inf},
            "environments.sums.ratio: Input should be a finite number",
        ),
        (
            {"environments__sums__siez": 2},
            "unknown key environments.sums.siez; did you mean size",
        ),
        (
            {"student__prepare__environments": ["chess"]},
            r"student: prepare.environments names 'chess'; \[environments\] has",
        ),
        (
            {"teachers": None, "teacher": {"model": "x"}},
            r"environments.sums.teacher chooses among \[teachers.\*\], and there are none",
        ),
    ],
)
def test_table_that_does_not_fit_is_named_with_its_key(
    changes: dict[str, Any], message: str
) -> None:
    """The message names the key, and what to write."""
    with pytest.raises(RecipeError, match=message):
        parse_recipe(raw(**changes))


@pytest.mark.parametrize(
    "balance,changes,message",
    [
        ({"weights": {"sum": 2.0}}, {}, r"loss\.balance\.weights names sum.*sums, chains"),
        (
            {"weights": {"chains": 2.0}},
            {"environments__chains__use": "eval"},
            "names chains, and the environments that train are sums",
        ),
        ({}, {"environments__chains": None}, "by = 'sequence'"),
    ],
)
def test_balance_of_environments_that_do_not_train_is_refused(
    balance: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(raw(loss__balance=balance, **changes))
    parse_recipe(raw(loss__balance={"by": "sequence"}, **changes))
    parse_recipe(raw(loss__balance={"weights": {"chains": 2.0}}))


@pytest.mark.parametrize(
    "loss,message",
    [
        (
            {
                "type": "compose",
                "distillation": {"a": {"weight": 1, "loss": {**ON_SUPPORT, "balance": {}}}},
            },
            r"\[loss\.distillation\.a\.loss\.balance\].*move it to \[loss\.balance\]",
        ),
    ],
)
def test_balance_of_a_part_of_the_loss_is_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(raw(loss=loss, rollout=PAIRED))
