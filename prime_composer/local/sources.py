"""Open what a recipe trains and tests on: problems, and environments of verifiers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet, Rows, in_turn, load_problem_set
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.schema import Recipe
from prime_composer.tiny_models.cache import prepare_configs

if TYPE_CHECKING:
    from prime_composer.environments.opening import LoadedEnvironment


@dataclass(frozen=True)
class ProblemsAndTasks(ProblemSet):
    """Problems and tasks of a recipe that has environments by id."""

    by_id: Mapping[str, EnvironmentConfig] = field(default_factory=dict)  # their tables
    environments: "Mapping[str, LoadedEnvironment]" = field(default_factory=dict)  # by id, open

    @property
    def names(self) -> list[str]:
        """The environments that the recipe trains on or evaluates."""
        return [*self.sources, *self.by_id]

    def ratio(self, name: str) -> float:
        """Return an environment's share of the prompts."""
        return self.by_id[name].ratio if name in self.by_id else super().ratio(name)


def load_sources(recipe: Recipe, rows: Rows | None = None) -> ProblemSet:
    """Load what a recipe trains and tests on; ``rows`` is the data where its source is "rows"."""
    if recipe.environments_by_id:
        from prime_composer.environments.opening import refuse_what_needs_problems

        refuse_what_needs_problems(recipe)
    problems = open_sources(recipe, rows)
    if recipe.rollout.trains_on_data:
        for problem in problems.practice:
            if not problem.answer:
                raise ValueError(
                    "rollout.student_fraction below 1 trains on the data's answers, and the "
                    f"question {problem.question[:60]!r} has none; set rollout.other_source = "
                    '"teacher", or student_fraction = 1'
                )
    return problems


def open_sources(recipe: Recipe, rows: Rows | None = None) -> ProblemSet:
    """Load problems, and open environments by id, whatever is then done with them."""
    problems = load_problem_set(recipe.problem_sources, rows)
    if not recipe.environments_by_id:
        return problems
    from prime_composer.environments.opening import open_environment

    environments = {
        name: open_environment(name, config, name in recipe.teaching_environments)
        for name, config in recipe.environments_by_id.items()
    }
    practice: list[Problem] = list(problems.practice)
    held_out: dict[str, list[Problem]] = {name: [] for name in recipe.problem_sources}
    for problem in problems.held_out:
        held_out[problem.environment].append(problem)
    for name, config in recipe.environments_by_id.items():
        tasks: list[Problem] = list(environments[name].problems)
        practice += tasks if config.trains else []
        held_out[name] = tasks if config.evaluates else []
    return ProblemsAndTasks(
        practice,
        in_turn(held_out.values()),
        problems.sources,
        problems.left_out,
        by_id=recipe.environments_by_id,
        environments=environments,
    )


def problems_to_prepare(recipe: Recipe) -> ProblemSet | None:
    """Load the data that small models are trained on; None where the recipe has no such model."""
    if not prepare_configs(recipe):
        return None
    if recipe.teaching_environments:
        return open_sources(recipe)
    return load_problem_set(recipe.problem_sources)
