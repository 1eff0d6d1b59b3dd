"""Decide what a recipe's teachers and environments become in prime-rl."""

from collections import Counter
from collections.abc import Iterator, Mapping
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


class ExportedEnvironment(NamedTuple):
    """An environment of prime-rl: one of the recipe's, or the rows of one with the same teacher."""

    name: str  # in prime-rl
    source: DataConfig | EnvironmentConfig  # the recipe's [data] or [environments.NAME]
    ratio: float  # its share of the prompts, relative to the others
    mixture: Mapping[TeacherId, float]  # weights of its teachers, which add up to 1
    rows: str | None = None  # the teacher that its rows name, "" for none; None: all rows


@dataclass(frozen=True)
class ExportPlan:
    """A recipe, the version to export for, and its resolved teachers and environments."""

    recipe: Recipe
    version: Version
    student: str  # name or directory
    teachers: Mapping[TeacherId, Mapping[str, str]]  # url, model (served name), maybe api_key_var
    environments: list[ExportedEnvironment]  # to train on; without distillation no mixtures

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        version: Version,
        models: Mapping[str, Any],
        problems: ProblemSet | None = None,
    ) -> "ExportPlan":
        routing = Routing.of_recipe(recipe) if recipe.loss.compares_with_teacher else None
        return cls(
            recipe,
            version,
            model_name(recipe.student.model, models, "student"),
            {} if routing is None else teacher_servers(routing, models),
            split_environments(recipe.sources, routing, problems),
        )

    @property
    def evaluated(self) -> list[ExportedEnvironment]:
        """prime-rl's environments to evaluate: those whose answers have a reward."""
        return [
            ExportedEnvironment(name, source, source.ratio, {})
            for name, source in self.recipe.sources.items()
            if source.evaluates and (not isinstance(source, DataConfig) or source.scored)
        ]

    @property
    def configs(self) -> Iterator[tuple[str, TeacherConfig]]:
        """The name that each teacher is served by, and its table of the recipe."""
        tables = Routing.of_recipe(self.recipe).teachers
        return ((server["model"], tables[teacher]) for teacher, server in self.teachers.items())

    @property
    def prompts(self) -> dict[str, dict[str, Any]]:
        """Served name of each teacher with prompts of its own, its tokenizer, and the prompts."""
        return {
            name: {"tokenizer": name}
            | table.prompt.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            for name, table in self.configs
            if table.prompt is not None
        }

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name of each teacher with a tokenizer of its own, and the tokenizer's place."""
        return {name: name for name, table in self.configs if table.tokenizer == "own"}

    @property
    def renderer(self) -> dict[str, Any]:
        """prime-rl's renderer: that of the recipe, with the variables of the chat template."""
        data = next(iter(self.recipe.problem_sources.values()), None)
        args = {} if data is None else data.template_args or {}
        return {**self.recipe.rollout.renderer, **args}

    @property
    def teachers_mixed(self) -> bool:
        """Whether the adapter has to mix the teachers, whatever the loss reads."""
        return any(len(environment.mixture) > 1 for environment in self.environments)


def model_name(name: str | None, models: Mapping[str, Any], table: str) -> str:
    """Return the name of an existing model, or the directory of a prepared one."""
    return str(models[table]) if name is None else name


def unbuilt_models(recipe: Recipe, models: Mapping[str, Any]) -> list[str]:
    """Return the tables whose models have to be built before an export can name them."""
    named = {"student": recipe.student.model}
    if recipe.loss.compares_with_teacher:
        teachers = Routing.of_recipe(recipe).teachers
        named |= {teacher.table: config.model for teacher, config in teachers.items()}
    return [table for table, name in named.items() if name is None and table not in models]


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
) -> list[ExportedEnvironment]:
    """Return prime-rl's environments to train on.

    prime-rl assigns teachers to environments. So an environment whose rows name teachers becomes
    one environment per teacher.
    """
    sources = {name: source for name, source in sources.items() if source.trains}
    if routing is None:
        return [
            ExportedEnvironment(name, source, source.ratio, {}) for name, source in sources.items()
        ]
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
            environments.append(ExportedEnvironment(name, source, source.ratio, mixture))
            continue
        rows = [problem for problem in problems.practice if problem.environment == name]
        counts = Counter(problem.teacher or "" for problem in rows)
        mixtures = {problem.teacher or "": routing.of(problem) for problem in rows}
        environments += [
            ExportedEnvironment(
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
