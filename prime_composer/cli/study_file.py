"""A study file: the base recipe, the overrides of each variant, and the seeds."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.recipe_file import (
    RECIPE_FILE,
    Tables,
    differing_keys,
    read_recipe,
)
from prime_composer.local.tracker import METRICS_FILE, past_evaluations, read_metrics
from prime_composer.recipe.diloco import island_folder
from prime_composer.recipe.loading import load_recipe, parse_tables, read_tables
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.tables import Table

BUDGET = re.compile(r"trainer\.(steps|batch_size)")  # What of ``SAME`` a study of budgets may vary

SAME = re.compile(
    r"student(\.(?!(quantize|lora)(\.|$)).*)?|(data|environments\.[^.]+)(\.(?!teacher(\.|$)).*)?|environments"
    r"|trainer\.(steps|batch_size)|rollout\.max_tokens|eval\.(size|kl_size)"
)
"""Keys that every variant shares: the start, the rollout budget, and what is measured. Variants may
choose other teachers for an environment, and what of their student trains: the rounding that it
keeps, or an adapter."""


class StudyConfig(Table):
    """Which runs are compared."""

    base: Path
    """The recipe that every variant starts from; relative to the study file."""

    overrides: tuple[str, ...] = ()
    """``section.key=value``, as after ``--set``: what all variants change in the base."""

    variants: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name -> ``section.key=value`` items of this variant.

    ``loss={type = "taid", k = 16}`` replaces a whole table.
    """

    grid: dict[str, dict[str, tuple[str, ...]]] = Field(default_factory=dict)
    """Axis -> name -> items, instead of ``variants``.

    A variant is one name of each axis, joined by "-", with the items of all of them in this order.
    The figure has the last axis on x, and a line for each combination of the others.
    """

    same_budget: bool = True
    """Whether all variants take as many steps of as many rollouts. false: the budget, or how it is
    spent, is what is compared, as with islands."""

    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """``trainer.seed`` of each variant's runs."""

    output_dir: str | None = None
    """Where the runs go; unset: outputs/<name of the study file>."""

    def refusals(self) -> Iterator[str]:
        if self.variants and self.grid:
            yield "[variants] and [grid.*]: keep one of them"
        for name in itertools.chain(*self.axes):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
                yield (
                    f"{name!r} names a directory: letters, digits and . _ + - only, "
                    "and no sign first"
                )
        count = len(self.combinations)
        if count < 2:
            yield (f"a study compares at least two variants, in [variants] or [grid.*]: {count}")
        if len(self.items_of) < count:
            yield "grid: two variants have the same name; rename a value of an axis"

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("the same seed twice is the same run twice; give different ones")
        return seeds

    @property
    def axes(self) -> list[dict[str, tuple[str, ...]]]:
        """Name -> items, of each axis; the variants are the only one without a grid."""
        return [self.variants] if self.variants else list(self.grid.values())

    @property
    def combinations(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Names of each variant -> its items: one name per axis."""
        return {
            tuple(name for name, _ in one): tuple(itertools.chain(*(items for _, items in one)))
            for one in itertools.product(*(axis.items() for axis in self.axes))
            if one
        }

    @property
    def items_of(self) -> dict[str, tuple[str, ...]]:
        return {"-".join(names): items for names, items in self.combinations.items()}


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    variant: str  # name of the variant
    seed: int  # ``trainer.seed``
    recipe: Recipe  # the base with the overrides of all variants, of this one, and the seed
    overrides: tuple[str, ...]  # the same as ``--set`` items
    base: Path  # the recipe file
    run_dir: Path  # where the run goes

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def first(self) -> Path:
        """The directory of the run, or of island 0, which evaluates."""
        return self.run_dir / ("" if self.recipe.diloco is None else island_folder(0))

    @property
    def has_begun(self) -> bool:
        """Whether the run has a checkpoint to continue from."""
        return bool(list_checkpoints(self.first))

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")

    @property
    def tables(self) -> Tables:
        return self.recipe.model_dump(mode="json")


def load_study(
    path: str | os.PathLike[str], output_dir: str | None = None, changes: Sequence[str] = ()
) -> tuple[StudyConfig, list[StudyRun]]:
    """Read and validate a study file, and the recipe of every variant."""
    path = Path(path)
    study = parse_tables(StudyConfig, read_tables(path, "study", "recipes/studies/"), str(path))
    for item in (*changes, *study.overrides, *itertools.chain(*study.items_of.values())):
        if item.partition("=")[0].strip() == "trainer.seed":
            raise RecipeError(f"{path}: {item}: the seeds of a study belong in `seeds`")
    base = Path(os.path.relpath(path.parent / study.base))
    folder = Path(output_dir or study.output_dir or Path("outputs") / path.stem)
    runs = []
    for seed in study.seeds:
        for variant, items in study.items_of.items():
            overrides = (*study.overrides, *items, *changes, f"trainer.seed={seed}")
            try:
                recipe = load_recipe(base, overrides)
            except RecipeError as error:
                raise RecipeError(f"{path}: variants.{variant}: {error}") from None
            run_dir = folder / f"{variant}-seed{seed}"
            runs.append(StudyRun(variant, seed, recipe, overrides, base, run_dir))
    _check_same_budget(runs[: len(study.items_of)], path, study.same_budget)
    return study, runs


def _check_same_budget(runs: Sequence[StudyRun], path: Path, same_budget: bool) -> None:
    """Refuse variants whose keys of ``SAME`` differ, of which a study of budgets varies some."""
    first = runs[0]
    for run in runs[1:]:
        for key in filter(SAME.fullmatch, differing_keys(first.tables, run.tables)):
            if not same_budget and BUDGET.fullmatch(key):
                continue
            raise RecipeError(
                f"{path}: variants.{run.variant}: {key} differs from that of variants."
                f"{first.variant}; a comparison starts from the same student and spends the same "
                "rollouts. Set it in `overrides`, for all of them"
            )


def is_finished(run: StudyRun) -> bool:
    """Check whether the run's directory contains its last step, with the evaluation after it."""
    run_dir = run.first
    if not (run_dir / RECIPE_FILE).exists():
        return False
    if changed := differing_keys(read_recipe(run_dir), run.tables):
        raise RecipeError(
            f"{run_dir} holds a run with other values of {', '.join(changed)}; nothing was "
            "touched. Name another --output-dir, or replace the study's runs with --overwrite"
        )
    if not (run_dir / METRICS_FILE).exists():
        return False
    records, trainer = read_metrics(run_dir), run.recipe.trainer
    evaluations, steps = past_evaluations(records), {record["step"] for record in records}
    last = trainer.steps
    if trainer.until is not None and trainer.until.best(evaluations) is not None:
        last = max(evaluations)
    evaluates_nothing = 0 in steps and 0 not in evaluations
    return last in steps and (last in evaluations or evaluates_nothing)
