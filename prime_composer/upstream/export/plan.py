"""Decide what a recipe's teachers and environments become in prime-rl."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import ProblemSet, load_problem_set
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import Recipe, RecipeError, RolloutConfig, TeacherConfig
from prime_composer.upstream.versions.records import Version
from prime_composer.upstream.versions.toml_shapes import API_KEY_VAR

FIRST_TEACHER_PORT = 8001


class Environment(NamedTuple):
    """An environment of prime-rl.

    It is one of the recipe's, or the rows of one that name the same teacher.

    Attributes:
        name: its name in prime-rl.
        source: the recipe's [data] or [environments.NAME].
        ratio: its share of the prompts, relative to the others.
        mixture: weights of the teachers that score its rollouts; they add up to 1.
        rows: the teacher that its rows name, "" for rows that name none. None for all rows.
    """

    name: str
    source: DataConfig | EnvironmentConfig
    ratio: float
    mixture: Mapping[TeacherId, float]
    rows: str | None = None


@dataclass(frozen=True)
class Plan:
    """A recipe, the version to export for, and its resolved teachers and environments.

    Attributes:
        recipe: the recipe.
        version: the version of prime-rl.
        student: name or directory of the student.
        teachers: served name, URL and maybe ``api_key_var`` of each teacher.
        environments: prime-rl's environments to train on. Without distillation their mixtures are
            empty.
    """

    recipe: Recipe
    version: Version
    student: str
    teachers: Mapping[TeacherId, Mapping[str, str]]
    environments: list[Environment]

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        version: Version,
        models: Mapping[str, Any],
        problems: ProblemSet | None = None,
    ) -> "Plan":
        """Resolve a recipe."""
        routing = Routing.of_recipe(recipe)
        distils = recipe.loss.compares_with_teacher
        named = {"student": recipe.student.model}
        if distils:
            named |= {id_.table: teacher.model for id_, teacher in routing.teachers.items()}
        refuse_unbuilt(
            [table for table, name in named.items() if name is None and table not in models]
        )
        return cls(
            recipe,
            version,
            model_name(recipe.student.model, models, "student"),
            teacher_servers(routing, models) if distils else {},
            split_environments(recipe.sources, routing if distils else None, problems),
        )

    @property
    def evaluated(self) -> list[Environment]:
        """prime-rl's environments to evaluate: those whose answers have a reward."""
        return [
            Environment(name, source, source.ratio, {})
            for name, source in self.recipe.sources.items()
            if source.evaluates and (not isinstance(source, DataConfig) or source.scored)
        ]

    @property
    def prompts(self) -> dict[str, dict[str, Any]]:
        """Served name of each teacher with prompts of its own, its tokenizer, and the prompts."""
        configs, prompts = Routing.of_recipe(self.recipe).teachers, {}
        for teacher, server in self.teachers.items():
            if (asks := configs[teacher].prompt) is not None:
                own = asks.model_dump(mode="json", exclude_unset=True, exclude_none=True)
                prompts[server["model"]] = {"tokenizer": server["model"], **own}
        return prompts

    @property
    def renderer(self) -> dict[str, Any]:
        """prime-rl's renderer: that of the recipe, with the variables of the chat template."""
        data = next(iter(self.recipe.problem_sources.values()), None)
        args = {} if data is None else data.template_args or {}
        return {**self.recipe.rollout.renderer, **args}

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name of each teacher with a tokenizer of its own, and the tokenizer's place."""
        configs = Routing.of_recipe(self.recipe).teachers
        return {
            server["model"]: server["model"]
            for teacher, server in self.teachers.items()
            if configs[teacher].tokenizer == "own"
        }

    @property
    def teachers_mixed(self) -> bool:
        """Whether the adapter has to mix the teachers, whatever the loss reads."""
        return any(len(environment.mixture) > 1 for environment in self.environments)


def model_name(name: str | None, models: Mapping[str, Any], table: str) -> str:
    """Return the name of an existing model, or the directory of a prepared one."""
    return str(models[table]) if name is None else name


def refuse_unbuilt(tables: Sequence[str]) -> None:
    """Refuse to export a recipe with models that have not been built, at the given tables."""
    if tables:
        raise RecipeError(
            f"{', '.join(f'[{table}.prepare]' for table in tables)}: builds models first. Run "
            "`prime-composer prepare --config FILE`, then export again, or name existing models: "
            f"{' '.join(f'--set {table}.model=DIR' for table in tables)}"
        )


def v1_url(url: str) -> str:
    """Return the OpenAI base URL of a server, which prime-rl's clients expect."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def api_key(server: TeacherConfig | RolloutConfig) -> dict[str, str]:
    """Return ``api_key_var`` of a server, unless it is prime-rl's default."""
    return {} if server.api_key_var == API_KEY_VAR else {"api_key_var": server.api_key_var}


def teacher_servers(routing: Routing, models: Mapping[str, Any]) -> dict[TeacherId, dict[str, str]]:
    """Return served name, URL and maybe ``api_key_var`` of each teacher.

    A teacher without a URL is expected on this host, at port 8001 and up in the recipe's order.
    """
    servers = {}
    for port, (teacher_id, teacher) in enumerate(routing.teachers.items(), FIRST_TEACHER_PORT):
        url = v1_url(teacher.url or f"http://localhost:{port}")
        name = model_name(teacher.model, models, teacher_id.table)
        servers[teacher_id] = {"url": url, "model": name} | api_key(teacher)
    return servers


def split_environments(
    sources: Mapping[str, DataConfig | EnvironmentConfig],
    routing: Routing | None,
    problems: ProblemSet | None,
) -> list[Environment]:
    """Return prime-rl's environments to train on.

    prime-rl assigns teachers to environments. So an environment whose rows name teachers becomes
    one environment per teacher.
    """
    sources = {name: source for name, source in sources.items() if source.trains}
    if routing is None:
        return [Environment(name, source, source.ratio, {}) for name, source in sources.items()]
    by_row = {
        name: source
        for name, source in sources.items()
        if isinstance(source, DataConfig) and source.teacher_key is not None
    }
    if by_row and problems is None:
        problems = load_problem_set(by_row)
    environments = []
    for name, source in sources.items():
        if name not in by_row or problems is None:
            mixture = routing.of_environment(name)
            environments.append(Environment(name, source, source.ratio, mixture))
            continue
        rows = [problem for problem in problems.practice if problem.environment == name]
        counts = Counter(problem.teacher or "" for problem in rows)
        mixtures = {problem.teacher or "": routing.of(problem) for problem in rows}
        environments += [
            Environment(
                f"{name}-{teacher or 'others'}",
                source,
                source.ratio * counts[teacher] / len(rows),
                mixtures[teacher],
                teacher,
            )
            for teacher in sorted(counts)
        ]
    for name, count in Counter(environment.name for environment in environments).items():
        if count > 1:
            raise RecipeError(
                f"{count} environments of prime-rl's would be called {name!r}: where rows name "
                "their teachers each gets one, ENVIRONMENT-TEACHER, and rows without a teacher "
                "ENVIRONMENT-others. Rename [environments] or [teachers]."
            )
    return environments
