"""Define ``[[stages]]``, and make a complete recipe of each.

A recipe with stages is a chain of runs. Each has a loss and steps of its own and starts from the
student that the one before it left; all other tables are the recipe's. Stages count from 1.
"""

import copy
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from prime_composer.losses import AnyLoss
from prime_composer.recipe.carried import CARRIED
from prime_composer.recipe.diloco import STAGES
from prime_composer.recipe.loading import apply_override, parse_recipe, parse_tables, read_tables
from prime_composer.recipe.prepare import LARGEST_SEED
from prime_composer.recipe.schema import Recipe, RecipeError, StudentConfig
from prime_composer.recipe.teacher import ReferenceConfig
from prime_composer.recipe.watchers import UntilConfig
from prime_composer.tables import MOST_STEPS, Table

SEEDS_APART = 1_000_000
"""What ``trainer.seed`` rises by from one stage to the next: problems and samples are other ones,
and those of no other seed that a study has."""

FOLDER = re.compile(r"stage_[0-9]+")
"""What ``folder_of`` returns."""


class StageConfig(Table):
    """A stage of several: its loss and steps. All else is the recipe's, in every stage. A table
    ``until`` has the keys of ``[trainer.until]``.

    Each stage is a run: a new optimizer, a warm-up and a schedule over its own steps. Stage N has
    ``trainer.seed`` + 1,000,000 (N - 1). A student with ``quantize`` begins with its rounded
    weights.

    Source: on-policy distillation, then RL, https://arxiv.org/abs/2609.04108.
    """

    loss: AnyLoss = Field(json_schema_extra=CARRIED)
    """The objective of this stage, like `[loss]`."""

    steps: int = Field(ge=1, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Optimizer steps of this stage, in the place of trainer.steps."""

    until: UntilConfig | None = None
    """End this stage earlier, as `[trainer.until]` does a run."""

    lr: float | None = Field(default=None, gt=0, json_schema_extra=CARRIED)
    """Peak learning rate of this stage. Unset: trainer.lr."""


def load_stages(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> list[Recipe]:
    """Read and validate a recipe: one of each of its stages, or itself where it has none.

    Takes the arguments of ``load_recipe``. ``stages.2.KEY=value`` changes the second stage.

    Raises:
        RecipeError: as ``load_recipe`` does; what is wrong with a stage begins with its number.
    """
    raw = read_tables(path, "recipe", "recipes/")
    for item in overrides:
        apply_override(raw, item)
    return parse_stages(raw, str(path))


def parse_stages(raw: dict[str, Any], source: str = "recipe") -> list[Recipe]:
    """Validate a recipe given as nested tables, with ``[[stages]]`` or without."""
    if "stages" not in raw:
        return [parse_recipe(raw, source)]
    stages = raw["stages"]
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise RecipeError(f"{source}: stages: write each stage as a table, [[stages]]")
    if len(stages) < 2:
        raise RecipeError(
            f"{source}: [[stages]]: there are at least two; write a single one as [loss] and "
            "trainer.steps"
        )
    trainer = raw.get("trainer", {})
    double = ["[loss]"] if "loss" in raw else []
    if isinstance(trainer, dict):
        double += [f"trainer.{key}" for key in ("steps", "until") if key in trainer]
    if double:
        raise RecipeError(
            f"{source}: {' and '.join(double)} beside [[stages]]: each stage has its own; leave "
            "the recipe's out"
        )
    if "diloco" in raw:
        raise RecipeError(f"{source}: {STAGES}")
    recipes = [_stage(raw, number, source) for number in range(1, len(stages) + 1)]
    _check_reference(recipes[0].reference, recipes[0].student, source)
    if recipes[0].rollout.url is not None:
        raise RecipeError(
            f"{source}: [[stages]] and rollout.url: a stage begins with a checkpoint of the one "
            "before it, and the server has another model; set another rollout.backend, without url"
        )
    if recipes[0].environments_by_id and not recipes[0].rollout.renderer:
        raise RecipeError(
            f"{source}: [[stages]] and environments by id without rollout.renderer: from the "
            "second stage on the student is a directory, whose name chooses no renderer; set "
            "rollout.renderer"
        )
    return recipes


def _check_reference(
    reference: ReferenceConfig | None, student: StudentConfig, source: str
) -> None:
    """Refuse a reference that is the student's start, where the start is not the same model."""
    if reference is None or not reference.start:
        return
    start = "[[stages]] and [reference] start = true"
    if student.lora is not None:
        raise RecipeError(
            f"{source}: {start} with [student.lora]: from the second stage on the student begins "
            "with the adapter of the one before it, and the reference would be without: name a "
            "model in reference.model"
        )
    if reference.tape is not None:
        raise RecipeError(
            f"{source}: {start} with reference.tape: each stage starts from another model, and a "
            "tape has the answers of one: name a model in reference.model, or leave the tape out"
        )


def _stage(raw: dict[str, Any], number: int, source: str) -> Recipe:
    """Return the recipe of a stage, as if it were written by itself."""
    tables = copy.deepcopy({key: table for key, table in raw.items() if key != "stages"})
    stage = copy.deepcopy(raw["stages"][number - 1])
    parse_tables(StageConfig, stage, f"{source}: stages.{number}")
    trainer = tables.setdefault("trainer", {})
    if isinstance(trainer, dict):
        trainer |= {key: stage[key] for key in ("steps", "until", "lr") if key in stage}
        seed = trainer.get("seed", 0)
        if number > 1 and isinstance(seed, int):
            trainer["seed"] = (seed + SEEDS_APART * (number - 1)) % (LARGEST_SEED + 1)
    tables["loss"] = stage["loss"]
    if isinstance(tables.get("output_dir"), str):
        tables["output_dir"] = str(Path(tables["output_dir"]) / folder_of(number))
    try:
        return parse_recipe(tables, "")
    except RecipeError as error:
        text = re.sub(r"\btrainer\.(steps|until|lr)\b", rf"stages.{number}.\1", str(error))
        text = re.sub(r"(?<![\w.])loss(?=\.\w)|(?<=\[)loss(?=])", f"stages.{number}.loss", text)
        raise RecipeError(re.sub("^:", f"{source}: stages.{number}:", text, flags=re.M)) from None


def folder_of(number: int) -> str:
    """Return the folder of a stage within the directory of the run."""
    return f"stage_{number}"


def left_by_the_stage_before(student: StudentConfig, model: Path) -> dict[str, StudentConfig]:
    """Return what differs in the recipe of a stage that begins with another stage's checkpoint."""
    if student.lora is not None:
        lora = student.lora.model_copy(update={"start": model})
        return {"student": student.model_copy(update={"lora": lora})}
    return {"student": StudentConfig(model=str(model), quantize=student.quantize)}
