"""Train a recipe on this machine: sample, score, backward, clip, step, sync weights, log."""

import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from prime_composer.local.batch import Batch
from prime_composer.local.checkpoint import Checkpoint, save_checkpoint
from prime_composer.local.clock import Clock
from prime_composer.local.collect import collect
from prime_composer.local.engine import Engine, open_engine
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.gradients import NonFiniteLoss, accumulate_gradients
from prime_composer.local.preflight import check_routing, preflight
from prime_composer.local.tracker import Tracker, read_metrics
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.bound import Objective
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.schema import Recipe, TrainerConfig


@runtime_checkable
class Display(Protocol):
    """Watches a run: a progress bar, or nothing."""

    def status(self, text: str) -> None:
        """Show what the run does before its first step."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step."""
        ...


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        run_dir: the run directory.
        steps: finished steps.
        interrupted: whether Ctrl-C ended the run before its last step.
        evaluations: step -> what was measured after it; step 0 is before training.
    """

    run_dir: Path
    steps: int
    interrupted: bool
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)


def train(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    run_dir: Path,
    display: Display,
    resume: Checkpoint | None = None,
) -> Outcome:
    """Train a recipe in ``run_dir``; with ``resume``, continue bit-exactly from that checkpoint.

    Args:
        recipe: the recipe.
        problems: its problems.
        paths: directories of its prepared models, by table ("student", "teacher", "teachers.NAME").
        run_dir: an existing directory.
        display: watches the run.
        resume: a checkpoint of a run of the same recipe.

    Raises:
        ValueError: recipe, data, models and engines do not fit together. It is raised before the
            first step.
        NonFiniteLoss: training diverged. The newest checkpoint is the last good one.
    """
    check_routing(recipe, problems)
    student_dir = None if resume is None else resume.path
    with open_engine(recipe, problems, paths, display.status, student_dir) as engine:
        state = TrainingState.of_recipe(recipe, engine)
        if resume is not None:
            state.load(resume)
        preflight(engine, recipe, display.status)
        with (
            Tracker(run_dir, recipe.logging, None if resume is None else state.steps) as tracker,
            interruptible() as stop,
        ):
            evaluator = Evaluator.of_recipe(engine, recipe)
            evaluations = past_evaluations(run_dir)
            if not evaluations:
                display.status("measuring the teacher and the student before training")
                evaluations[0] = evaluator.student() | evaluator.teachers()
                tracker.log(0, evaluations[0])

            last = recipe.trainer.steps
            for step in range(state.steps + 1, last + 1):
                clock = Clock()
                batch, metrics = collect(engine, recipe, step, clock)
                metrics |= state.train_step(batch, step)
                clock.lap("train")
                engine.end_step(step)
                clock.lap("sync")

                metrics |= clock.laps
                metrics["tokens_per_second"] = batch.tokens / clock.laps["time/step"]
                if step == last or is_due(step, recipe.eval.every):
                    evaluations[step] = evaluator.student()
                    metrics |= evaluations[step]
                tracker.log(step, metrics)
                display.step(step, metrics)
                if step == last or stop.requested or is_due(step, recipe.checkpoint.every):
                    state.save(run_dir, recipe.checkpoint.keep)
                if stop.requested:
                    break
    return Outcome(run_dir, state.steps, state.steps < last, evaluations)


@dataclass
class TrainingState:
    """What changes from step to step: student, optimizer, loss and a moving teacher.

    Attributes:
        config: the recipe's ``[trainer]``.
        engine: the open models.
        loss: the recipe's loss.
        optimizer: AdamW over the student's parameters.
        steps: finished steps.
    """

    config: TrainerConfig
    engine: Engine
    loss: Objective
    optimizer: torch.optim.Optimizer
    steps: int = 0

    @classmethod
    def of_recipe(cls, recipe: Recipe, engine: Engine) -> "TrainingState":
        """Return the state before the first step."""
        config = recipe.trainer
        optimizer = torch.optim.AdamW(
            engine.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        return cls(
            config,
            engine,
            setup_loss_fn(resolve(recipe.loss, engine.problems.tokenizer)),
            optimizer,
        )

    def train_step(self, batch: Batch, step: int) -> dict[str, float]:
        """Update the student's weights on one batch.

        Returns:
            The loss and its metrics, "grad_norm" before clipping, and "lr".

        Raises:
            NonFiniteLoss: the loss or its gradient is NaN or infinite. The weights are unchanged.
        """
        engine, config = self.engine, self.config
        lr = config.lr * lr_factor(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = accumulate_gradients(
            engine.model, self.loss, batch, config, step, engine.reference
        )
        grad_norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            # A finite loss may have such a gradient. Weights are not to be saved after it.
            raise NonFiniteLoss(
                f"step {step}: the gradient of the loss {self.loss.config.type!r} is "
                f"{float(grad_norm)}; training stops here"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.end_step()
        self.steps = step
        return metrics | {"grad_norm": float(grad_norm), "lr": lr}

    def save(self, run_dir: Path, keep: int) -> None:
        """Write a checkpoint."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "loss": self.loss.state_dict(),
            "teacher": self.engine.state_dict(),
            "rng": torch.get_rng_state(),
        }
        engine = self.engine
        save_checkpoint(run_dir, self.steps, engine.model, engine.problems.tokenizer, state, keep)

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore all but the student's weights, which the engine was opened with."""
        state = checkpoint.load()
        self.steps = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss.load_state_dict(state["loss"])
        self.engine.load_state_dict(state["teacher"])
        torch.set_rng_state(state["rng"])


def past_evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return what a resumed run has measured before, by step."""
    evaluations = {}
    for record in read_metrics(run_dir):
        measured = {
            name: value for name, value in record.items() if name.startswith(("eval/", "teacher/"))
        }
        if measured:
            evaluations[record["step"]] = measured
    return evaluations


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every ``every`` steps happens now; 0 is never."""
    return every > 0 and step % every == 0


def lr_factor(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step (from 1) as a share of the peak.

    After a linear warm-up the schedule decays to 0. The first step of the decay is at the peak. The
    schedule would reach 0 one step after the last.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class StopRequest:
    """Whether the user asked to stop."""

    requested: bool = False


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    """Let the first Ctrl-C finish the step and leave a checkpoint; the second one stops at once."""
    stop = StopRequest()

    def handler(signum: int, frame: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread: the caller keeps its own handling
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
