"""[diloco]: a majority of islands, and steps that end with an outer step."""

from typing import Any

import pytest

from prime_composer.recipe.diloco import REFUSED, DilocoConfig
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from tests.upstream.export_recipes import tables


@pytest.mark.parametrize(("islands", "fewest"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (64, 33)])
def test_majority_of_the_islands_takes_an_outer_step(islands: int, fewest: int) -> None:
    assert DilocoConfig(replicas=islands).fewest == fewest


@pytest.mark.parametrize(
    ("table", "key", "steps", "following"),
    [("trainer", "steps", 95, 98), ("eval", "every", 1, 7), ("checkpoint", "every", 13, 14)],
)
def test_steps_without_an_outer_step_name_the_next_ones(
    table: str, key: str, steps: int, following: int
) -> None:
    def recipe(number: int) -> dict[str, Any]:
        raw = tables() | {"diloco": {"replicas": 2, "every": 7}}
        raw |= {"trainer": {"steps": 70}, "eval": {"every": 0}, "checkpoint": {"every": 0}}
        raw[table] = {**raw[table], key: number}
        return raw

    words = (
        f"{table}.{key} = {steps} is no multiple of diloco.every = 7.*the next one is {following}$"
    )
    with pytest.raises(RecipeError, match=words):
        parse_recipe(recipe(steps))
    parse_recipe(recipe(following))


def test_every_refusal_says_what_to_do() -> None:
    """Each is caused in ``test_refused_pairs.py``; a recipe without islands knows none of them."""
    assert all(": " in words for words in REFUSED.values())
    DilocoConfig(replicas=2).refuse(**dict.fromkeys(REFUSED, False))
    for name, words in REFUSED.items():
        with pytest.raises(ValueError) as error:
            DilocoConfig(replicas=2).refuse(**{name: True})
        assert str(error.value) == f"[diloco] and {words}"
