"""Recipes for the tests of the export."""

import json

import tomli_w

from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.upstream.export import export_recipe
from tests.prime_rl_checkout import REPO

ALL_RECIPES = sorted(
    path for path in (REPO / "recipes").rglob("*.toml") if path.parent.name != "studies"
)
"""Every shipped recipe. Those in studies/ are variants of a base, which is one of these."""

TWO = {
    "a": {"model": "a/first", "url": "http://a:8001"},
    "b": {"model": "a/second", "url": "http://b:8001", "weight": 3.0},
}
"""Two teachers."""


def tables(**changes):
    """Return a small recipe as tables, with changes by section."""
    raw = {
        "student": {"model": "a/student"},
        "teacher": {"model": "a/teacher", "url": "http://host:8001"},
        "loss": {"type": "topk_reverse_kl", "k": 16},
        "rollout": {"group_size": 2, "max_tokens": 64, "max_model_len": 256},
        "data": {},
        "trainer": {"steps": 7, "batch_size": 8, "lr": 1e-3},
    }
    for name, table in changes.items():
        raw[name] = {**raw.get(name, {}), **table}
    return raw


def recipe(**changes):
    """Return ``tables`` as a recipe."""
    return parse_recipe(tables(**changes))


def export_table(version, **changes):
    """Return the exported tables of ``recipe``."""
    return export_recipe(recipe(**changes), version).table


def write_rows_recipe(folder):
    """Write a recipe with two environments; the rows of one name their teachers."""
    rows = [
        {"question": f"{i}?", "answer": f"#### {i}", **({"by": "ab"[i % 2]} if i % 4 else {})}
        for i in range(1, 13)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    raw = tables()
    del raw["teacher"], raw["data"]
    raw["teachers"] = {"a": {**TWO["a"], "api_key_var": "A_KEY"}, "b": TWO["b"]}
    raw["environments"] = {
        "sums": {"teacher": "a"},
        "rows": {"source": "jsonl", "path": str(folder / "rows.jsonl"), "teacher_key": "by"},
    }
    raw["student"] = {"model": "Qwen/Qwen3-0.6B"}  # a name that prime-rl has a renderer for
    path = folder / "rows.recipe.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


def load_rows_recipe(folder):
    """Return the recipe of ``write_rows_recipe``."""
    return load_recipe(write_rows_recipe(folder))
