"""The recipes and the study of GKD's tasks: real data by ``--set``, export, the grid."""

import re
import tomllib
from pathlib import Path

import pytest

from prime_composer.problems.config import DataConfig
from prime_composer.recipe.loading import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
TASKS = {"summary": "rouge2", "translation": "bleu"}


@pytest.mark.parametrize("task", TASKS)
def test_recipe_takes_the_real_data_by_set(task: str) -> None:
    """The header's ``--set 'data={...}'`` is a table, with the metric and prompt of the recipe."""
    path = RECIPES / "methods" / f"{task}_gkd.toml"
    own = load_recipe(path).data
    (table,) = re.findall(r"--set 'data=(.*)'", path.read_text())
    real = load_recipe(path, [f"data={table}"]).data
    assert own is not None and real is not None
    assert (real.source, own.source) == ("hub", "generated")
    assert real.metric == own.metric == TASKS[task]
    assert real.prompt_template == own.prompt_template


def test_tables_of_the_readme_are_data() -> None:
    """Each row of "Text tasks, and facts" is a table that [data] takes, in one of its forms."""
    text = (RECIPES / "grading.md").read_text()
    section = text.partition("## Text tasks, and facts")[2]
    rows = re.findall(r"^\| ([^|]+) \| `(source = .*)` \|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == ["XSum", "WMT14 en-de", "FLAN, as JSONL"]
    metrics = [
        DataConfig.model_validate(tomllib.loads(f"data={{{table}}}")["data"]).metric
        for _, table in rows
    ]
    assert metrics == ["rouge2", "bleu", "exact"]
