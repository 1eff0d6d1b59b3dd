"""Run a recipe on this machine from Python."""

import copy
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_composer.cli.machine import set_environment
from prime_composer.problems.loading import Rows
from prime_composer.recipe.diloco import check_island
from prime_composer.recipe.loading import parse_recipe, read_tables
from prime_composer.recipe.schema import Recipe, RecipeError

if TYPE_CHECKING:
    from prime_composer.local.outcome import Outcome

AnyRecipe = Recipe | Mapping[str, Any] | str | PathLike[str]


def distill(
    recipe: AnyRecipe,
    rows: Rows | None = None,
    *,
    output_dir: str | PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> "Outcome":
    """Train a recipe's student on this machine, as ``prime-rl rl`` does.

    Args:
        recipe: a recipe, its tables, or its file.
        rows: the data in the place of the recipe's own: any iterable of mappings, of which
            ``[data] hold_out`` is set aside, or a mapping of "train" and "test" to such iterables.
            The keys of ``[data]`` name their columns.
        output_dir: the run directory. None: the recipe's, or ``outputs/`` and the file's name.
        resume: continue the run that is there, with the same recipe and rows.
        overwrite: delete the run that is there.

    Returns:
        How the run ended. ``student`` is the trained model's directory.

    Raises:
        ValueError: recipe, data, models or the run directory are unusable, or a run was stopped.
        ImportError: a library is missing; the message names the pip line.
    """
    set_environment()
    from prime_composer.cli.runs import train_in
    from prime_composer.local.requirements import check_requirements
    from prime_composer.local.run_dir import RunRequest, claim_run_dir
    from prime_composer.local.sources import load_sources

    named = Path(recipe) if isinstance(recipe, str | PathLike) else Path("distill")
    read = read_recipe_of(recipe, rows is not None)
    check_island(read.diloco, False)
    check_requirements(read)
    problems = load_sources(read, rows)
    folder = read.output_dir if output_dir is None else str(output_dir)
    request = RunRequest(read, named, folder, resume=resume, overwrite=overwrite)
    with claim_run_dir(request) as claim:
        return train_in(claim, read, problems)


def read_recipe_of(recipe: AnyRecipe, takes_rows: bool) -> Recipe:
    """Return a recipe of any form, whose data are given rows where it takes them."""
    if isinstance(recipe, Recipe):
        if takes_rows and (recipe.data is None or recipe.data.source != "rows"):
            raise RecipeError('rows: set source = "rows" in the recipe\'s [data]')
        return recipe
    if isinstance(recipe, Mapping):
        raw, source = copy.deepcopy(dict(recipe)), "recipe"
    else:
        raw, source = read_tables(recipe, "recipe", "recipes/"), str(recipe)
    if takes_rows:
        if "environments" in raw:
            raise RecipeError("rows: they are the data of one [data]; leave [environments] out")
        data = raw.setdefault("data", {})
        data["source"] = "rows"
        data.pop("path", None)
    return parse_recipe(raw, source)
