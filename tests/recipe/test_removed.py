"""Keys that earlier versions had are refused with what to do instead."""

import copy
import json

import pytest

from prime_composer.recipe.loading import apply_override, parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.removed import REMOVED
from prime_composer.upstream.keys import SWITCH
from prime_composer.upstream.settings import AdapterSettings
from tests.conftest import TINY_RECIPE

SETTINGS = [key for key in REMOVED if key.startswith(SWITCH)]


@pytest.mark.parametrize("key", [key for key in REMOVED if key not in SETTINGS])
def test_removed_key_is_refused_with_what_to_do_instead(key: str) -> None:
    raw = copy.deepcopy(TINY_RECIPE)
    apply_override(raw, key if "=" in key else f"{key}=1")
    with pytest.raises(RecipeError) as refused:
        parse_recipe(raw)
    name = key.partition("=")[2] or key
    assert name in str(refused.value) and REMOVED[key] in str(refused.value)


@pytest.mark.parametrize("key", SETTINGS)
def test_removed_setting_is_refused_with_what_to_do_instead(key: str, monkeypatch) -> None:
    """The adapter's variable is written by hand, too."""
    name = key.rpartition(".")[2]
    monkeypatch.setenv(SWITCH, json.dumps({name: "module:NAME"}))
    with pytest.raises(ValueError, match=f"{SWITCH}: {name} was removed") as refused:
        AdapterSettings.from_env()
    assert REMOVED[key] in str(refused.value)
