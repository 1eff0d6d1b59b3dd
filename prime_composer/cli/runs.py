"""Run a recipe on this machine before the user's eyes, or say what such a run would do."""

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from prime_composer.backends.lora.adapter import CONFIG
from prime_composer.cli.program import program
from prime_composer.local.run_dir.checkpoint import list_checkpoints
from prime_composer.local.run_dir.claim import (
    REPORT_FILE,
    RunDir,
    Wish,
    choose_run_dir,
    claim_run_dir,
)
from prime_composer.local.run_dir.disk import describe
from prime_composer.local.run_dir.model_check import check_models
from prime_composer.local.sources import load_sources
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.diloco import check_island
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe
from prime_composer.tiny_models.cache import prepare_models

if TYPE_CHECKING:
    from prime_composer.local.islands.island import Island
    from prime_composer.local.run_dir.outcome import Outcome


def run_local(wish: Wish, command: str, island: "Island | None" = None) -> int:
    """Prepare the recipe's models, train, show the outcome, and return the exit status."""
    from prime_composer.local.run_dir.plan import require_libraries

    check_island(wish.recipe.diloco, island is not None)
    check_models(wish.recipe)
    require_libraries(wish.recipe, Routing.of_recipe(wish.recipe))
    problems = load_sources(wish.recipe)
    with claim_run_dir(wish) as claim:
        print(claim.run_dir.describe(), flush=True)
        try:
            return _run(wish, problems, claim.run_dir, claim.begin, command, island)
        except KeyboardInterrupt:
            print(f"\n{how_to_go_on(wish, claim.path, command)}", file=sys.stderr)
            raise


def _run(
    wish: Wish,
    problems: ProblemSet,
    run_dir: RunDir,
    begin: Callable[[], None],
    command: str,
    island: "Island | None",
) -> int:
    from prime_composer.cli.progress import Screen
    from prime_composer.local.run_dir.outcome import RunStopped
    from prime_composer.local.train import train
    from prime_composer.step.gradients import NonFiniteLoss

    recipe, path, checkpoint = wish.recipe, run_dir.path, run_dir.checkpoint
    done = checkpoint.step if checkpoint else 0
    with Screen(total=recipe.trainer.steps, done=done) as screen:
        try:
            paths = prepare_models(recipe, problems, progress=screen.preparing)
            outcome = train(recipe, problems, paths, path, screen, checkpoint, begin, island)
        except NonFiniteLoss as error:
            screen.close()
            checkpoints = list_checkpoints(path)
            remedy = "there is no checkpoint yet"
            if checkpoints:
                remedy = f"the last good checkpoint is {checkpoints[-1].path}"
            print(f"{program()} rl: {error}; {remedy}", file=sys.stderr)
            return 1
        except RunStopped as error:
            if error.checkpoint is None:
                raise
            line = line_to_resume(_named(wish, path), path, command, error.step)
            raise RunStopped(f"{error}\n    {line}", error.checkpoint) from error
    drawn = (island is None or island.evaluates) and _show(outcome, recipe)
    if outcome.interrupted:
        print(f"stopped after step {outcome.steps}; {how_to_go_on(wish, path, command)}")
        return 128 + (outcome.signum or signal.SIGINT)
    names = ("metrics.jsonl", "tensorboard/", "checkpoints/")
    contents = ", ".join(name for name in names if (path / name).exists())
    print(f"run directory: {path} ({contents})")
    if drawn:
        print(f"plot: {path / REPORT_FILE}")
    if outcome.student is not None:
        what = "Hugging Face directory"
        if (outcome.student / CONFIG).exists():
            what = "LoRA adapter"
        print(f"student: {outcome.student} (a {what})")
    return 0


def _show(outcome: "Outcome", recipe: Recipe) -> bool:
    """Print a run's table, and return whether its figure was drawn. An error ends no run."""
    try:
        from prime_composer.cli.figures import draw_report
        from prime_composer.cli.report import print_answers, print_outcome, print_size

        print_outcome(outcome.evaluations, outcome.steps, recipe)
        print_size(outcome.run_dir)
        print_answers(outcome.run_dir, outcome.evaluations)
        if not outcome.interrupted:
            draw_report([outcome.run_dir], outcome.run_dir / REPORT_FILE)
            return True
    except Exception as error:
        # The training is finished and saved; whatever a library for drawing raises comes second.
        reason = describe(error) if isinstance(error, OSError) else error
        print(
            f"warning: the results could not be drawn ({reason}); the run is complete. Draw them "
            f"again: {program()} report {shlex.quote(str(outcome.run_dir))}",
            file=sys.stderr,
        )
    return False


def how_to_go_on(wish: Wish, run_dir: Path, command: str) -> str:
    """Say what of a stopped run is saved, and how it continues."""
    if checkpoints := list_checkpoints(run_dir):
        step = checkpoints[-1].step
        line = line_to_resume(_named(wish, run_dir), run_dir, command, step)
        return f"step {step} is saved; continue with\n    {line}"
    return "nothing is saved yet; the same command starts over"


def line_to_resume(named: Path, run_dir: Path, command: str, step: int) -> str:
    """Return the command line that continues a run from one of its checkpoints, to be pasted."""
    newest = list_checkpoints(run_dir)[-1].step
    words = ["--output-dir", str(named), "--resume"]
    words += [] if step == newest else ["--step", str(step)]
    return f"{command} {shlex.join(words)}"


def _named(wish: Wish, run_dir: Path) -> Path:
    """Return the directory that a user names: that of all islands, where it has them."""
    return run_dir.parent if wish.folder else run_dir


def plan_local(wish: Wish) -> int:
    """Check all that ``run_local`` checks before it loads a model, and print what it would do."""
    from prime_composer.local.run_dir.plan import plan

    problems = load_sources(wish.recipe)
    run_dir = choose_run_dir(wish)
    for line in (run_dir.describe(), *plan(wish.recipe, problems)):
        print(line)
    print("dry run: nothing was run, nothing was written")
    return 0
