"""Recipes: what is accepted, and what the messages of the refused ones name."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prime_composer.losses import LOSS_TYPES
from prime_composer.recipe.carried import models_in
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.schema import Recipe, RecipeError
from tests.recipe import helpers
from tests.recipe.helpers import refusal

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


with_value = partial(helpers.with_value, base=SMALL)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_shipped_is_valid_and_names_its_command(path: Path) -> None:
    """Every shipped recipe is valid, and its header contains the command that runs it."""
    load_recipe(path)
    header = path.read_text().split("\n[")[0]
    assert f"prime-rl rl --config {path.relative_to(ROOT)}" in header


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trainer.learning_rat", 1.0, ["r.toml: unknown key trainer.learning_rat"]),
        ("trainer.micro_batch_token", 1, ["did you mean micro_batch_tokens?"]),
        ("loss.normalisation", "tail", ["key loss.normalisation; did you mean normalization?"]),
        ("loss.type", "topk_revers_kl", ["did you mean topk_reverse_kl?", *LOSS_TYPES]),
        ("trainer.steps", "many", ["trainer.steps"]),
        ("rollout.top_p", 1.5, ["rollout.top_p"]),
        ("rollout.backend", "server", ["`url` go together"]),
    ],
)
def test_wrong_key_or_value_names_the_nearest(key: str, value: Any, words: list[str]) -> None:
    message = refusal(with_value(key, value))
    assert not [word for word in words if word not in message], message


def test_overrides_are_typed_and_reach_new_tables(tmp_path: Path) -> None:
    path = ROOT / "recipes" / "gsm8k_opd.toml"
    items = ["trainer.lr=2e-4", "eval.kl_support=full", "rollout.top_p=0.5"]
    recipe = load_recipe(path, [*items, 'prime_rl.wandb.project="x"'])
    assert recipe.trainer.lr == 2e-4
    assert recipe.eval.kl_support == "full"
    assert recipe.prime_rl == {"wandb": {"project": "x"}}
    assert recipe.rollout.top_p == 0.5


def test_override_of_model_replaces_prepare() -> None:
    recipe = load_recipe(ROOT / "recipes" / "gsm8k_opd.toml", ["student.model=elsewhere"])
    assert recipe.student.model == "elsewhere" and recipe.student.prepare is None
    assert recipe.teacher.prepare is not None


def test_file_or_override_that_is_none_is_refused(tmp_path: Path) -> None:
    """A missing file, one that is no TOML, and an override without a key or a value."""
    (tmp_path / "bad.toml").write_text("[loss\n")
    for file, words in (("absent", "no such recipe"), ("bad", "bad.toml: not a TOML file")):
        with pytest.raises(RecipeError, match=words):
            load_recipe(tmp_path / f"{file}.toml")
    for item in ("trainer.lr", "=3", "trainer..lr=3"):
        with pytest.raises(RecipeError, match="--set trainer.lr=1e-3"):
            load_recipe(ROOT / "recipes" / "gsm8k_opd.toml", [item])


def test_every_table_refuses_unknown_keys() -> None:
    tables: set[Any] = set()

    def visit(model: Any) -> None:
        if model in tables:
            return
        tables.add(model)
        for field in model.model_fields.values():
            for child in models_in(field.annotation):
                visit(child)

    for model in (Recipe, *LOSS_TYPES.values()):
        visit(model)
    assert len(tables) > 30
    assert all(table.model_config.get("extra") == "forbid" for table in tables)


def test_recipe_takes_a_loss_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss from outside the package has its knobs in [loss], and keeps them in the dump."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "examples")
    huber = "my_loss:huber"
    raw = with_value("loss", {"type": huber, "delta": 0.5})
    recipe = parse_recipe(raw)
    assert recipe.loss.model_dump(exclude_unset=True) == {"type": huber, "delta": 0.5}
    assert parse_recipe(json.loads(recipe.model_dump_json())) == recipe
    message = refusal(with_value("loss", {"type": huber, "detla": 0.5}))
    assert message == "r.toml: unknown key loss.detla; did you mean delta?"
    nested = {"teacher": {"loss": {"type": huber, "detla": 0.5}}}
    message = refusal(with_value("loss", {"type": "compose", "distillation": nested}))
    assert (
        message == "r.toml: unknown key loss.distillation.teacher.loss.detla; did you mean delta?"
    )


KEYS = sorted(
    {key for cls in (Recipe, *LOSS_TYPES.values()) for key in cls.model_fields}
    | {"weight", "model", "prepare", "policy", "reward_scale", "id", "source", "seed"}
)


@pytest.mark.parametrize("name", KEYS)
def test_key_misspelled_under_a_name_that_is_a_key(name: str) -> None:
    """A channel, a teacher or an environment may be named like a key."""
    base = {key: value for key, value in SMALL.items() if key not in ("teacher", "data")}
    base |= {"teachers": {"a": {"model": "t"}}, "environments": {"e": {"source": "generated"}}}
    channel = {"weight": 1.0, "loss": {"type": "topk_reverse_kl", "normalisation": "tail"}}
    cases = {
        f"loss.distillation.{name}.loss.normalisation; did you mean normalization?": with_value(
            "loss", {"type": "compose", "distillation": {name: channel}}, base=base
        ),
        f"teachers.{name}.prepare.layer; did you mean layers?": with_value(
            f"teachers.{name}", {"prepare": {"layer": 3}}, base=base
        ),
        f"environments.{name}.siez; did you mean size?": with_value(
            f"environments.{name}", {"siez": 20}, base=base
        ),
    }
    for message, raw in cases.items():
        assert refusal(raw) == f"r.toml: unknown key {message}"
