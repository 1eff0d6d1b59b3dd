"""On-policy distillation on one machine.

    problems --> sample --> grade --> score by the teachers
       ^                                       |
       |                                       v
    weights to the sampler <-- optimizer step <-- loss

Before a batch trains, its teachers are watched. After a step come the watchers, in this order:
evaluate, watch, log, save. A signal finishes the step under way, unless that waits for a server.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from prime_composer.local.checkpoint import Checkpoint
from prime_composer.local.islands.island import Island
from prime_composer.local.outcome import Outcome
from prime_composer.local.run import Display, open_run
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.schema import Recipe


def train(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    run_dir: Path,
    display: Display,
    resume: Checkpoint | None = None,
    begin: Callable[[], None] | None = None,
    island: Island | None = None,
) -> Outcome:
    """Train a recipe in ``run_dir``; with ``resume``, continue bit-exactly from that checkpoint.

    Args:
        paths: directories of its prepared models, by table ("student", "teacher", "teachers.NAME").
        begin: called when every check has passed and before the first file is written.
        island: what averages the weights with those of other runs, where the recipe has islands.

    Raises:
        ValueError: recipe, data, models and engines do not fit together. It is raised before the
            first step.
        RunStopped: a server, the disk or a check ended the run later. What is safe is saved.
        NonFiniteLoss: training diverged. The newest checkpoint is the last good one.
    """
    with (
        open_run(recipe, problems, paths, run_dir, display, resume, begin, island) as run,
        run.until_stopped() as stop,
    ):
        for step in run.steps():
            with stop.may_interrupt():
                batch = run.collect(step)
            metrics = run.update(batch, step)
            with stop.may_interrupt():
                run.load_weights(step)
            run.end_step(step, batch, metrics)
    return run.outcome()
