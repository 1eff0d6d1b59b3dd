"""Run a recipe on this machine before the user's eyes, or say what such a run would do."""

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prime_composer.backends.lora.adapter import CONFIG
from prime_composer.cli.program import program
from prime_composer.local.checkpoint import list_checkpoints, resume_options
from prime_composer.local.disk import describe_error
from prime_composer.local.requirements import check_requirements
from prime_composer.local.run_dir import (
    REPORT_FILE,
    HeldRunDir,
    RunRequest,
    choose_run_dir,
    claim_run_dir,
)
from prime_composer.local.sources import load_sources
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.diloco import check_island
from prime_composer.recipe.schema import Recipe
from prime_composer.tiny_models.cache import prepare_models

if TYPE_CHECKING:
    from prime_composer.local.islands.island import Island
    from prime_composer.local.outcome import Outcome


def run_local(request: RunRequest, command: str, island: "Island | None" = None) -> int:
    """Prepare the recipe's models, train, show the outcome, and return the exit status."""
    check_island(request.recipe.diloco, island is not None)
    check_requirements(request.recipe)
    problems = load_sources(request.recipe)
    with claim_run_dir(request) as claim:
        print(claim.run_dir.describe(), flush=True)
        try:
            return _run(request, problems, claim, command, island)
        except KeyboardInterrupt:
            print(f"\n{how_to_go_on(request, claim.path, command)}", file=sys.stderr)
            raise


def _run(
    request: RunRequest,
    problems: ProblemSet,
    claim: HeldRunDir,
    command: str,
    island: "Island | None",
) -> int:
    from prime_composer.cli.progress import Screen
    from prime_composer.local.outcome import RunStopped
    from prime_composer.local.train import train
    from prime_composer.step.gradients import NonFiniteLoss

    recipe, path, checkpoint = request.recipe, claim.path, claim.run_dir.checkpoint
    done = checkpoint.step if checkpoint else 0
    with Screen(total=recipe.trainer.steps, done=done) as screen:
        try:
            paths = prepare_models(recipe, problems, progress=screen.preparing)
            outcome = train(recipe, problems, paths, path, screen, checkpoint, claim.begin, island)
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
            line = line_to_resume(request, path, command, error.step)
            raise RunStopped(f"{error}\n    {line}", error.checkpoint) from error
    drawn = (island is None or island.evaluates) and _show(outcome, recipe)
    if outcome.interrupted:
        print(f"stopped after step {outcome.steps}; {how_to_go_on(request, path, command)}")
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
        from prime_composer.cli.recorded import RecordedRun
        from prime_composer.cli.report import print_answers, print_outcome, print_size

        print_outcome(outcome.evaluations, outcome.steps, recipe)
        print_size(RecordedRun.read(outcome.run_dir))
        print_answers(outcome.run_dir, outcome.evaluations)
        if not outcome.interrupted:
            draw_report([outcome.run_dir], outcome.run_dir / REPORT_FILE)
            return True
    except Exception as error:
        # The training is finished and saved; whatever a library for drawing raises comes second.
        print(
            f"warning: the results could not be drawn ({describe_error(error)}); the run is "
            f"complete. Draw them again: {program()} report {shlex.quote(str(outcome.run_dir))}",
            file=sys.stderr,
        )
    return False


def how_to_go_on(request: RunRequest, run_dir: Path, command: str) -> str:
    """Say what of a stopped run is saved, and how it continues."""
    if checkpoints := list_checkpoints(run_dir):
        step = checkpoints[-1].step
        line = line_to_resume(request, run_dir, command, step)
        return f"step {step} is saved; continue with\n    {line}"
    return "nothing is saved yet; the same command starts over"


def line_to_resume(request: RunRequest, run_dir: Path, command: str, step: int) -> str:
    """Return the command line that continues a run from one of its checkpoints, to be pasted."""
    named = run_dir.parent if request.folder else run_dir  # of all islands, where it has them
    where = f"--output-dir {shlex.quote(str(named))}"
    return f"{command} {where} {resume_options(run_dir, step)}"


def plan_local(request: RunRequest) -> int:
    """Check all that ``run_local`` checks before it loads a model, and print what it would do."""
    from prime_composer.local.dry_run import dry_run

    problems = load_sources(request.recipe)
    run_dir = choose_run_dir(request)
    for line in (run_dir.describe(), *dry_run(request.recipe, problems)):
        print(line)
    print("dry run: nothing was run, nothing was written")
    return 0
