"""Two more hints of prime-rl's self-distillation: another rollout's answer, and a verdict."""

import asyncio
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from prime_composer.problems.answers import verdict
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.upstream.versions.toml_shapes import HINT_KEYS

SIBLING, FEEDBACK = HINT_KEYS["sibling"], HINT_KEYS["feedback"]


def with_two_hints(score: Any) -> Any:
    """Let ``opsd`` give two more hints: another rollout of the group, and the verifier's verdict.

    They are written to ``info`` of the rollout, where upstream reads its hint: 559b4477
    orchestrator/algo/opsd.py:57. Siblings are known once the group is complete, so that its
    rollouts are scored then (``with_siblings``). A rollout without a hint is not trained.
    TODO(prime-rl): remove once opsd has hints of the group and of the verifier.
    """

    @functools.wraps(score)
    async def score_one(self: Any, episode: Any, *args: Any, **more: Any) -> None:
        if self.demo_key == SIBLING:
            return
        if self.demo_key == FEEDBACK:
            for trace in traces_of([episode]):
                trace.info[FEEDBACK] = _feedback(trace)
        await score(self, episode, *args, **more)

    return score_one


def with_siblings(score: Any, score_group: Any) -> Any:
    @functools.wraps(score_group)
    async def score_all(self: Any, episodes: Any, *args: Any, **more: Any) -> None:
        if self.demo_key == SIBLING:
            _write_siblings(traces_of(episodes))
            hinted = filter(None, map(_hinted, episodes))
            await asyncio.gather(*(score(self, episode) for episode in hinted))
        await score_group(self, episodes, *args, **more)

    return score_all


def traces_of(episodes: Sequence[Any]) -> list[Any]:
    """Return the rollouts of episodes that train."""
    base = importlib.import_module("prime_rl.orchestrator.algo.base")
    return [trace for _, trace in base.iter_trainable_traces(episodes)]


def _write_siblings(traces: Sequence[Any]) -> None:
    """Write the first other right answer of the group into each rollout, None if there is none."""
    for trace in traces:
        replies = (
            other.last_reply.strip() for other in traces if other is not trace and other.reward > 0
        )
        trace.info[SIBLING] = next(replies, None)


def _hinted(episode: Any) -> Any:
    """Return the part of an episode that has hints. None: nothing has."""
    traces = [trace for trace in episode.traces if trace.info.get(SIBLING) is not None]
    return episode.model_copy(update={"traces": traces}) if traces else None


def _feedback(trace: Any) -> str:
    """Return a rollout's answer, and the verdict on it."""
    data = trace.task.data
    problem = Problem(getattr(data, "question", ""), data.answer)
    # An environment of another package has no such settings.
    metric = getattr(data, "data", {}).get("metric", DataConfig().metric)
    reply = trace.last_reply.strip()
    said = verdict(problem.reference(metric), trace.reward)
    return f"An earlier attempt: {reply}\nIts verdict: {said}"
