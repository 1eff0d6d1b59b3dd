"""Run environments of verifiers in this process, with the run's own sampler.

verifiers has an environment's tasks, tools, turns and rewards. Its client for training renders the
messages to token ids, and asks ``token_endpoint`` for the ids of each turn. What trains is what the
endpoint was asked and what was sampled. No text is tokenized twice.

The environments live in the event loop of a thread of their own. Sampling stays in the caller's.
"""

import asyncio
import contextlib
import difflib
import functools
import json
import logging
import math
import queue
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from typing import Any

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import Rollout, Sampler, SamplingParams
from prime_composer.local.episodes import (
    EnvironmentFailed,
    Episode,
    Failure,
    finish_reason,
    interleave,
)
from prime_composer.local.tasks import Task
from prime_composer.local.token_endpoint import MODEL, Rounds, answer_round, serve
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.schema import Recipe, RecipeError

EXTRA = "pip install 'prime-composer[env]'"

MOST_TASKS = 100_000
"""Tasks that are read of an environment, which may have endlessly many."""

ROLLOUT_SECONDS = 600.0
"""Seconds that a rollout may take, where the recipe does not say it."""

CLOSING_SECONDS = 30.0
"""Seconds that tool servers may take to stop."""

PATIENCE = 60.0
"""Seconds that a round may take beyond what its rollouts are allowed, on a busy machine."""

STAGES = 4
"""Stages of a rollout that each may take its seconds: set-up, turns, clean-up, rewards."""


@dataclass(frozen=True, eq=False)
class Environment:
    """An environment by id, loaded, and not yet running.

    Attributes:
        config: its table in the recipe.
        env: the environment (``verifiers.v1.Env``).
        tasks: its tasks (``verifiers.v1.Task``).
        problems: the same tasks, as the engine knows them.
        has_tools: whether it offers tools.
    """

    config: EnvironmentConfig
    env: Any
    tasks: Sequence[Any]
    problems: Sequence[Task]
    has_tools: bool

    @property
    def seconds(self) -> float:
        """Most seconds of a stage of one rollout."""
        return self.config.timeout or ROLLOUT_SECONDS


