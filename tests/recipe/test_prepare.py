"""The two kinds of `[*.prepare]`: a model that is generated, and one that is rounded."""

import json
from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.prepare import DamagedConfig
from tests.recipe.helpers import refusal

ROUNDED: dict[str, Any] = {"from": "org/model", "quantize": {"bits": 3, "group": 32}}


def recipe_with(prepare: Any) -> dict[str, Any]:
    return {
        "student": {"prepare": prepare},
        "teacher": {"model": "org/model"},
        "loss": {"type": "topk_reverse_kl", "k": 4},
        "data": {"source": "generated"},
        "trainer": {"steps": 3, "batch_size": 4},
    }


@pytest.mark.parametrize(
    "prepare",
    [ROUNDED, {"from": "org/model", "drop_layers": [3, 0]}, {**ROUNDED, "drop_layers": [1]}],
)
def test_prepare_from_changes_an_existing_model(prepare: dict[str, Any]) -> None:
    """The table is read, and written as the recipe has it, so that a run can be resumed."""
    recipe = parse_recipe(recipe_with(prepare))
    assert isinstance(recipe.student.prepare, DamagedConfig)
    assert recipe.student.prepare.source == "org/model"
    dump = json.loads(recipe.model_dump_json())
    assert dump["student"]["prepare"] == prepare
    assert parse_recipe(dump) == recipe


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        ({**ROUNDED, "prune": 0.5, "layers": 2},
         "unknown key student.prepare.prune; known here: drop_layers, from, quantize"),
        ({"from": "m"}, "student.prepare: `from` alone changes nothing: add drop_layers = [..] or "
         "quantize = { bits = .., group = .. }, or name the model as it is with `model`"),
        ({"drop_layers": [3]}, "student.prepare.from is missing"),
        ({"from": "m", "drop_layers": [3, 4, 3]}, "drop_layers = [3, 4, 3] has one twice"),
        ({"from": "m", "drop_layers": []}, "`from` alone changes nothing"),
        ({"from": "m", "quantize": {"bits": 9, "group": 32}},
         "student.prepare.quantize.bits: Input should be less than or equal to 8 (got 9); lower"),
        ({"from": "m", "quantize": {"bits": 3, "groups": 32}},
         "unknown key student.prepare.quantize.groups; did you mean group?"),
    ],
)  # fmt: skip
def test_prepare_that_does_not_fit_is_refused(prepare: Any, complaint: str) -> None:
    assert complaint in refusal(recipe_with(prepare))
