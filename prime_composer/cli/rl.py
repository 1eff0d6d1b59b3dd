"""``prime-rl rl``: run a recipe on this machine, alone or as islands, or inside prime-rl."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from prime_composer.cli.machine import choose_engine
from prime_composer.cli.program import program
from prime_composer.cli.recipes import load_to_prepare, prepare_on_screen
from prime_composer.cli.runs import plan_local, run_local
from prime_composer.local.run_dir import RunRequest
from prime_composer.recipe.loading import load_recipe, read_tables
from prime_composer.recipe.urls import checked_url
from prime_composer.tiny_models.cache import model_folders


def rl(
    *,
    config: str,
    engine: str,
    output_dir: str | None,
    resume: bool,
    step: int | None,
    overwrite: bool,
    island: int | None,
    lighthouse: str | None,
    islands: int | None,
    dry_run: bool,
    overrides: Sequence[str],
) -> int:
    """Choose the engine, and run the recipe there."""
    if step is not None and not resume:
        raise ValueError("--step names the checkpoint to continue from: it goes with --resume")
    if overwrite and resume:
        raise ValueError("--resume continues a run and --overwrite deletes it; give one of them")
    if islands is not None and (island is not None or lighthouse is not None):
        raise ValueError("--islands runs all of them here; --island and --lighthouse run one")
    if (island is None) != (lighthouse is None):
        raise ValueError("--island and --lighthouse go together; --islands N runs all of them here")
    if lighthouse is not None:
        checked_url(lighthouse)
    of_islands = islands is not None or island is not None
    chosen, reason = choose_engine(engine)
    print(f"engine: {chosen} ({reason})")
    if chosen == "prime-rl":
        if overwrite or step is not None or of_islands:
            raise ValueError("--overwrite, --step and islands belong to --engine local")
        return inside_prime_rl(config, output_dir, resume, dry_run, overrides)
    recipe = load_recipe(config, overrides)
    words = ["--config", config, *(() if engine == "auto" else ("--engine", engine))]
    words += [word for item in overrides for word in ("--set", item)]
    request = RunRequest(
        recipe,
        Path(config),
        output_dir or recipe.output_dir,
        resume=resume,
        step=step,
        overwrite=overwrite,
        command=f"{program()} rl {shlex.join(words)}",
    )
    if of_islands:
        from prime_composer.cli.islands import run_islands

        return run_islands(request, island, lighthouse, islands, dry_run)
    return plan_local(request) if dry_run else run_local(request)


def inside_prime_rl(
    config: str, output_dir: str | None, resume: bool, dry_run: bool, overrides: Sequence[str]
) -> int:
    """Build the recipe's small models, and start prime-rl's launcher."""
    from prime_composer.upstream.launch import is_native, launch
    from prime_composer.upstream.versions.config_fields import has_prime_rl

    models: dict[str, Path] = {}
    problems = None
    # Without prime-rl, launch refuses; then there is nothing to prepare for.
    if has_prime_rl() and not is_native(read_tables(config, "recipe", "recipes/")):
        recipe, problems = load_to_prepare(config, overrides)
        if problems is not None and dry_run:
            models = model_folders(recipe, problems)
            for table, folder in models.items():
                if not folder.is_dir():
                    print(f"would build the model of [{table}.prepare] in {folder}")
        elif problems is not None:
            models = prepare_on_screen(recipe, problems)
    return launch(config, overrides, output_dir, resume, models, dry_run=dry_run, problems=problems)