def refuse_what_needs_problems(recipe: Recipe) -> None:
    """Refuse what the engine does with problems, and cannot do with an environment's rollouts.

    Raises:
        RecipeError: the message names the table and a remedy.
    """
    (name, *_) = recipe.environments_by_id
    policy = recipe.teacher is not None and recipe.teacher.policy is not None
    reasons = {
        "[teacher.policy]: its hints need the worked answers of problems": policy,
        "rollout.student_fraction below 1: only the student plays environments": (
            recipe.rollout.student_fraction < 1
        ),
        "the loss compares the answers of a group, and a rollout may be several samples": (
            recipe.loss.answer_pairs
            or recipe.loss.credit is not None
            or ("replay" in recipe.loss.needs and recipe.replay.source == "rollouts")
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RecipeError(
                f"[environments.{name}] has an id, and one machine cannot run it with this recipe: "
                f"{reason}"
            )


def open_environment(name: str, config: EnvironmentConfig, teaches: bool = False) -> Environment:
    """Load an environment by id and its tasks.

    Args:
        name: its name in the recipe.
        config: its table.
        teaches: small models learn from its tasks, which need a method ``solution``. It returns the
            messages after the prompt of a rollout that solves the task.

    Raises:
        RecipeError: it is not installed, of another API, cannot run in this process, or has no
            tasks or solutions. The message names the table and the remedy.
    """
    where = f"[environments.{name}] id = {config.id!r}"
    if config.api == "v0":
        raise RecipeError(
            f"{where}: api = 'v0', and one machine runs environments of verifiers' v1 API; run the "
            "recipe with --engine prime-rl (v0.6 to v0.8)"
        )
    if find_spec("verifiers") is None:
        raise RecipeError(f"{where} needs the library verifiers: {EXTRA}")
    import_transformers()  # verifiers would import it beside a torchvision that breaks it
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise RecipeError(
            f"{where} needs verifiers' v1 API, and this one cannot be imported ({error}): {EXTRA}"
        ) from error
    _quiet_logs()
    needs_container = _taskset_class(config, where).task_type().NEEDS_CONTAINER
    try:
        env = vf.load_environment(_env_config(vf, config, where))
        tasks = list(islice(env.taskset, MOST_TASKS))
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{where} cannot be opened: {describe(error)}") from error
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
    problems = [
        Task(
            task.data.prompt_text,
            "",
            name,
            transcript=_transcript(task, where) if teaches else None,
            index=index,
            messages=json.dumps(_first_messages(task.data)),
        )
        for index, task in enumerate(tasks)
    ]
    return Environment(config, env, tasks, problems, has_tools)


def _taskset_class(config: EnvironmentConfig, where: str) -> Any:
    from verifiers.v1.utils.loaders import taskset_class

    try:
        return taskset_class(config.id)
    except ModuleNotFoundError as error:
        module = _module_name(config.id)
        if find_spec(module) is not None:
            raise RecipeError(f"{where} cannot be imported: {describe(error)}") from error
        near = difflib.get_close_matches(module, _installed_environments(), n=3)
        nearest = f" The nearest installed: {', '.join(near)}." if near else ""
        owner, _, package = config.id.partition("@")[0].rpartition("/")
        install = f"prime env install {owner}/{package}" if owner else f"pip install {package}"
        raise RecipeError(f"{where} is not installed.{nearest} Install it: {install}") from error
    except (AttributeError, TypeError, ValueError) as error:
        if hasattr(sys.modules.get(_module_name(config.id)), "load_environment"):
            raise RecipeError(
                f"{where} is an environment of verifiers' v0 API, and one machine runs those of "
                "v1; run the recipe with --engine prime-rl (v0.6 to v0.8)"
            ) from error
        raise RecipeError(f"{where}: {error}") from error
    except Exception as error:
        raise RecipeError(f"{where} cannot be imported: {describe(error)}") from error


def _module_name(environment_id: str) -> str:
    """Return the module that verifiers imports for an id."""
    return environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def _installed_environments() -> list[str]:
    """Return the installed packages that need verifiers, as the names of their modules."""
    names = {
        distribution.metadata["Name"].replace("-", "_").lower()
        for distribution in metadata.distributions()
        if any((line or "").startswith("verifiers") for line in distribution.requires or ())
    }
    return sorted(names - {"prime_composer"})


def _env_config(vf: Any, config: EnvironmentConfig, where: str) -> Any:
    """Return verifiers' config of the environment, with a harness that runs in this process."""
    from pydantic import ValidationError

    from prime_composer.local import chat_harness

    # verifiers finds a harness by the name of a module.
    sys.modules[chat_harness.ID] = chat_harness
    taskset = {**config.args, "id": config.id}
    try:
        plain = vf.resolve_env_config({"taskset": taskset})
    except ValidationError as error:
        (first, *_) = error.errors()
        keys = ".".join(str(part) for part in first["loc"] if part != "taskset")
        raise RecipeError(f"{where}: args.{keys}: {first['msg']}") from error
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
    """Return the harness that plays an environment.

    The plain chat loop plays those that bring none, or verifiers' ``null``, which is one.
    """
    from verifiers.v1.utils.loaders import builtin_harness_ids, harness_class

    from prime_composer.local import chat_harness

    if chosen == "null" or (chosen == "bash" and plain.agent.harness is None):
        return chat_harness.ID
    if chosen in builtin_harness_ids():
        raise RecipeError(
            f"{where} is played by verifiers' harness {chosen!r}, which needs uv and a network to "
            "install its program. One machine runs harnesses in this process. Run the recipe with "
            "--engine prime-rl"
        )
    if harness_class(chosen).NEEDS_CONTAINER:
        raise RecipeError(
            f"{where} is played by the harness {chosen!r}, which needs a container. One machine "
            "runs harnesses in this process. Run the recipe with --engine prime-rl"
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
        remote = server.config.url is not None or server.config.runtime.type != "subprocess"
        if remote:
            raise RecipeError(
                f"{where}: its tools {server.server_name!r} are not on this machine "
                f"({server.config.url or server.config.runtime.type}); run the recipe with "
                "--engine prime-rl"
            )
    return bool(servers)


def _first_messages(data: Any) -> list[dict[str, Any]]:
    from verifiers.v1.dialects.chat import message_to_wire

    messages = []
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return [*messages, *map(message_to_wire, data.prompt)]


def _transcript(task: Any, where: str) -> str:
    """Return the messages of a rollout that solves a task, as JSON."""
    solution = getattr(task, "solution", None)
    if solution is None:
        raise RecipeError(
            f"{where}: [*.prepare] builds a model from worked answers, and its tasks have no "
            "method `solution`: name an existing model, or other environments in "
            "prepare.environments"
        )
    try:
        return json.dumps([*_first_messages(task.data), *solution()])
    except Exception as error:
        raise RecipeError(f"{where}: its `solution` fails: {describe(error)}") from error


def _quiet_logs() -> None:
    """Keep the libraries' log lines off the screen: failures are counted and named here."""
    for library in ("verifiers", "renderers", "aiohttp", "httpx", "mcp"):
        logging.getLogger(library).addHandler(logging.NullHandler())


def describe(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


class Environments:
    """The running environments of a recipe.

    Args:
        environments: by name.
        model: directory or hub id of the student's tokenizer.
        renderer: ``[rollout] renderer``, the settings of ``renderers.RendererConfig``. Empty: the
            library chooses by the tokenizer's name.
        status: shown warnings.

    Attributes:
        room: most tokens of a conversation that all models of the run can read. None: the sampler's
            own limit alone holds.

    Raises:
        RecipeError: the tokenizer cannot render an environment's messages, or a tool server does
            not start.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        model: str,
        renderer: Mapping[str, Any],
        status: Callable[[str], None],
    ):
        self._environments = environments
        self._status = status
        self.room: int | None = None
        self._asking: dict[str, tuple[Rounds, int]] = {}
        self._check_rendering(model, renderer)
        self._loop = event_loop()
        self._stopping = self._on_loop(_make_event())
        ready: asyncio.Future[str] = self._on_loop(_make_future())
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(ready), self._loop)
        try:
            url = self._on_loop(_result(ready))
        except BaseException:
            self.close()
            raise
        self._client = self._client_config(url, model, renderer)

    def run(
        self, sampler: Sampler, tasks: Sequence[Task], params: SamplingParams, seed: int
    ) -> list[Episode | Failure]:
        """Play each task once, and return the episodes in order.

        Args:
            sampler: samples the turns.
            tasks: what is played, side by side.
            params: how to sample a turn; ``n`` is 1.
            seed: the same seed and weights give the same rollouts.

        Raises:
            EnvironmentFailed: an environment neither asks nor ends, and cannot be interrupted.
        """
        draws = random.Random(seed)
        rooms = [room for room in (self.room, sampler.limits.max_model_len) if room is not None]
        limits = replace(sampler.limits, max_model_len=min(rooms, default=None))
        rounds = Rounds(len(tasks), limits)
        playing = asyncio.run_coroutine_threadsafe(self._play(rounds, tasks, params), self._loop)
        playing.add_done_callback(lambda _: rounds.full.put(None))
        patience = PATIENCE + STAGES * max(
            self._environments[task.environment].seconds for task in tasks
        )
        try:
            while (questions := self._next_round(rounds.full, patience)) is not None:
                seeds = [draws.getrandbits(31) for _ in questions]
                turns = answer_round(questions, sampler, seeds)
                self._on_loop(_deliver([question.answer for question in questions], turns))
        except BaseException:
            playing.cancel()
            raise
        outcomes = playing.result()
        self._name_failures(tasks, outcomes)
        return outcomes

    def close(self) -> None:
        """Stop endpoint and tool servers. Closing twice is harmless."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        with contextlib.suppress(Exception):
            self._serving.result(timeout=CLOSING_SECONDS)

    def _name_failures(self, tasks: Sequence[Task], outcomes: Sequence[Episode | Failure]) -> None:
        failures = [
            f"[environments.{task.environment}] task {task.index}: {outcome.reason}"
            for task, outcome in zip(tasks, outcomes, strict=True)
            if isinstance(outcome, Failure)
        ]
        if failures:
            self._status(
                f"warning: {len(failures)} of {len(tasks)} rollouts failed and are left out; the "
                f"first: {failures[0]}"
            )

    def _next_round(self, full: "queue.SimpleQueue[Any]", patience: float) -> Any:
        try:
            return full.get(timeout=patience)
        except queue.Empty:
            raise EnvironmentFailed(
                f"the environments {', '.join(self._environments)} have neither asked for a turn "
                f"nor ended for {patience:.0f} s, and do not react to their time limits: code of "
                "one of them blocks. Repair it, or leave it out"
            ) from None

    async def _play(
        self, rounds: Rounds, tasks: Sequence[Task], params: SamplingParams
    ) -> list[Episode | Failure]:
        return await asyncio.gather(
            *(self._episode(rounds, place, task, params) for place, task in enumerate(tasks))
        )

    async def _episode(
        self, rounds: Rounds, place: int, task: Task, params: SamplingParams
    ) -> Episode | Failure:
        import verifiers.v1 as vf

        environment = self._environments[task.environment]
        sampling = vf.SamplingConfig(
            temperature=params.temperature, top_p=params.top_p, max_tokens=params.max_tokens
        )
        context = vf.ModelContext(model=MODEL, client=self._client, sampling=sampling)
        traces: list[str] = []

        def follow(trace: Any) -> None:
            traces.append(trace.id)
            self._asking[trace.id] = rounds, place

        try:
            episode = await environment.env.run_episode(
                environment.tasks[task.index], context, on_trace=follow
            )
        except Exception as error:  # verifiers catches what environments raise
            return Failure(describe(error))
        finally:
            for trace in traces:
                del self._asking[trace]
            rounds.leave(place)
        return outcome(episode, rounds.turns[place], place)

    async def _serve(self, ready: "asyncio.Future[str]") -> None:
        """Hold the servers of endpoint and environments until ``close``."""
        from verifiers.v1.clients.client import SESSION_ID_HEADER

        try:
            async with contextlib.AsyncExitStack() as stack:
                runner, url = await serve(self._asking, SESSION_ID_HEADER)
                stack.push_async_callback(runner.cleanup)
                for name, environment in self._environments.items():
                    try:
                        await stack.enter_async_context(environment.env.serving())
                    except Exception as error:
                        raise RecipeError(
                            f"[environments.{name}]: its servers do not start: {describe(error)}"
                        ) from error
                ready.set_result(url)
                await self._stopping.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def _check_rendering(self, model: str, renderer: Mapping[str, Any]) -> None:
        """Refuse a tokenizer that cannot render the messages; warn where turns do not survive."""
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        try:
            tokenizer = load_tokenizer(model)
            config = self._client_config("http://127.0.0.1", model, renderer).renderer
            made = create_renderer(tokenizer, config)
        except Exception as error:
            raise RecipeError(f"[rollout] renderer: {describe(error)}") from error
        for name, environment in self._environments.items():
            where = f"[environments.{name}] id = {environment.config.id!r}"
            if environment.has_tools and not getattr(made, "supports_tools", True):
                raise RecipeError(
                    f"{where} has tools, and the renderer of {model} reads no tool calls: name one "
                    "in [rollout] renderer, for example { name = 'qwen3' }, or { name = 'default', "
                    "tool_parser = 'qwen3' } for a chat template with <tool_call>"
                )
            messages = json.loads(environment.problems[0].messages)
            try:
                broken = environment.config.max_turns != 1 and breaks_at(made, tokenizer, messages)
            except Exception as error:
                raise RecipeError(
                    f"{where}: the chat template of {model} cannot render its messages: "
                    f"{describe(error)}"
                ) from error
            if broken:
                self._status(
                    f"warning: {where}: the chat template does not keep an answer such as "
                    f"{broken!r} token for token. After such a turn the conversation goes on in a "
                    "sample of its own (rollout/samples counts them)"
                )

    def _client_config(self, url: str, model: str, renderer: Mapping[str, Any]) -> Any:
        import verifiers.v1 as vf

        return vf.TrainClientConfig.model_validate(
            {
                "base_url": url,
                # Any name but the default, which would read a configuration of the Prime CLI.
                "api_key_var": "PRIME_COMPOSER_NO_API_KEY",
                "renderer": dict(renderer) or None,
                "renderer_model_name": model,
            }
        )

    def _on_loop(self, coroutine: Any) -> Any:
        """Run a coroutine in the loop's thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def outcome(episode: Any, turns: Sequence[Rollout], place: int) -> Episode | Failure:
    """Return what an episode of verifiers gives to train on.

    Args:
        episode: of ``verifiers.v1``.
        turns: what the student sampled in it, in order.
        place: index of the episode.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        last = errors[-1] if errors else None
        return Failure(f"{last.type}: {last.message}" if last else "it gave no rollout")
    (trace, *_) = episode.traces
    if getattr(trace, "is_timeout", False):  # an error before verifiers 0.4
        return Failure(f"it ran into its time limit ({trace.stop_condition})")
    if not turns:
        return Failure("it ended without an answer of the student")
    if any(reward is None for reward in trace.rewards.values()):
        return Failure("its rewards were not computed")
    reward = float(trace.reward)
    if not math.isfinite(reward):
        return Failure(f"its reward is {reward}")
    reason = finish_reason(turns)
    calls = [message.tool_calls or () for message in trace.assistant_messages]
    return Episode(
        [replace(one, finish_reason=reason) for one in interleave(turns, place)],
        reward,
        trace.last_reply,
        len(turns),
        sum(map(len, calls)),
        trace.stop_condition == "max_turns",
    )


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's environments, which runs in a thread of its own.

    There is one, because locks of the library ``renderers`` belong to the loop that first used
    them.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


ANSWERS = ("7", " 7", "7 \n")
"""Answers with which the chat template is tried. The student may write any of them."""


def breaks_at(renderer: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return an answer after which the next turn's prompt does not begin with this turn's tokens.

    Args:
        renderer: of the tokenizer.
        tokenizer: the student's.
        messages: the first of a conversation.

    Returns:
        The answer, or None where all of ``ANSWERS`` survive.
    """
    prompt = list(renderer.render(list(messages), add_generation_prompt=True).token_ids)
    (stop, *_) = renderer.get_stop_token_ids()
    user = {"role": "user", "content": "8"}
    for text in ANSWERS:
        answer = [*tokenizer.encode(text, add_special_tokens=False), stop]
        bridged = renderer.bridge_to_next_turn(prompt, answer, [user])
        if bridged is None:
            said = {"role": "assistant", "content": renderer.parse_response(answer).content}
            bridged = renderer.render([*messages, said, user], add_generation_prompt=True)
        if list(bridged.token_ids)[: len(prompt) + len(answer)] != [*prompt, *answer]:
            return text
    return None


async def _make_event() -> asyncio.Event:
    return asyncio.Event()


async def _make_future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def _result(future: "asyncio.Future[Any]") -> Any:
    return await future


async def _deliver(answers: "Sequence[asyncio.Future[Any]]", turns: Sequence[Any]) -> None:
    for answer, turn in zip(answers, turns, strict=True):
        if not answer.done():  # its rollout may have run into its time limit meanwhile
            answer.set_result(turn)
