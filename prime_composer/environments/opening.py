"""Load environments of verifiers by their ids, and refuse those that cannot run in this process."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

from prime_composer.backends.hf_model import import_transformers
from prime_composer.environments.tasks import Task
from prime_composer.extras import pip_install
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe, RecipeError

MOST_TASKS = 100_000  # Tasks that are read of an environment, which may have endlessly many

ROLLOUT_SECONDS = 600.0  # Seconds that a rollout may take, where the recipe does not say it


@dataclass(frozen=True, eq=False)
class LoadedEnvironment:
    """An environment by id, loaded, and not yet running."""

    config: EnvironmentConfig  # its table in the recipe
    env: Any  # ``verifiers.v1.Env``
    tasks: Sequence[Any]  # ``verifiers.v1.Task``
    problems: Sequence[Task]  # the same tasks, as the engine knows them
    has_tools: bool  # whether it offers tools

    @property
    def seconds(self) -> float:
        """Most seconds of a stage of one rollout."""
        return self.config.timeout or ROLLOUT_SECONDS


def refuse_what_needs_problems(recipe: Recipe) -> None:
    """Refuse what the engine does with problems, and cannot do with an environment's rollouts."""
    teachers = Routing.of_recipe(recipe).teachers.values()
    reasons = {
        "[teacher.policy]: its hints need the worked answers of problems": (
            recipe.policy_teacher is not None
        ),
        "rollout.student_fraction below 1: only the student plays environments": (
            recipe.rollout.student_fraction < 1
        ),
        'tokenizer = "own" of a teacher: messages are rendered for the student; run the recipe '
        "with --engine prime-rl": any(teacher.tokenizer == "own" for teacher in teachers),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RecipeError(
                f"[environments.{next(iter(recipe.environments_by_id))}] has an id, and one "
                f"machine cannot run it with this recipe: {reason}"
            )


def open_environment(
    name: str, config: EnvironmentConfig, teaches: bool = False
) -> LoadedEnvironment:
    """Load an environment by id and its tasks.

    With ``teaches``, small models learn from its tasks, which need a method ``solution``. It
    returns the messages after the prompt of a rollout that solves the task.
    """
    where = f"[environments.{name}] id = {config.id!r}"
    import_transformers()  # verifiers would import it beside a torchvision that breaks it
    with as_recipe_error(
        f"{where} needs the library verifiers with its v1 API: {pip_install('env')}"
    ):
        import verifiers.v1 as vf

        from prime_composer.environments.chat_harness import first_messages
    for library in ("verifiers", "renderers", "aiohttp", "httpx", "mcp"):
        # Off the screen: failures are counted and named here.
        logging.getLogger(library).addHandler(logging.NullHandler())
    needs_container = _taskset_class(config, where).task_type().NEEDS_CONTAINER
    with as_recipe_error(f"{where} cannot be opened"):
        env = vf.load_environment(_env_config(vf, config, where))
        tasks = list(islice(env.taskset, MOST_TASKS))
    if not tasks:
        raise RecipeError(f"{where} has no tasks; look at its args")
    has_tools = _check_servers(env, where)
    for task in tasks:
        if needs_container or task.data.image is not None:
            raise RecipeError(f"{where}: its tasks need a container, which one machine has not")
        if task.data.prompt is None:
            raise RecipeError(
                f"{where}: task {task.data.idx} has no prompt. A simulated user begins it, which "
                "one machine has not"
            )
    problems = []
    for index, task in enumerate(tasks):
        first = first_messages(task.data.system_prompt, task.data.prompt)
        problems.append(
            Task(
                task.data.prompt_text,
                "",
                name,
                transcript=_transcript(first, task, where) if teaches else None,
                index=index,
                messages=json.dumps(first),
            )
        )
    return LoadedEnvironment(config, env, tasks, problems, has_tools)


@contextmanager
def as_recipe_error(where: str) -> Iterator[None]:
    """Within the block, what a library or an environment raises is an error of the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{where}: {error_line(error)}") from error


def _taskset_class(config: EnvironmentConfig, where: str) -> Any:
    from verifiers.v1.utils.loaders import taskset_class

    with as_recipe_error(f"{where} cannot be loaded as an environment of verifiers' v1 API"):
        try:
            return taskset_class(config.id)
        except ModuleNotFoundError:
            module = config.id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
            if find_spec(module) is not None:  # what it imports itself is missing
                raise
    owner, _, package = config.id.partition("@")[0].rpartition("/")
    install = f"prime env install {owner}/{package}" if owner else f"pip install {package}"
    raise RecipeError(f"{where} is not installed. Install it: {install}")


def _env_config(vf: Any, config: EnvironmentConfig, where: str) -> Any:
    """Return verifiers' config of the environment, with a harness that runs in this process."""
    from prime_composer.environments import chat_harness

    # verifiers finds a harness by the name of a module.
    sys.modules[chat_harness.ID] = chat_harness
    taskset = {**config.args, "id": config.id}
    with as_recipe_error(f"{where}, args"):
        plain = vf.resolve_env_config({"taskset": taskset})
    harnesses = plain.agent_harnesses()
    if list(harnesses) != ["agent"]:
        raise RecipeError(
            f"{where} has several agents ({', '.join(harnesses)}), and one machine runs "
            "environments of one"
        )
    seconds = config.timeout or ROLLOUT_SECONDS
    agent = {
        "harness": {"id": _harness_id(plain, harnesses["agent"].id, where)},
        "runtime": {"type": "subprocess"},
        "timeout": dict.fromkeys(("setup", "rollout", "finalize", "scoring"), seconds),
    }
    if config.max_turns is not None:
        agent["max_turns"] = config.max_turns
    return vf.resolve_env_config({"taskset": taskset, "agent": agent})


def _harness_id(plain: Any, chosen: str, where: str) -> str:
    """Return the harness that plays an environment."""
    from verifiers.v1.utils.loaders import builtin_harness_ids, harness_class

    from prime_composer.environments import chat_harness

    if chosen == "null" or (chosen == "bash" and plain.agent.harness is None):
        return chat_harness.ID
    installs = chosen in builtin_harness_ids()
    if installs or harness_class(chosen).NEEDS_CONTAINER:
        needed = "uv and a network to install its program" if installs else "a container"
        raise RecipeError(
            f"{where} is played by the harness {chosen!r}, which needs {needed}. One machine runs "
            "harnesses in this process. Run the recipe with --engine prime-rl"
        )
    return chosen


def _check_servers(env: Any, where: str) -> bool:
    """Return whether an environment has tools. Refuse those that are not on this machine."""
    taskset = env.taskset
    servers = [
        *taskset.toolsets(taskset.config),
        *type(taskset).task_type().toolsets(taskset.config.task),
    ]
    for server in servers:
        if server.config.url is not None or server.config.runtime.type != "subprocess":
            raise RecipeError(
                f"{where}: its tools {server.server_name!r} are not on this machine "
                f"({server.config.url or server.config.runtime.type}); run the recipe with "
                "--engine prime-rl"
            )
    return bool(servers)


def _transcript(first: list[Any], task: Any, where: str) -> str:
    solution = getattr(task, "solution", None)
    if solution is None:
        raise RecipeError(
            f"{where}: [*.prepare] builds a model from worked answers, and its tasks have no "
            "method `solution`: name an existing model, or other environments in "
            "prepare.environments"
        )
    with as_recipe_error(f"{where}: its `solution` fails"):
        return json.dumps([*first, *solution()])


def error_line(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
