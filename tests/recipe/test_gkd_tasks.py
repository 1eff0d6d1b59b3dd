"""The recipes and the study of GKD's tasks: real data by ``--set``, export, the grid."""

import json
import re
import tomllib
from itertools import product
from pathlib import Path

import pytest

from prime_composer.cli.study import load_study
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.loading import load_recipe
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.versions.records import VERSIONS

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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("task", TASKS)
def test_recipe_is_exported_with_its_metric(task: str, version: str) -> None:
    """The environment gets kind, metric and prompt; nothing of it is refused."""
    recipe = load_recipe(RECIPES / "methods" / f"{task}_gkd.toml")
    export = export_recipe(recipe, version, {"student": "/s", "teacher": "/t"})
    text = json.dumps(tomllib.loads(export.text()))
    for setting in (f'"kind": "{task}"', f'"metric": "{TASKS[task]}"', '"prompt_template": "'):
        assert text.count(setting) == 2  # to train on, and to evaluate


def test_study_is_the_grid_of_the_paper() -> None:
    study, runs = load_study(RECIPES / "studies" / "gkd.toml")
    assert len(study.seeds) == 5 and len(runs) == 75
    cells = {
        (
            run.recipe.loss.type,
            getattr(run.recipe.loss, "beta", None),
            run.recipe.rollout.student_fraction,
        )
        for run in runs
    }
    divergences = [("topk_forward_kl", None), ("topk_reverse_kl", None)]
    divergences += [("generalized_jsd", beta) for beta in (0.1, 0.5, 0.9)]
    assert cells == {(*one, share) for one, share in product(divergences, (0.0, 0.5, 1.0))}
    assert {getattr(run.recipe.loss, "k", None) for run in runs} == {"full"}
