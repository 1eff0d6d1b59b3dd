"""Open what a recipe trains and tests on: problems, and environments of verifiers."""

from prime_composer.problems.loading import ProblemSet, load_problem_set
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.schema import Recipe, RecipeError


def load_sources(recipe: Recipe) -> ProblemSet:
    """Load what a recipe trains and tests on.

    Raises:
        RecipeError: an environment by id cannot run on this machine.
        ValueError: as ``load_problem_set``.
    """
    for name, config in recipe.environments_by_id.items():
        open_environment(name, config)
    return load_problem_set(recipe.problem_sources)


def open_environment(name: str, config: EnvironmentConfig) -> None:
    """Open an environment by id.

    Args:
        name: its name in the recipe.
        config: its table.

    Raises:
        RecipeError: always; the message names the table.
    """
    raise RecipeError(
        f"[environments.{name}] id = {config.id!r}: the one-machine engine runs problems alone, "
        "not environments of verifiers. Run the recipe with --engine prime-rl"
    )
