"""Run directories, and what a person sees while a recipe runs on this machine."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from prime_composer.local.checkpoint import Checkpoint, list_checkpoints
from prime_composer.recipe.schema import Recipe, RecipeError, spoken
from prime_composer.tiny_models.cache import cached_path, prepare_model

RECIPE_FILE = "recipe.json"

MAY_CHANGE = ("eval", "logging", "checkpoint", "output_dir", "prime_rl")
"""Sections that a resumed run may change: they do not touch the numbers that it trains on."""


def run_local(recipe: Recipe, recipe_path: Path, output_dir: str | None, resume: bool) -> int:
    """Prepare what the recipe asks for, run it, and show the outcome. Returns the exit status."""
    from prime_composer.cli.progress import Screen
    from prime_composer.cli.report import draw_report, print_outcome

    explicit = output_dir or recipe.output_dir
    if resume:
        run_dir, checkpoint = find_resumable(recipe, recipe_path, explicit)
    else:
        run_dir, checkpoint = claim_run_dir(recipe_path, explicit), None
        write_recipe(run_dir, recipe)
    print(
        f"run directory: {run_dir}"
        + (f", resuming after step {checkpoint.step}" if checkpoint else "")
    )
    with Screen(total=recipe.trainer.steps, done=checkpoint.step if checkpoint else 0) as screen:
        from prime_composer.local.gradients import NonFiniteLoss
        from prime_composer.local.train import train

        try:
            prepare_models(recipe, screen=screen)
            outcome = train(recipe, run_dir, screen, resume=checkpoint)
        except NonFiniteLoss as error:
            screen.close()
            left = list_checkpoints(run_dir)
            good = (
                f"the last good checkpoint is {left[-1].path}"
                if left
                else "there is no checkpoint yet"
            )
            print(f"prime-rl rl: {error}; {good}", file=sys.stderr)
            return 1
        except BaseException:
            if checkpoint is None and [file.name for file in run_dir.iterdir()] == [RECIPE_FILE]:
                shutil.rmtree(
                    run_dir
                )  # nothing has run: leave nothing in the way of the next attempt
            raise
    print_outcome(outcome, recipe)
    if outcome.interrupted:
        print(f"stopped after step {outcome.steps}; continue with --resume --output-dir {run_dir}")
        return 130
    draw_report([run_dir], run_dir / "report.png")
    kept = [
        name
        for name in ("metrics.jsonl", "tensorboard/", "checkpoints/")
        if (run_dir / name).exists()
    ]
    print(f"run directory: {run_dir} ({', '.join(kept)})")
    print(f"plot: {run_dir / 'report.png'}")
    return 0


def claim_run_dir(recipe_path: Path, explicit: str | None) -> Path:
    """A fresh directory: the one that was asked for, or outputs/<recipe>, numbered where that is taken.

    Raises:
        RecipeError: the directory that was asked for holds something.
    """
    if explicit is not None:
        run_dir = Path(explicit)
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise RecipeError(
                f"{run_dir} exists and is not empty; nothing was touched. "
                "Name another --output-dir, or continue that run with --resume"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir
    for run_dir in _numbered(recipe_path):
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        return run_dir
    raise AssertionError("the numbers do not end")


def _numbered(recipe_path: Path) -> Any:
    number = 1
    while True:
        yield Path("outputs") / (
            recipe_path.stem if number == 1 else f"{recipe_path.stem}-{number}"
        )
        number += 1


def find_resumable(
    recipe: Recipe, recipe_path: Path, explicit: str | None
) -> tuple[Path, Checkpoint]:
    """The run to continue, and its newest complete checkpoint.

    Raises:
        RecipeError: there is none, or the recipe is not the one it was started with.
    """
    if explicit is not None:
        run_dir = Path(explicit)
    else:
        taken = []
        for candidate in _numbered(recipe_path):
            if not candidate.exists():
                break
            taken.append(candidate)
        if not taken:
            raise RecipeError(
                f"--resume: no run of {recipe_path.stem} under outputs/; name it with --output-dir"
            )
        run_dir = taken[-1]
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise RecipeError(
            f"--resume: {run_dir} holds no complete checkpoint; start without --resume"
        )
    before = json.loads((run_dir / RECIPE_FILE).read_text(encoding="utf-8"))
    now = recipe.model_dump(mode="json")
    changed = [
        key
        for section in now
        if section not in MAY_CHANGE
        for key in _differences(section, before.get(section), now[section])
    ]
    if changed:
        raise RecipeError(
            f"--resume: {run_dir} was started with other values of {', '.join(changed)}; "
            "give the same ones, or start a new run without --resume"
        )
    return run_dir, checkpoints[-1]


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            d
            for key in sorted(before.keys() | now.keys())
            for d in _differences(f"{name}.{key}", before.get(key), now.get(key))
        ]
    return [] if before == now else [name]


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Keep the resolved recipe beside the run's numbers."""
    spare = run_dir / f"{RECIPE_FILE}.tmp"
    spare.write_text(recipe.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(spare, run_dir / RECIPE_FILE)


def prepare_models(recipe: Recipe, rebuild: bool = False, screen: Any = None) -> dict[str, Path]:
    """Build or find the models under ``[*.prepare]``; role to directory."""
    from prime_composer.cli.progress import Screen

    paths = {}
    for role, config in {**recipe.scored_by, "student": recipe.student}.items():
        if config.prepare is None:
            continue
        path = None if rebuild else cached_path(config.prepare, recipe.sources)
        if path is None:
            if screen is None:
                with Screen(total=config.prepare.sft_steps) as own:
                    path = prepare_model(
                        config.prepare,
                        recipe.sources,
                        rebuild=rebuild,
                        progress=own.preparing(spoken(role)),
                    )
            else:
                path = prepare_model(
                    config.prepare, recipe.sources, progress=screen.preparing(spoken(role))
                )
        paths[role] = path
    return paths
