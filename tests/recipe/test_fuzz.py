"""Damaged recipes: accepted or refused in a short message, in little time and memory."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import strategies as st

from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.loading import load_recipe
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.upstream.export import export_recipe
from tests.fuzz import EXAMPLES, ODD, damaged_bytes, odd_values, survives

# A teacher, a channel and an environment have the name of a key.
WHOLE: dict[str, Any] = {
    "student": {"prepare": {"vocab_size": 300, "seed": 1, "prune": 0.5}},
    "teachers": {
        "a": {"model": "t", "url": "http://me:secret@host:8001", "weight": 2.0},
        "prepare": {"prepare": {"layers": 2}, "dtype": "bfloat16"},
    },
    "loss": {
        "type": "compose",
        "rl": {"weight": 0.0},
        "distillation": {
            "loss": {"weight": 1.0, "loss": {"type": "topk_reverse_kl", "k": 4}},
            "y": {"weight": 0.5, "loss": {"type": "generalized_jsd", "beta": 0.1}},
        },
        "special_tokens": {"ids": [1, 2]},
    },
    "rollout": {"group_size": 2, "temperature": 0.7, "max_tokens": 8, "max_model_len": 64},
    "environments": {
        "sums": {
            "source": "generated",
            "operations": [1, 2],
            "teacher": {"a": 0.5, "prepare": 0.5},
        },
        "source": {"source": "jsonl", "path": "data", "teacher_key": "expert"},
    },
    "trainer": {"steps": 3, "batch_size": 4, "betas": [0.9, 0.98], "lr": 1e-4},
    "eval": {"kl_support": 8},
    "logging": {"wandb": {"project": "p"}},
    "prime_rl": {"orchestrator": {"client": {"base_url": ["http://me:secret@x"]}}, "head": {}},
}


def check(path: Path, text: bytes, overrides: list[str]) -> None:
    """Load a recipe and, where it is accepted, print and export it."""
    path.write_bytes(text)
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        message = str(error).replace(str(path), "FILE")
        assert all(0 < len(line) < 1000 for line in message.split("\n"))
        assert "secret" not in message
        return
    assert isinstance(recipe, Recipe)
    assert "secret" not in recipe.model_dump_json()
    models = {"student": "s", "teacher": "t", "teachers.a": "a", "teachers.prepare": "b"}
    try:
        export_recipe(recipe, "head", models, ProblemSet([], [], recipe.sources)).text()
    except ValueError as error:
        assert len(str(error)) < 1000 and "secret" not in str(error)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_recipe_damaged_is_accepted_or_refused(examples: int, tmp_path: Path) -> None:
    """Values that hardly any key means, in any place; bytes replaced, also by what no TOML has."""
    path, text = tmp_path / "r.toml", tomli_w.dumps(WHOLE).encode()
    path.write_bytes(text)
    load_recipe(path)
    values = odd_values(WHOLE).map(lambda tree: tomli_w.dumps(tree).encode())
    pieces = [b"[", b'"""', b"[[", b"=", b"\xff", b"\\u0000"]
    for damage in (values, damaged_bytes(text, pieces)):
        survives(examples, lambda content: check(path, content, []), damage)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_override_damaged_is_accepted_or_refused(examples: int, tmp_path: Path) -> None:
    """Any text after --set, with a key that the recipe has or not."""
    path, text = tmp_path / "r.toml", tomli_w.dumps(WHOLE).encode()
    keys = st.sampled_from(
        ["trainer.lr", "teachers.a", "teachers.a.url", "loss", "loss.type", "a.b.c", "", ".",
         "data", "student.model", "prime_rl.x", "environments.sums.teacher.a", "trainer.betas"]
    )  # fmt: skip
    # Hypothesis knows the words of this file, "secret" among them.
    values = st.one_of(st.text(max_size=30), ODD.map(str)).filter(lambda text: "secret" not in text)
    item = st.tuples(keys, st.sampled_from(["=", "==", ""]), values).map("".join)
    survives(examples, lambda one: check(path, text, [one]), item)
