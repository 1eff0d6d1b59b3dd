"""``prime-rl tape``: score the data's own answers onto the tapes of a recipe, or check tapes."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prime_composer.cli.program import program
from prime_composer.teachers.tape.store import Inspection, inspect

if TYPE_CHECKING:
    from prime_composer.local.engine import Engine
    from prime_composer.problems.config import Problem

MADE_EVERY = 16  # Batches between two lines of progress


def tape(action: str, folder: str | None, config: str | None, overrides: Sequence[str]) -> int:
    """Make the tapes of a recipe, or check tapes."""
    return {"make": tape_make, "check": tape_check}[action](folder, config, overrides)


def tape_check(folder: str | None, config: str | None, overrides: Sequence[str]) -> int:
    """Compare every answer of tapes with its checksum; return 1 where one is damaged, else 0."""
    if (folder is None) == (config is None):
        raise ValueError("tape check takes a folder or a recipe (--config), one of them")
    if config is None:  # which needs no recipe, and no torch
        folders = [Path(str(folder))]
    else:
        from prime_composer.recipe.loading import load_recipe
        from prime_composer.recipe.routing import Routing

        teachers = Routing.of_recipe(load_recipe(config, overrides)).teachers.values()
        folders = [teacher.tape for teacher in teachers if teacher.tape is not None]
        if not folders:
            raise ValueError(f"no teacher of {config} has a tape")
    found = [(path, inspect(path)) for path in folders]
    for path, inspection in found:
        print_inspection(path, inspection)
    return int(any(inspection.damage for _, inspection in found))


def print_inspection(folder: Path, found: Inspection) -> None:
    """Print what is on a tape; what is damaged goes to standard error."""
    from rich.filesize import decimal

    header = found.header
    model = header.get("model")
    words = model if isinstance(model, str) else "a prepared model"
    print(f"{folder}: {words} in {header.get('dtype')}, by {header.get('backend')}")
    print(f"  fingerprint {header.get('fingerprint')}")
    print(f"  tokenizer   {header.get('student_tokenizer')}, the student's")
    for (kind, k, hidden), totals in sorted(found.kinds.items()):
        rows, size = totals["rows"], totals["bytes"]
        name = f"{kind}, K = {k}" if k else kind
        name += ", hidden states" if hidden else ""
        each = f", {size / rows:.0f} bytes per token" if rows else ""
        print(f"  {name}: {totals['answers']} answers, {rows} tokens, {decimal(size)}{each}")
    for path, count in found.unmarked.items():
        print(
            f"  {path}: {count} answers are left out: their writer has not asked its teacher since "
            "whether it is still the same"
        )
    for sentence in found.damage:
        print(f"{program()} tape: {sentence}", file=sys.stderr)


def tape_make(folder: str | None, config: str | None, overrides: Sequence[str]) -> int:
    """Score the data's own answers with a recipe's teachers, each onto its tape."""
    from prime_composer.recipe.loading import load_recipe
    from prime_composer.recipe.routing import Routing
    from prime_composer.recipe.schema import RecipeError

    if config is None or folder is not None:
        raise ValueError("tape make takes a recipe (--config), which names teachers and tapes")
    recipe = load_recipe(config, overrides)
    routing = Routing.of_recipe(recipe)
    if not recipe.asks_teacher or not routing.teachers:
        raise RecipeError(
            f"{config}: [loss] type = {recipe.loss.type!r}, and no teacher scores anything; there "
            "is nothing to keep"
        )
    for teacher, table in routing.teachers.items():
        if table.tape is None or table.tape_only:
            key = "tape_only = true opens no teacher" if table.tape_only else "it names no `tape`"
            raise RecipeError(f"[{teacher.table}] {key}, and tape make asks the teacher for scores")
    size, by_student = recipe.loss.asked_of_teacher
    if by_student:
        raise RecipeError(
            f'[loss] type = {recipe.loss.type!r}, chosen_by = "student": the ids depend on the '
            "student's weights of each step, so that no tape can have them before; set chosen_by = "
            '"teacher"'
        )
    if recipe.environments_by_id:
        name = next(iter(recipe.environments_by_id))
        raise RecipeError(
            f"[environments.{name}] has no answers of its own: let a run make the tape"
        )
    rollout = recipe.rollout
    if rollout.student_fraction == 1 or rollout.teacher_samples:
        raise RecipeError(
            f"rollout.student_fraction = {rollout.student_fraction:g}, other_source = "
            f'"{rollout.other_source}": a run of this recipe trains on no answer of the data, and '
            "never reads what is made here. Set student_fraction below 1 (0: the data's answers "
            'alone) and other_source = "data", or let a run make the tape'
        )
    # From here on, as a run that trains on the data's answers alone.
    own = rollout.model_copy(update={"student_fraction": 0.0, "other_source": "data"})
    recipe = recipe.model_copy(update={"rollout": own})

    from prime_composer.cli.progress import Screen
    from prime_composer.local.evaluate import Evaluator
    from prime_composer.local.opening import open_engine
    from prime_composer.local.preflight import Checks, run_checks
    from prime_composer.local.requirements import check_requirements
    from prime_composer.local.sources import load_sources
    from prime_composer.tiny_models.cache import prepare_models

    check_requirements(recipe)
    problems = load_sources(recipe)
    batch, count = recipe.trainer.batch_size, len(problems.practice)
    with Screen(total=count) as screen:
        paths = prepare_models(recipe, problems, progress=screen.preparing)
        with open_engine(recipe, problems, paths, screen.status, teachers_alone=True) as engine:
            for finding in run_checks(Checks(engine, recipe).vocabularies()):
                if finding.state == "warning":
                    screen.status(f"warning: {finding.text}")
            Evaluator(engine, recipe).teachers()
            _score_answers(engine, problems.practice, batch, screen.status)
    return tape_check(None, config, overrides)


def _score_answers(
    engine: "Engine", problems: Sequence["Problem"], batch: int, status: Callable[[str], None]
) -> None:
    """Let the teachers score the data's answers, ``batch`` at a time."""
    from prime_composer.contract import given
    from prime_composer.step.batch import Sample

    for first in range(0, len(problems), batch):
        asked = problems[first : first + batch]
        engine.score([Sample(engine.problems.solution(problem), problem) for problem in asked])
        last = first + batch >= len(problems)
        if last or first // batch % MADE_EVERY == 0:
            for taped in given(engine.teachers).tapes.values():
                if taped.needs_proof:
                    taped.verify()
            status(f"{first + len(asked)} of {len(problems)} answers")
