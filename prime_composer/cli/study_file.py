"""A study file: the base recipe, the overrides of each variant, and the seeds."""

import copy
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from prime_composer.cli.formatting import RECIPE_FILE
from prime_composer.cli.run_dirs import read_recipe
from prime_composer.local.tracker import METRICS_FILE, read_metrics
from prime_composer.recipe.loading import apply_override, parse_recipe, parse_tables, read_tables
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.tables import Table

SAME = (
    "student",
    "data",
    "trainer.steps",
    "trainer.batch_size",
    "rollout.max_tokens",
    "eval.size",
    "eval.kl_size",
)
"""Keys that every variant shares: the start, the rollout budget, and what is measured."""


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

    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """``trainer.seed`` of each variant's runs."""

    output_dir: str | None = None
    """Where the runs go; unset: outputs/<name of the study file>."""

    @field_validator("variants", "grid")
    @classmethod
    def _names_are_directories(cls, value: dict[str, Any]) -> dict[str, Any]:
        axes = [names for names in value.values() if isinstance(names, dict)] or [value]
        for name in itertools.chain(*axes):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
                raise ValueError(
                    f"{name!r} names a directory: letters, digits and . _ + - only, "
                    "and no sign first"
                )
        return value

    @model_validator(mode="after")
    def _has_two_variants(self) -> "StudyConfig":
        if self.variants and self.grid:
            raise ValueError("[variants] and [grid.*]: keep one of them")
        count = len(self.combinations)
        if count < 2:
            raise ValueError(
                f"a study compares at least two variants, in [variants] or [grid.*]: {count}"
            )
        if len({"-".join(names) for names in self.combinations}) < count:
            raise ValueError("grid: two variants have the same name; rename a value of an axis")
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("the same seed twice is the same run twice; give different ones")
        return seeds

    @property
    def combinations(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Names of each variant -> its items: one name per axis, or one without a grid."""
        if self.variants:
            return {(name,): items for name, items in self.variants.items()}
        if not self.grid:
            return {}
        return {
            tuple(name for name, _ in one): tuple(itertools.chain(*(items for _, items in one)))
            for one in itertools.product(*(axis.items() for axis in self.grid.values()))
        }

    @property
    def items_of(self) -> dict[str, tuple[str, ...]]:
        """Variant -> its items."""
        return {"-".join(names): items for names, items in self.combinations.items()}


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        variant: name of the variant.
        seed: ``trainer.seed``.
        recipe: the base with the overrides of all variants, of this one, and the seed.
        overrides: the same as ``--set`` items.
        base: the recipe file.
        run_dir: where the run goes.
    """

    variant: str
    seed: int
    recipe: Recipe
    overrides: tuple[str, ...]
    base: Path
    run_dir: Path

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")


def load_study(
    path: str | os.PathLike[str], output_dir: str | None = None, changes: Sequence[str] = ()
) -> tuple[StudyConfig, list[Run]]:
    """Read and validate a study file, and the recipe of every variant.

    Args:
        path: a TOML file.
        output_dir: replaces the file's own.
        changes: ``section.key=value`` items for all variants, after their own.

    Returns:
        The study, and its runs seed by seed, so that a stopped study has whole seeds to compare.

    Raises:
        RecipeError: the file, an override or a variant's recipe is wrong, or the variants do not
            share start and budget.
    """
    path = Path(path)
    study = parse_tables(StudyConfig, read_tables(path, "study", "recipes/studies/"), str(path))
    for item in (*changes, *study.overrides, *itertools.chain(*study.items_of.values())):
        if item.partition("=")[0].strip() == "trainer.seed":
            raise RecipeError(f"{path}: {item}: the seeds of a study belong in `seeds`")
    base = Path(os.path.relpath(path.parent / study.base))
    tables = read_tables(base, "recipe", "recipes/")
    folder = Path(output_dir or study.output_dir or Path("outputs") / path.stem)
    runs = []
    for seed in study.seeds:
        for variant, items in study.items_of.items():
            overrides = (*study.overrides, *items, *changes, f"trainer.seed={seed}")
            try:
                recipe = _with_overrides(tables, overrides, base)
            except RecipeError as error:
                raise RecipeError(f"{path}: variants.{variant}: {error}") from None
            run_dir = folder / f"{variant}-seed{seed}"
            runs.append(Run(variant, seed, recipe, overrides, base, run_dir))
    _check_same_budget(runs[: len(study.items_of)], path)
    return study, runs


def _with_overrides(tables: dict[str, Any], overrides: Sequence[str], base: Path) -> Recipe:
    changed = copy.deepcopy(tables)
    for item in overrides:
        apply_override(changed, item)
    return parse_recipe(changed, str(base))


def _check_same_budget(runs: Sequence[Run], path: Path) -> None:
    """Refuse variants whose keys of ``SAME`` differ."""
    for key in SAME:
        values = [_value_at(run.recipe, key) for run in runs]
        for run, value in zip(runs, values, strict=True):
            if value != values[0]:
                raise RecipeError(
                    f"{path}: variants.{run.variant}: {key} differs from that of "
                    f"variants.{runs[0].variant} ({_short(value)} against {_short(values[0])}); "
                    "a comparison starts from the same student and spends the same rollouts. "
                    "Set it in `overrides`, for all of them"
                )


def _value_at(recipe: Recipe, key: str) -> Any:
    """Return a value of the recipe by its dotted key."""
    if key == "data":  # variants may choose other teachers for an environment
        return {
            name: source.model_copy(update={"teacher": None})
            for name, source in recipe.sources.items()
        }
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_finished(run: Run) -> bool:
    """Check whether the run's directory contains its last evaluation.

    Raises:
        RecipeError: it contains another recipe's run.
    """
    if not (run.run_dir / RECIPE_FILE).exists():
        return False
    before = read_recipe(run.run_dir)
    now = run.recipe.model_dump(mode="json")
    changed = [section for section in now if before.get(section) != now[section]]
    if changed:
        raise RecipeError(
            f"{run.run_dir} holds a run with another [{'], ['.join(changed)}]; "
            "nothing was touched. Name another --output-dir, or move it away"
        )
    if not (run.run_dir / METRICS_FILE).exists():
        return False
    return any(
        record["step"] == run.recipe.trainer.steps and "eval/truncated" in record
        for record in read_metrics(run.run_dir)
    )
