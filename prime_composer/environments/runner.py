"""Run environments of verifiers in this process, with the run's own sampler.

verifiers' client for training renders the messages to token ids, and asks ``token_endpoint`` for
the ids of each turn. What trains is what the endpoint was asked and what was sampled. No text is
tokenized twice. The environments live in the event loop of a thread of their own.
"""

import asyncio
import contextlib
import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from prime_composer.backends.errors import check_wanted
from prime_composer.backends.protocols import Sampler, SamplingParams
from prime_composer.environments.episodes import EnvironmentFailed, Episode, Failure, outcome
from prime_composer.environments.opening import LoadedEnvironment, as_recipe_error, error_line
from prime_composer.environments.tasks import Task
from prime_composer.environments.token_endpoint import (
    MODEL,
    Rounds,
    answer_round,
    deliver,
    serve_turns,
)
from prime_composer.recipe.schema import RecipeError

CLOSING_SECONDS = 30.0  # Seconds that tool servers may take to stop

PATIENCE = 60.0  # Seconds that a round may take beyond its rollouts' own, if busy

TICK = 0.25  # Seconds between two looks at whether the rollouts are still wanted

STAGES = 4  # Stages of a rollout that each may take its seconds: set-up, turns, clean-up, rewards


def absolute_python_path() -> None:
    """Make the entries of PYTHONPATH absolute, for processes that start in other folders.

    verifiers starts each tool server in a folder of its own.
    """
    entries = os.environ.get("PYTHONPATH")
    if entries:
        whole = [os.path.abspath(entry) for entry in entries.split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(whole)


class Environments:
    """The running environments of a recipe, by name.

    ``renderer`` has the settings of ``renderers.RendererConfig``. Empty: the library chooses by the
    tokenizer's name. ``room`` are the most tokens of a conversation that all models of the run can
    read. None: the sampler's own limit alone holds. ``reads_messages``: whether a teacher reads the
    messages before each turn, which are many.
    """

    def __init__(
        self,
        environments: Mapping[str, LoadedEnvironment],
        model: str,
        renderer: Mapping[str, Any],
        status: Callable[[str], None],
    ):
        absolute_python_path()
        self._environments = environments
        self._status = status
        self.room: int | None = None
        self.reads_messages = False
        self._asking: dict[str, tuple[Rounds, int]] = {}
        check_tool_calls(environments, model, renderer)
        self._loop = event_loop()
        self._stopping = asyncio.Event()
        url: Future[str] = Future()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(url), self._loop)
        try:
            self._client = client_config(url.result(), model, renderer)
        except BaseException:
            self.close()
            raise

    def run(
        self, sampler: Sampler, tasks: Sequence[Task], params: SamplingParams, seed: int
    ) -> list[Episode | Failure]:
        """Play each task once, side by side, and return the episodes in order.

        The same seed and weights give the same rollouts. ``EnvironmentFailed`` is raised where an
        environment neither asks nor ends, and cannot be interrupted.
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
                self._loop.call_soon_threadsafe(deliver, questions, turns)
        except BaseException:
            playing.cancel()
            raise
        outcomes = playing.result()
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
        return outcomes

    def close(self) -> None:
        """Stop endpoint and tool servers. Closing twice is harmless."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        with contextlib.suppress(Exception):
            self._serving.result(timeout=CLOSING_SECONDS)

    def _next_round(self, full: "queue.SimpleQueue[Any]", patience: float) -> Any:
        end = time.monotonic() + patience
        while (left := end - time.monotonic()) > 0:
            check_wanted()
            with contextlib.suppress(queue.Empty):
                return full.get(timeout=min(left, TICK))
        raise EnvironmentFailed(
            f"the environments {', '.join(self._environments)} have neither asked for a turn nor "
            f"ended for {patience:.0f} s, and do not react to their time limits: code of one of "
            "them blocks. Repair it, or leave it out"
        )

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
            return Failure(error_line(error))
        finally:
            for trace in traces:
                del self._asking[trace]
            rounds.leave(place)
        return outcome(episode, rounds.turns[place], place, self.reads_messages)

    async def _serve(self, url: Future[str]) -> None:
        """Hold the servers of endpoint and environments until ``close``."""
        from verifiers.v1.clients.client import SESSION_ID_HEADER

        try:
            async with contextlib.AsyncExitStack() as stack:
                runner, address = await serve_turns(self._asking, SESSION_ID_HEADER)
                stack.push_async_callback(runner.cleanup)
                for name, environment in self._environments.items():
                    with as_recipe_error(f"[environments.{name}]: its servers do not start"):
                        await stack.enter_async_context(environment.env.serving())
                url.set_result(address)
                await self._stopping.wait()
        except Exception as error:
            if not url.done():
                url.set_exception(error)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's environments, which runs in a thread of its own.

    There is one, because locks of the library ``renderers`` belong to the loop that used them
    first.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def check_tool_calls(
    environments: Mapping[str, LoadedEnvironment], model: str, renderer: Mapping[str, Any]
) -> None:
    """Refuse a renderer that would read no tool call of the student, where there are tools."""
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    with as_recipe_error("[rollout] renderer"):
        config = client_config("http://127.0.0.1", model, renderer).renderer
        made = create_renderer(load_tokenizer(model), config)
    for name, environment in environments.items():
        if environment.has_tools and not getattr(made, "supports_tools", True):
            raise RecipeError(
                f"[environments.{name}] id = {environment.config.id!r} has tools, and the renderer "
                f"of {model} reads no tool calls: name one in [rollout] renderer, for example "
                "{ name = 'qwen3' }, or { name = 'default', tool_parser = 'qwen3' } for a chat "
                "template with <tool_call>"
            )


def client_config(url: str, model: str, renderer: Mapping[str, Any]) -> Any:
    """Return how verifiers' client for training asks the endpoint at a URL."""
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
