"""Run a recipe on this machine before the user's eyes, or say what such a run would do."""

import shlex
import signal
import sys
from typing import TYPE_CHECKING

from prime_composer.backends.lora.adapter import CONFIG
from prime_composer.cli.program import program
from prime_composer.local.checkpoint import list_checkpoints
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


def run_local(request: RunRequest, island: "Island | None" = None) -> int:
    """Prepare the recipe's models, train, show the outcome, and return the exit status."""
    check_island(request.recipe.diloco, island is not None)
    check_requirements(request.recipe)
    problems = load_sources(request.recipe)
    from prime_composer.local.outcome import RunStopped
    from prime_composer.step.gradients import NonFiniteLoss

    with claim_run_dir(request) as claim:
        path = claim.path
        try:
            outcome = train_in(claim, request.recipe, problems, island)
        except KeyboardInterrupt:
            print(f"\n{request.how_to_continue(path)}", file=sys.stderr)
            raise
        except NonFiniteLoss as error:
            good = [f"the last good checkpoint is {one.path}" for one in list_checkpoints(path)]
            remedy = (good or ["there is no checkpoint yet"])[-1]
            print(f"{program()} rl: {error}; {remedy}", file=sys.stderr)
            return 1
        except RunStopped as error:
            if error.checkpoint is None:
                raise
            how = request.how_to_continue(path, error.checkpoint.step, error.verified)
            raise ValueError(f"{error.reason}; {how}") from error
        drawn = (island is None or island.evaluates) and _show(outcome, request.recipe)
        if outcome.interrupted:
            print(f"stopped after step {outcome.steps}; {request.how_to_continue(path)}")
            return 128 + (outcome.signum or signal.SIGINT)
        names = ("metrics.jsonl", "tensorboard/", "checkpoints/")
        contents = ", ".join(name for name in names if (path / name).exists())
        print(f"run directory: {path} ({contents})")
        if drawn:
            print(f"plot: {path / REPORT_FILE}")
        if (student := outcome.student) is not None:
            what = "LoRA adapter" if (student / CONFIG).exists() else "Hugging Face directory"
            print(f"student: {student} (a {what})")
        return 0


def train_in(
    claim: HeldRunDir, recipe: Recipe, problems: ProblemSet, island: "Island | None" = None
) -> "Outcome":
    """Prepare a recipe's models, and train it in a directory, before the user's eyes."""
    from prime_composer.cli.progress import Screen
    from prime_composer.local.train import train

    done = claim.checkpoint.step if claim.checkpoint else 0
    with Screen(total=recipe.trainer.steps, done=done) as screen:
        screen.status(claim.describe())
        paths = prepare_models(recipe, problems, progress=screen.preparing)
        return train(
            recipe, problems, paths, claim.path, screen, claim.checkpoint, claim.begin, island
        )


def _show(outcome: "Outcome", recipe: Recipe) -> bool:
    """Print a run's table, and return whether its figure was drawn. An error ends no run."""
    try:
        from prime_composer.cli.figures import draw_report
        from prime_composer.cli.report import print_answers, print_outcome

        print_outcome(outcome.evaluations, outcome.steps, recipe)
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


def plan_local(request: RunRequest) -> int:
    """Check all that ``run_local`` checks before it loads a model, and print what it would do."""
    from prime_composer.local.dry_run import dry_run

    problems = load_sources(request.recipe)
    run_dir = choose_run_dir(request)
    for line in (run_dir.describe(), *dry_run(request.recipe, problems)):
        print(line)
    print("dry run: nothing was run, nothing was written")
    return 0
