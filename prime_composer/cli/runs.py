"""Claim run directories, and run a recipe on this machine before the user's eyes."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_composer.cli.formatting import RECIPE_FILE
from prime_composer.local.checkpoint import Checkpoint, list_checkpoints
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.tiny_models.cache import prepare_models

MAY_CHANGE = ("eval", "logging", "checkpoint", "checks", "output_dir", "prime_rl")
"""Sections that a resumed run may change: they do not touch the numbers that it trains on."""


def run_local(recipe: Recipe, recipe_path: Path, output_dir: str | None, resume: bool) -> int:
    """Prepare the recipe's models, train, and show the outcome.

    Args:
        recipe: the resolved recipe.
        recipe_path: its file; names the run directory where nothing else does.
        output_dir: ``--output-dir``; comes before the recipe's own.
        resume: continue the run directory's newest checkpoint.

    Returns:
        The exit status: 0, 1 if the loss diverged, 130 after Ctrl-C.
    """
    from prime_composer.cli.progress import Screen
    from prime_composer.cli.report import draw_report, print_outcome
    from prime_composer.local.gradients import NonFiniteLoss
    from prime_composer.local.train import train

    problems = load_problem_set(recipe.sources)
    explicit = output_dir or recipe.output_dir
    checkpoint: Checkpoint | None = None
    if resume:
        run_dir, checkpoint = find_resumable(recipe, recipe_path, explicit)
    else:
        run_dir = claim_run_dir(recipe, recipe_path, explicit)
    done = checkpoint.step if checkpoint else 0
    print(describe_run_dir(run_dir, checkpoint))
    with Screen(total=recipe.trainer.steps, done=done) as screen:
        try:
            paths = prepare_models(recipe, problems, progress=screen.preparing)
            outcome = train(recipe, problems, paths, run_dir, screen, resume=checkpoint)
        except NonFiniteLoss as error:
            screen.close()
            checkpoints = list_checkpoints(run_dir)
            remedy = "there is no checkpoint yet"
            if checkpoints:
                remedy = f"the last good checkpoint is {checkpoints[-1].path}"
            print(f"prime-rl rl: {error}; {remedy}", file=sys.stderr)
            return 1
        except BaseException:
            if checkpoint is None and [file.name for file in run_dir.iterdir()] == [RECIPE_FILE]:
                shutil.rmtree(run_dir)  # nothing has run: the next attempt finds the name free
            raise
    print_outcome(outcome.evaluations, outcome.steps, recipe)
    if outcome.interrupted:
        print(f"stopped after step {outcome.steps}; continue with --resume --output-dir {run_dir}")
        return 130
    draw_report([run_dir], run_dir / "report.png")
    names = ("metrics.jsonl", "tensorboard/", "checkpoints/")
    contents = ", ".join(name for name in names if (run_dir / name).exists())
    print(f"run directory: {run_dir} ({contents})")
    print(f"plot: {run_dir / 'report.png'}")
    return 0


def plan_local(recipe: Recipe, recipe_path: Path, output_dir: str | None, resume: bool) -> int:
    """Check all that ``run_local`` checks before it loads a model, and print what it would do.

    Runs nothing and writes nothing. Arguments are those of ``run_local``.

    Returns:
        The exit status, 0.
    """
    from prime_composer.local.plan import plan

    problems = load_problem_set(recipe.sources)
    explicit = output_dir or recipe.output_dir
    checkpoint: Checkpoint | None = None
    if resume:
        run_dir, checkpoint = find_resumable(recipe, recipe_path, explicit)
    else:
        run_dir = free_run_dir(recipe_path, explicit)
    for line in (describe_run_dir(run_dir, checkpoint), *plan(recipe, problems)):
        print(line)
    print("dry run: nothing was run, nothing was written")
    return 0


def describe_run_dir(run_dir: Path, checkpoint: Checkpoint | None) -> str:
    """Name the run directory, and the step that a resumed run starts after."""
    resumed = f", resuming after step {checkpoint.step}" if checkpoint else ""
    return f"run directory: {run_dir}{resumed}"


def free_run_dir(recipe_path: Path, explicit: str | None) -> Path:
    """Return the directory that ``claim_run_dir`` would claim now.

    Args:
        recipe_path: names outputs/<recipe>, numbered where that is taken: outputs/<recipe>-2.
        explicit: the directory that the user named; None: the name of the recipe.

    Raises:
        RecipeError: the directory that the user named is not empty.
    """
    if explicit is None:
        return next(path for path in _numbered(recipe_path) if not os.path.lexists(path))
    run_dir = Path(explicit)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise _taken(run_dir)
    return run_dir


def claim_run_dir(recipe: Recipe, recipe_path: Path, explicit: str | None) -> Path:
    """Create a directory that no other run has, also if two start at once, with the recipe in it.

    Arguments and errors are those of ``free_run_dir``.
    """
    while True:
        run_dir = free_run_dir(recipe_path, explicit)
        try:
            run_dir.mkdir(parents=True, exist_ok=explicit is not None)
            with open(run_dir / RECIPE_FILE, "x", encoding="utf-8") as file:
                file.write(recipe.model_dump_json(indent=2) + "\n")
        except FileExistsError:  # another run was faster
            if explicit is not None:
                raise _taken(run_dir) from None
            continue
        return run_dir


def _taken(run_dir: Path) -> RecipeError:
    return RecipeError(
        f"{run_dir} exists and is not empty; nothing was touched. "
        "Name another --output-dir, or continue that run with --resume"
    )


def _numbered(recipe_path: Path) -> Iterator[Path]:
    """Yield outputs/<recipe>, outputs/<recipe>-2, outputs/<recipe>-3, ..."""
    yield Path("outputs") / recipe_path.stem
    for number in itertools.count(2):
        yield Path("outputs") / f"{recipe_path.stem}-{number}"


def find_resumable(
    recipe: Recipe, recipe_path: Path, explicit: str | None
) -> tuple[Path, Checkpoint]:
    """Return the run to continue, and its newest complete checkpoint.

    Raises:
        RecipeError: there is none, or the recipe is not the one that the run was started with.
    """
    if explicit is not None:
        run_dir = Path(explicit)
    else:
        run_dirs = list(itertools.takewhile(Path.exists, _numbered(recipe_path)))
        if not run_dirs:
            raise RecipeError(
                f"--resume: no run of {recipe_path.stem} under outputs/; name it with --output-dir"
            )
        run_dir = run_dirs[-1]
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
    """Name the keys, from ``name`` down, whose values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            key
            for inner in sorted(before.keys() | now.keys())
            for key in _differences(f"{name}.{inner}", before.get(inner), now.get(inner))
        ]
    return [] if before == now else [name]
