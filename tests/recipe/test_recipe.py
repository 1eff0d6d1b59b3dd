"""Recipes: what is accepted, and what the messages of the refused ones name."""

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_composer.losses import LOSS_TYPES
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.schema import Recipe, RecipeError

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    path for path in (ROOT / "recipes").rglob("*.toml") if path.parent.name != "studies"
)

SMALL: dict[str, Any] = {
    "student": {"model": "s"},
    "teacher": {"model": "t"},
    "loss": {"type": "topk_reverse_kl", "k": 4},
    "data": {"source": "generated"},
    "trainer": {"steps": 3, "batch_size": 4},
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(SMALL)
    *tables, last = key.split(".")
    here = raw
    for table in tables:
        here = here.setdefault(table, {})
    here[last] = value
    return raw


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(raw, "r.toml")
    return str(caught.value)


def test_there_are_recipes() -> None:
    assert ROOT / "recipes" / "gsm8k_opd.toml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_its_header_names_its_own_command(path: Path) -> None:
    load_recipe(path)
    header = path.read_text().split("\n[")[0]
    assert f"prime-rl rl --config {path.relative_to(ROOT)}" in header


def test_a_misspelt_key_is_answered_with_the_nearest_one() -> None:
    message = refusal(with_value("trainer.learning_rat", 1.0))
    assert "r.toml: unknown key trainer.learning_rat" in message
    message = refusal(with_value("trainer.micro_batch_token", 1))
    assert "did you mean micro_batch_tokens?" in message


def test_a_misspelt_key_of_the_loss_is_answered_with_the_nearest_one_of_that_loss() -> None:
    assert "unknown key loss.normalisation; did you mean normalization?" in refusal(
        with_value("loss.normalisation", "tail")
    )


def test_an_unknown_loss_type_is_answered_with_every_choice() -> None:
    message = refusal(with_value("loss.type", "topk_revers_kl"))
    assert "did you mean topk_reverse_kl?" in message
    for name in LOSS_TYPES:
        assert name in message


def test_a_missing_table_is_named() -> None:
    raw = copy.deepcopy(SMALL)
    del raw["data"]
    assert (
        refusal(raw) == "r.toml: data is missing: add a [data] table, or several [environments.*]"
    )


def test_a_loss_that_needs_a_teacher_is_refused_without_one() -> None:
    raw = copy.deepcopy(SMALL)
    del raw["teacher"]
    assert "add a [teacher] table" in refusal(raw)


def test_a_batch_that_groups_do_not_fill_is_refused() -> None:
    raw = with_value("rollout.group_size", 3)
    assert "trainer.batch_size = 4 is not a multiple of rollout.group_size = 3" in refusal(raw)


def test_a_model_needs_exactly_one_origin() -> None:
    raw = copy.deepcopy(SMALL)
    raw["student"] = {"model": "s", "prepare": {}}
    assert "exactly one of `model` and the table `prepare`" in refusal(raw)
    raw["student"] = {}
    assert "exactly one of `model` and the table `prepare`" in refusal(raw)


def test_a_value_of_the_wrong_kind_is_named_with_its_key() -> None:
    assert "trainer.steps" in refusal(with_value("trainer.steps", "many"))
    assert "rollout.top_p" in refusal(with_value("rollout.top_p", 1.5))


def test_the_server_backend_and_its_url_go_together() -> None:
    assert "`url` go together" in refusal(with_value("rollout.backend", "server"))


def test_overrides_are_typed_like_toml_and_reach_new_tables(tmp_path: Path) -> None:
    path = ROOT / "recipes" / "gsm8k_opd.toml"
    recipe = load_recipe(
        path,
        [
            "trainer.lr=2e-4",
            "eval.kl_support=full",
            'prime_rl.wandb.project="x"',
            "rollout.top_p=0.5",
        ],
    )
    assert recipe.trainer.lr == 2e-4
    assert recipe.eval.kl_support == "full"
    assert recipe.prime_rl == {"wandb": {"project": "x"}}
    assert recipe.rollout.top_p == 0.5


def test_naming_a_model_takes_the_place_of_the_one_that_the_recipe_prepares() -> None:
    recipe = load_recipe(ROOT / "recipes" / "gsm8k_opd.toml", ["student.model=elsewhere"])
    assert recipe.student.model == "elsewhere" and recipe.student.prepare is None
    assert recipe.teacher.prepare is not None


@pytest.mark.parametrize("item", ["trainer.lr", "=3", "trainer..lr=3"])
def test_an_override_without_key_or_value_is_refused_with_an_example(item: str) -> None:
    with pytest.raises(RecipeError, match="--set trainer.lr=1e-3"):
        load_recipe(ROOT / "recipes" / "gsm8k_opd.toml", [item])


def test_a_missing_file_and_a_file_that_is_no_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[loss\n")
    with pytest.raises(RecipeError, match="bad.toml: not a TOML file"):
        load_recipe(bad)


def test_settings_for_prime_rl_alone_pass_through_untouched() -> None:
    raw = with_value("prime_rl", {"trainer": {"model": {"attn": "sdpa"}}})
    assert parse_recipe(raw).prime_rl == {"trainer": {"model": {"attn": "sdpa"}}}


def test_every_table_refuses_unknown_keys() -> None:
    found: set[Any] = set()

    def visit(model: Any) -> None:
        if model in found:
            return
        found.add(model)
        for field in model.model_fields.values():
            for option in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if hasattr(option, "model_config"):
                    visit(option)

    for model in (Recipe, *LOSS_TYPES.values()):
        visit(model)
    assert len(found) > 10
    assert all(table.model_config.get("extra") == "forbid" for table in found)


def test_the_shipped_files_are_plain_toml() -> None:
    for path in RECIPES:
        tomllib.loads(path.read_text())
