"""Environments of verifiers by id: what a recipe may say about one, and what is refused."""

from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe
from tests.recipe.helpers import refusal


def raw(**of_environment: Any) -> dict[str, Any]:
    """Return a recipe with an environment by id, which has these keys as well, or lacks them."""
    keys = {"id": "reverse-text", **of_environment}
    return {
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "loss": {"type": "topk_reverse_kl", "k": 4},
        "environments": {"rev": {key: value for key, value in keys.items() if value is not None}},
        "trainer": {"steps": 3},
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"id": None, "args": {"split": "train"}}, "environments.rev.id is missing"),
        ({"id": "a/b/c"}, "environments.rev.id: 'a/b/c' is no environment's id"),
        ({"use": "eval", "ratio": 2.0}, "ratio is a share of the prompts to train on"),
        ({"use": "eval"}, "none is left to train on"),
        ({"teacher": "t"}, r"environments.rev.teacher names 't'; [teachers] has none"),
    ],
)
def test_environment_that_does_not_fit_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(raw(**changes))


def test_prepared_models_learn_from_what_is_trained_on() -> None:
    """Unset, from all environments that train; else from those that are named."""
    table = raw(use="train")
    table["environments"] |= {"test": {"id": "reverse-text", "use": "eval"}, "sums": {"size": 30}}
    assert parse_recipe(table).teaching_environments == set()
    table["student"] = {"prepare": {}}
    assert parse_recipe(table).teaching_environments == {"rev"}
    table["student"] = {"prepare": {"environments": ["sums"]}}
    recipe = parse_recipe(table)
    assert recipe.teaching_environments == set() and list(recipe.sources) == ["rev", "test", "sums"]


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ({"environments": ["test"]}, "prepare.environments names 'test', which has use = 'eval'"),
        (
            {"hint_template": "{question} {hint}", "hint_share": 0.5},
            "student: prepare.hint_template writes a hint into a problem's question",
        ),
    ],
)
def test_prepared_model_that_cannot_learn_is_refused(
    prepare: dict[str, Any], expected: str
) -> None:
    """What is not trained on teaches nothing, and a task has no question for a hint."""
    table = raw(use="train")
    table["environments"]["test"] = {"id": "reverse-text", "use": "eval"}
    table["student"] = {"prepare": prepare}
    assert expected in refusal(table)


def test_passwords_of_environments_are_not_shown() -> None:
    url = "http://me:secret@judge"
    recipe = parse_recipe(raw(args={"judge": url}, prime_rl={"serve": {"address": url}}))
    assert recipe.environments_by_id["rev"].args["judge"] == url
    assert "secret" not in recipe.model_dump_json()
