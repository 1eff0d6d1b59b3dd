"""Route problems to teachers: which of them score a problem's rollouts, and with which weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import total_ordering

from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import Recipe, RecipeError, TeacherConfig


@total_ordering
@dataclass(frozen=True)
class TeacherId:
    """A teacher of a recipe, or the ``[reference]`` that it is extrapolated from."""

    name: str | None = None
    is_reference: bool = False

    @property
    def table(self) -> str:
        """The recipe's table: "teacher", "teachers.NAME" or "reference"."""
        if self.is_reference:
            return "reference"
        return "teacher" if self.name is None else f"teachers.{self.name}"

    @property
    def display(self) -> str:
        """The name for messages: "teacher", "teacher NAME" or "reference"."""
        if self.is_reference:
            return "reference"
        return "teacher" if self.name is None else f"teacher {self.name}"

    def __lt__(self, other: "TeacherId") -> bool:
        return self.table < other.table


REFERENCE = TeacherId(is_reference=True)


@dataclass(frozen=True)
class Routing:
    """The teachers of a recipe, and who scores what."""

    # models of their own, and the reference behind them
    teachers: Mapping[TeacherId, TeacherConfig]
    shares: Mapping[str, Mapping[TeacherId, float]]  # weight by environment, where a row names none

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> "Routing":
        teachers: dict[TeacherId, TeacherConfig] = {
            TeacherId(name): config.resolved(recipe.student)
            for name, config in recipe.teachers.items()
        }
        if recipe.teacher is not None and recipe.teacher.policy is None:
            teachers[TeacherId()] = recipe.teacher.resolved(recipe.student)
        scorers = dict(teachers)
        if recipe.reference is not None:
            scorers[REFERENCE] = recipe.reference.resolved(recipe.student)
        own_weights = {name: config.weight for name, config in recipe.teachers.items()}
        shares: dict[str, Mapping[TeacherId, float]] = {}
        for environment, data in recipe.sources.items():
            if not recipe.teachers:
                shares[environment] = dict.fromkeys(teachers, 1.0)
                continue
            chosen = own_weights if data.teacher is None else data.teacher
            weights: Mapping[str, float] = {chosen: 1.0} if isinstance(chosen, str) else chosen
            total = sum(weights.values())
            shares[environment] = {
                TeacherId(name): weight / total for name, weight in weights.items()
            }
        return cls(scorers, shares)

    @property
    def opened(self) -> dict[TeacherId, TeacherConfig]:
        """The teachers that a run opens: all but those whose tape alone answers."""
        return {
            teacher: config for teacher, config in self.teachers.items() if not config.tape_only
        }

    def of(self, problem: Problem) -> dict[TeacherId, float]:
        """Return the teachers that score a problem's rollouts, with weights that add up to 1."""
        named = [teacher.name for teacher in self.teachers if teacher.name is not None]
        if problem.teacher is None or not named:
            return self.of_environment(problem.environment)
        if problem.teacher not in named:
            raise RecipeError(
                f"the problem {problem.question[:60]!r} names the teacher {problem.teacher!r}; "
                f"[teachers] has {', '.join(named)}"
            )
        return {TeacherId(problem.teacher): 1.0}

    def readers(self, problem: Problem) -> list[TeacherId]:
        """Return all that score a problem's rollouts: its teachers, and the reference."""
        return [*self.of(problem), *([REFERENCE] if REFERENCE in self.teachers else [])]

    def route(self, problems: Iterable[Problem]) -> dict[TeacherId, list[Problem]]:
        """Return the problems whose rollouts each teacher scores."""
        readers = [(problem, self.readers(problem)) for problem in problems]
        return {
            teacher: [problem for problem, scored_by in readers if teacher in scored_by]
            for teacher in self.teachers
        }

    def of_environment(self, name: str) -> dict[TeacherId, float]:
        """Return the teachers that score an environment's rollouts, where no row names one."""
        return dict(self.shares[name])
