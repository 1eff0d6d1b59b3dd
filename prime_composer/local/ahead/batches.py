"""Collect the batch of a step with the weights that the sampler has, now or ahead."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from prime_composer.environments.tasks import parts_of
from prime_composer.local.ahead.stored import batch_of_state
from prime_composer.local.collect import Clock, Collected, Collector, pairs_of_step
from prime_composer.local.engine import Engine
from prime_composer.local.watch import Watch
from prime_composer.recipe.schema import ReplayConfig, RolloutConfig, TrainerConfig


@dataclass(frozen=True, eq=False)
class Weights:
    """The student after a step."""

    step: int  # finished steps
    model: nn.Module  # the student, or a copy of it as it was then


@dataclass(frozen=True, eq=False)
class Batches:
    """Collects the batches of a run, or takes them from a checkpoint."""

    engine: Engine  # the open models
    trainer: TrainerConfig  # the recipe's ``[trainer]``
    rollout: RolloutConfig  # its ``[rollout]``
    replay: ReplayConfig  # its ``[replay]``
    watch: Watch  # whether teachers and sampler are still right
    # (number of this island, islands); None for a run by itself
    island: tuple[int, int] | None = None

    def collect(self, step: int, weights: Weights, clock: Clock) -> Collected:
        """Return the batch of a step, sampled by the weights that the sampler has.

        Who is due or was lost is checked after the batch is scored and before it trains. A teacher
        that was exchanged while it scored this batch is seen as well.
        """
        collector = self._collector(replace(self.engine, model=weights.model), clock)
        batch = collector.collect(step)
        with clock.phase("checks"):
            self.watch.check(weights.step, student=weights.model)
        return Collected(batch, collector.metrics, clock.laps)

    def of_state(self, step: int, state: dict[str, Any]) -> Collected:
        """Return the batch of a step from its ``batch_state``."""
        parts = parts_of(self._collector(self.engine, Clock()).problems(step))
        pairs = None
        if self.engine.loss.reads_pairs and self.replay.source == "jsonl":
            pairs = pairs_of_step(self.engine, self.replay, [], self.trainer.seed, step)
        return batch_of_state(state, [*parts.problems.values(), *parts.tasks.values()], pairs)

    def _collector(self, engine: Engine, clock: Clock) -> Collector:
        return Collector(
            *(engine, self.trainer, self.rollout, self.replay, clock), island=self.island
        )
