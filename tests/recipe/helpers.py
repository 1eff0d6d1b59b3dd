"""Tables of a recipe with one value changed, and the message that refuses them."""

import copy
from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError


def with_value(key: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's tables with a value at a dotted key."""
    raw = copy.deepcopy(base)
    *tables, last = key.split(".")
    parent = raw
    for table in tables:
        parent = parent.setdefault(table, {})
    parent[last] = value
    return raw


def refusal(raw: dict[str, Any]) -> str:
    """Return the message that refuses a recipe: short, and without its passwords."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(raw, "r.toml")
    message = str(caught.value)
    assert len(message) < 1000 and "secret" not in message
    return message
