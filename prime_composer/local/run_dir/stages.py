"""Find the stage under way in the directory of a recipe with ``[[stages]]``.

Each stage is a run in a folder of its own, ``stage_1`` and so on. A stage begins with the newest
checkpoint of the one before it, once that is over.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_composer.local.run_dir.checkpoint import list_checkpoints, whole_checkpoint
from prime_composer.local.run_dir.claim import (
    REPORT_FILE,
    Wish,
    choose_run_dir,
    claim_run_dir,
    taken,
)
from prime_composer.local.run_dir.recipe_file import RECIPE_FILE, changed_keys, read_recipe
from prime_composer.local.tracker import METRICS_FILE, past_evaluations, read_metrics
from prime_composer.recipe.schema import Recipe, RecipeError, TrainerConfig
from prime_composer.recipe.stages import FOLDER, folder_of, left_by_the_stage_before


@dataclass(frozen=True)
class Chain:
    """The runs of a recipe's stages."""

    output: Path  # the directory with their folders
    wishes: Sequence[Wish]  # what the user asked for, of each stage, with the recipe's own student
    first: int  # place in ``wishes`` of the stage that is run first now

    @property
    def left(self) -> range:
        """The places of the stages that are run now."""
        return range(self.first, len(self.wishes))

    def wish(self, place: int) -> Wish:
        """Return what is asked of a stage, whose student the stage before it has left."""
        own = replace(self.wishes[place], output_dir=str(self.output))
        if place == 0:
            return own
        folder = self.output / own.folder
        begun = bool(list_checkpoints(folder))
        before = whole_checkpoint(self.output / folder_of(place)).path
        recipe = own.recipe.model_copy(update=left_by_the_stage_before(own.recipe.student, before))
        half_made = not begun and (folder / RECIPE_FILE).exists()
        step = own.step if place == self.first else None
        return replace(own, recipe=recipe, resume=begun, step=step, overwrite=half_made)

    def delete_later(self) -> None:
        """Delete the runs of all stages after the first, before that is begun anew."""
        wishes = [replace(one, output_dir=str(self.output)) for one in self.wishes[1:]]
        there = [one for one in wishes if (self.output / one.folder / RECIPE_FILE).exists()]
        for wish in there:
            choose_run_dir(wish)
        for wish in there:
            with claim_run_dir(wish) as claim:
                claim.begin()  # which leaves its recipe, so that the stage starts over in it


def wishes_of(
    recipes: Sequence[Recipe], recipe_path: Path, output_dir: str | None = None, **how: Any
) -> list[Wish]:
    """Return what the user asks for, of each stage, or of the recipe where there is one alone.

    Args:
        recipes: of ``load_stages``.
        recipe_path: the file.
        output_dir: the directory that the user named; None: the recipe's.
        how: ``resume``, ``step`` and ``overwrite`` of a ``Wish``.
    """
    if len(recipes) == 1:
        return [Wish(recipes[0], recipe_path, output_dir or recipes[0].output_dir, **how)]
    folder = recipes[0].output_dir
    named = output_dir or (None if folder is None else str(Path(folder).parent))
    return [
        Wish(recipe, recipe_path, named, **how, stage=number, stages=len(recipes))
        for number, recipe in enumerate(recipes, 1)
    ]


def open_chain(wishes: Sequence[Wish]) -> Chain:
    """Choose the directory of a recipe's stages, and the stage to run first. Write nothing.

    Args:
        wishes: what the user asked for, of each stage.

    Raises:
        RecipeError: the directory is taken, or cannot be resumed.
        InUse: another process trains in it.
        DamagedCheckpoint: a checkpoint is not what was saved.
    """
    one = replace(wishes[0], step=None)
    if one.output_dir is not None:
        _check_output(Path(one.output_dir), len(wishes))
    output = choose_run_dir(one).path.parent
    _check_output(output, len(wishes))
    folders = [output / wish.folder for wish in wishes]
    begun = [place for place, folder in enumerate(folders) if list_checkpoints(folder)]
    if not one.resume:
        if begun[-1:] > [0] and not one.overwrite:
            raise taken(output)
        for wish, folder in zip(wishes, folders, strict=True):
            if one.overwrite and (folder / RECIPE_FILE).exists():
                choose_run_dir(replace(wish, output_dir=str(output)))
        return Chain(output, wishes, 0)
    last = begun[-1]
    chain = Chain(output, wishes, last)
    for place in range(last):
        _check_over(folders[place], chain.wish(place))
    trainer = wishes[last].recipe.trainer
    if last + 1 < len(wishes) and is_over(folders[last], trainer):
        _check_over(folders[last], chain.wish(last))
        last += 1
    chain = replace(chain, first=last)
    step = wishes[0].step
    if step is not None and last not in begun:
        raise RecipeError(
            f"--step {step}: stage {last + 1} of {len(wishes)} is under way, and has no checkpoint "
            "yet; leave --step out"
        )
    return chain


def is_over(run_dir: Path, trainer: TrainerConfig) -> bool:
    """Return whether the newest checkpoint of a run is that of its last step, and evaluated."""
    if not (run_dir / METRICS_FILE).exists():
        return False
    records = {record["step"]: record for record in read_metrics(run_dir)}
    newest = list_checkpoints(run_dir)[-1].step
    upto = [record for step, record in sorted(records.items()) if step <= newest]
    return last_step(upto, trainer) == newest


def last_step(records: Sequence[Mapping[str, Any]], trainer: TrainerConfig) -> int | None:
    """Return the step after which a run was over, by its records; None where it was not.

    The evaluation after it belongs to the run, unless it evaluates nothing, as its step 0 shows.
    """
    evaluations = past_evaluations(records)
    by_step = {record["step"]: record for record in records}
    last = trainer.steps
    if trainer.until is not None and trainer.until.best(evaluations) is not None:
        last = max(evaluations)
    evaluates_nothing = 0 in by_step and 0 not in evaluations
    over = last in by_step and (last in evaluations or evaluates_nothing)
    return last if over else None


def _check_over(run_dir: Path, wish: Wish) -> None:
    """Refuse another recipe of a stage that is over."""
    if changed := changed_keys(read_recipe(run_dir), wish.tables):
        raise RecipeError(
            f"--resume: {run_dir} is over, and was run with other values of {', '.join(changed)}; "
            "give the same ones, or start a new run without --resume"
        )


def _check_output(output: Path, stages: int) -> None:
    """Refuse a directory with other things than the folders of these stages."""
    if not output.is_dir():
        return
    known = {REPORT_FILE, *map(folder_of, range(1, stages + 1))}
    others = sorted(path.name for path in output.iterdir() if path.name not in known)
    if all(map(FOLDER.fullmatch, others)) and others:
        raise RecipeError(
            f"{output} has {others[-1]}, and the recipe has {stages} stages: give the recipe that "
            "it was started with, or name another --output-dir"
        )
    if others:
        raise RecipeError(
            f"{output} holds other files than the stages of a run ({', '.join(others[:3])}); "
            "nothing was touched. Name another --output-dir"
        )


def remove_empty(output: Path) -> None:
    """Remove the directory of stages that left nothing in it."""
    with suppress(OSError):
        output.rmdir()
