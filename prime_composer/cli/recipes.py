"""Commands that read a recipe and run nothing: ``check``, ``prepare``, ``export``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_composer.local.sources import problems_to_prepare
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.loading import load_recipe
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.recipe.urls import has_credentials, public_url
from prime_composer.tiny_models.cache import model_folders, prepare_models


def check(config: str, overrides: Sequence[str]) -> int:
    """Print a recipe with every default."""
    try:
        recipe = load_recipe(config, overrides)
        warn_of_paths(recipe)
        shown = recipe.model_dump(mode="json")
    except RecipeError:
        from prime_composer.upstream.launch import check_native

        if (shown := check_native(config, overrides)) is None:
            raise
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0


def prepare(config: str, rebuild: bool, overrides: Sequence[str]) -> int:
    """Build what a recipe has under ``[*.prepare]``, and print where it is."""
    recipe, problems = load_to_prepare(config, overrides)
    if problems is None:
        print("this recipe names existing models; there is nothing to prepare")
        return 0
    for table, path in prepare_on_screen(recipe, problems, rebuild).items():
        print(f"{table}: {path}")
    return 0


def export(
    config: str, dialect: str, output: str | None, force: bool, overrides: Sequence[str]
) -> int:
    """Write a recipe as prime-rl's TOML."""
    from prime_composer.upstream.export import export_recipe
    from prime_composer.upstream.export.toml import write_text

    recipe, problems = load_to_prepare(config, overrides)
    folders = {} if problems is None else model_folders(recipe, problems)
    models = {table: folder for table, folder in folders.items() if folder.is_dir()}
    warn_of_paths(recipe)
    if recipe.output_dir is None:  # that of `rl --engine prime-rl`
        recipe = recipe.model_copy(update={"output_dir": f"outputs/{Path(config).stem}"})
    exported = export_recipe(recipe, dialect, models, problems)
    exported.warn()
    text = exported.text()
    if output is None:
        if has_credentials(text):
            print("*** stands for a password; --output FILE writes it, mode 0600", file=sys.stderr)
        print(public_url(text), end="")
        return 0
    try:
        write_text(Path(output), text, replace=force)
    except FileExistsError:
        raise ValueError(
            f"{output} exists and was left as it is; name another --output, or add --force"
        ) from None
    print(f"wrote {output}; run it with: PRIME_COMPOSER=1 rl @ {output}")
    return 0


def warn_of_paths(recipe: Recipe) -> None:
    """Say on stderr which models are not on this machine; the recipe may be for another one."""
    from prime_composer.local.requirements import warnings_of_paths

    for warning in warnings_of_paths(recipe):
        print(warning, file=sys.stderr)


def load_to_prepare(config: str, overrides: Sequence[str]) -> tuple[Recipe, ProblemSet | None]:
    """Return a recipe, and the problems that its small models are built from, if any."""
    recipe = load_recipe(config, overrides)
    return recipe, problems_to_prepare(recipe)


def prepare_on_screen(
    recipe: Recipe, problems: ProblemSet, rebuild: bool = False
) -> dict[str, Path]:
    """Find or build the recipe's small models, with a progress bar; folder by table."""
    from prime_composer.cli.progress import Screen

    with Screen(total=recipe.trainer.steps) as screen:
        return prepare_models(recipe, problems, rebuild, screen.preparing)
