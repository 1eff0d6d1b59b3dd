"""Train a recipe on this machine: sample, score, backward, clip, step, sync weights, log."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from prime_composer.backends.cpu_guard import all_cores, return_freed_memory
from prime_composer.local.answers import write_answers
from prime_composer.local.batch import Batch
from prime_composer.local.canary import Canary, CanaryChanged
from prime_composer.local.checkpoint import (
    Checkpoint,
    CheckpointNotSaved,
    check_room,
    list_checkpoints,
    save_checkpoint,
    set_newer_aside,
    tensor_bytes,
)
from prime_composer.local.clock import Clock
from prime_composer.local.collect import collect
from prime_composer.local.disk import describe
from prime_composer.local.engine import Engine, open_engine
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.gradients import NonFiniteLoss, accumulate_gradients
from prime_composer.local.health import WeightCheck
from prime_composer.local.mismatch import Mismatch, SamplerCheck
from prime_composer.local.preflight import Preflight, check_routing, preflight
from prime_composer.local.signals import StepAbandoned, StopRequest, finishing_the_step
from prime_composer.local.tracker import Tracker, read_metrics
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.bound import Objective
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import signatures_of
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


class RunStopped(ValueError):
    """An error that is not the recipe's ended a run after its start.

    Attributes:
        step: the step to continue from; 0 where no checkpoint is there.
        checkpoint: the checkpoint of that step; None where there is none.
    """

    def __init__(self, message: str, checkpoint: Checkpoint | None):
        super().__init__(message)
        self.step = 0 if checkpoint is None else checkpoint.step
        self.checkpoint = checkpoint


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        run_dir: the run directory.
        steps: finished steps.
        interrupted: whether a signal ended the run before its last step.
        evaluations: step -> what was measured after it; step 0 is before training.
        signum: number of the signal that came; None without one.
    """

    run_dir: Path
    steps: int
    interrupted: bool
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    signum: int | None = None


def train(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    run_dir: Path,
    display: Display,
    resume: Checkpoint | None = None,
    begin: Callable[[], None] | None = None,
) -> Outcome:
    """Train a recipe in ``run_dir``; with ``resume``, continue bit-exactly from that checkpoint.

    Args:
        recipe: the recipe.
        problems: its problems.
        paths: directories of its prepared models, by table ("student", "teacher", "teachers.NAME").
        run_dir: an existing directory.
        display: watches the run.
        resume: a checkpoint of a run of the same recipe.
        begin: called when every check has passed and before the first file is written.

    Raises:
        ValueError: recipe, data, models and engines do not fit together. It is raised before the
            first step.
        RunStopped: a server, the disk or a check ended the run later. What is safe is saved.
        NonFiniteLoss: training diverged. The newest checkpoint is the last good one.
    """
    check_routing(recipe, problems)
    student_dir = None if resume is None else resume.path
    stop = StopRequest()

    def status(text: str) -> None:
        display.status(text)
        stop.wait_begins()

    for name, count in problems.left_out.items():
        status(f"{name}: {count} rows of the data are left out (clean)")
    with open_engine(recipe, problems, paths, status, student_dir) as engine:
        state = TrainingState.of_recipe(recipe, engine)
        if resume is not None:
            state.load(resume)
        resumed = None if resume is None else resume.step
        at_once = checkpoints_at_once(recipe, state.steps)
        check_room(run_dir, state.checkpoint_bytes(), at_once, resumed)
        canary = state.open_canary(recipe, preflight(engine, recipe, status))
        if doubts := canary.doubts(state.steps):
            status(
                f"warning: {doubts}; the run continues from them. The last verified step is "
                f"{canary.safe_step} (--resume --step)"
            )
        if begin is not None:
            begin()
        if resumed is not None:
            for path in set_newer_aside(run_dir, resumed):
                status(
                    f"warning: a checkpoint after step {resumed} is now {path}; no run deletes it: "
                    "delete it when you do not need it"
                )
        tracker = Tracker(run_dir, recipe.logging, resumed, status)
        with tracker, all_cores(engine.model):
            evaluator = Evaluator.of_recipe(engine, recipe)
            evaluations = past_evaluations(run_dir)
            signatures = signatures_of(problems.sources.values())

            def measure(step: int) -> dict[str, float]:
                measured = canary.steadily(evaluator.student)
                try:
                    write_answers(run_dir, step, evaluator.answers, signatures)
                except OSError as error:  # the report lacks them, and nothing else
                    status(f"warning: the answers of step {step} are not kept: {describe(error)}")
                return measured

            if state.steps == 0:
                status("measuring the teacher and the student before training")
                evaluations[0] = measure(0) | evaluator.teachers()
                tracker.log(0, evaluations[0])
            elif is_measured(recipe, state.steps) and state.steps not in evaluations:
                # The run was stopped between this step and its evaluation.
                evaluations[state.steps] = measure(state.steps)
                tracker.amend(state.steps, evaluations[state.steps])

            last = recipe.trainer.steps
            unlogged: dict[str, float] = {}
            abandoned = False
            try:
                with finishing_the_step(stop):
                    for step in range(state.steps + 1, last + 1):
                        clock = Clock()
                        with stop.giving_up_waits():
                            batch, metrics = canary.steadily(
                                partial(collect, engine, recipe, step, clock)
                            )
                            # Asked now, a teacher that was exchanged meanwhile is seen as well.
                            canary.check(state.steps, due=is_due(state.steps, recipe.checks.every))
                            clock.lap("checks")
                        metrics |= state.train_step(batch, step)
                        unlogged = metrics
                        clock.lap("train")
                        with stop.giving_up_waits():
                            engine.end_step(step)
                            clock.lap("sync")
                            metrics |= clock.laps
                            metrics["tokens_per_second"] = batch.tokens / clock.laps["time/step"]
                            measured = is_measured(recipe, step)
                            if measured or is_due(step, recipe.checkpoint.every):
                                canary.check(step, due=recipe.checks.every > 0, sampler=True)
                            if measured:
                                evaluations[step] = measure(step)
                                metrics |= evaluations[step]
                        tracker.log(step, metrics)
                        unlogged = {}
                        display.step(step, metrics)
                        stopping = stop.requested
                        if stopping:
                            with stop.giving_up_waits():
                                canary.check(step, due=recipe.checks.every > 0, sampler=True)
                        if step == last or stopping or is_due(step, recipe.checkpoint.every):
                            state.save(run_dir, recipe.checkpoint.keep, tracker)
                        if stopping:
                            break
            except (ValueError, OSError, StepAbandoned) as error:
                stopped = state.leave(run_dir, recipe.checkpoint.keep, tracker, unlogged, error)
                abandoned = isinstance(error, StepAbandoned)
                if not abandoned or stopped.step < state.steps:
                    raise stopped from error
                if doubts := canary.doubts(state.steps):
                    display.status(f"warning: {doubts}")
    interrupted = abandoned or state.steps < last
    return Outcome(run_dir, state.steps, interrupted, evaluations, stop.signum)


@dataclass
class TrainingState:
    """What changes from step to step: student, optimizer, loss and a moving teacher.

    Attributes:
        config: the recipe's ``[trainer]``.
        engine: the open models.
        loss: the recipe's loss.
        optimizer: AdamW over the student's parameters.
        weight_check: the weights' norms at the start of the run.
        sampler_check: how far the sampler may be from the student; None where they compute
            different distributions.
        steps: finished steps.
        canary: what teachers answered at the start of the run; None before the preflight.
    """

    config: TrainerConfig
    engine: Engine
    loss: Objective
    optimizer: torch.optim.Optimizer
    weight_check: WeightCheck
    sampler_check: SamplerCheck | None = None
    steps: int = 0
    canary: Canary | None = None
    _stored_canary: dict[str, Any] = field(default_factory=dict)

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
            WeightCheck.of_model(engine.model),
            SamplerCheck.of_recipe(recipe),
        )

    def open_canary(self, recipe: Recipe, result: Preflight) -> Canary:
        """Return the canary of the run. A resumed run's teachers are compared with its start.

        Raises:
            CanaryChanged: a teacher is not the one that the run was started with.
            PreflightError: a teacher gives several answers to one question.
        """
        self.canary = Canary.of_preflight(self.engine, recipe, result, self.steps)
        self.canary.load_state_dict(self._stored_canary)
        return self.canary

    def train_step(self, batch: Batch, step: int) -> dict[str, float]:
        """Update the student's weights on one batch.

        Returns:
            The loss and its metrics, "grad_norm" before clipping, and "lr".

        Raises:
            SamplerMismatch: the sampler's probabilities are not the student's. The weights are
                unchanged.
            NonFiniteLoss: the loss or its gradient is NaN or infinite. The weights are unchanged.
            ExplodedWeights: the weights are not finite any more, or far too large.
        """
        engine, config = self.engine, self.config
        lr = config.lr * lr_factor(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mismatch = None if self.sampler_check is None else Mismatch(self.sampler_check)
        return_freed_memory(engine.model)
        metrics = accumulate_gradients(
            engine.model, self.loss, batch, config, step, engine.reference, mismatch
        )
        if mismatch is not None:
            metrics |= mismatch.result(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            # A finite loss may have such a gradient. Weights are not to be saved after it.
            raise NonFiniteLoss(
                f"step {step}: the gradient of the loss {self.loss.config.type!r} is "
                f"{float(grad_norm)}; training stops here"
            )
        self.optimizer.step()
        self.weight_check.check(engine.model, step)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.end_step()
        self.steps = step
        return metrics | {"grad_norm": float(grad_norm), "lr": lr}

    def save(self, run_dir: Path, keep: int, tracker: Tracker) -> None:
        """Write a checkpoint, after the metrics that it continues.

        torch's random state is not in it. Every draw of a run has a generator of its own, whose
        seed the recipe and the step decide.
        """
        tracker.sync()
        state = {
            "optimizer": self.optimizer.state_dict(),
            "loss": self.loss.state_dict(),
            "teacher": self.engine.state_dict(),
            "canary": self._stored_canary if self.canary is None else self.canary.state_dict(),
            "norms": self.weight_check.norms,
        }
        model, tokenizer = self.engine.model, self.engine.problems.tokenizer
        verified = None
        if self.canary is not None and self.canary.doubts(self.steps):
            verified = self.canary.safe_step
        save_checkpoint(run_dir, self.steps, model, tokenizer, state, keep, verified)

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore all but the student's weights, which the engine was opened with."""
        state = checkpoint.load()
        self.steps = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss.load_state_dict(state["loss"])
        self.engine.load_state_dict(state["teacher"])
        # Checkpoints of before these checks have neither.
        self._stored_canary = state.get("canary", {})
        self.weight_check = WeightCheck(state.get("norms", self.weight_check.norms))

    def leave(
        self,
        run_dir: Path,
        keep: int,
        tracker: Tracker,
        unlogged: dict[str, float],
        error: Exception,
    ) -> RunStopped:
        """Save the last finished step after an error, unless it is saved, in doubt, or cannot be.

        Args:
            run_dir: the run directory.
            keep: checkpoints that remain.
            tracker: the run's.
            unlogged: numbers of the last finished step; empty where they are logged.
            error: what ended the run.

        Returns:
            The error to raise: what happened, what is safe, and how to go on.
        """
        reason = describe(error) if isinstance(error, OSError) else str(error)
        saved = [checkpoint.step for checkpoint in list_checkpoints(run_dir)]
        # A step in doubt would push the last good checkpoint out.
        unfit = isinstance(error, CheckpointNotSaved | CanaryChanged)
        if self.steps > 0 and self.steps not in saved and not unfit:
            try:
                if unlogged:
                    tracker.log(self.steps, unlogged)
                self.save(run_dir, keep, tracker)
            except (CheckpointNotSaved, OSError) as second:
                # The first error is the one to mend.
                why = describe(second) if isinstance(second, OSError) else str(second)
                reason += f"; step {self.steps} could not be saved either: {why}"
        last_right = error.safe_step if isinstance(error, CanaryChanged) else self.steps
        checkpoints = list_checkpoints(run_dir)
        right = [checkpoint for checkpoint in checkpoints if checkpoint.step <= last_right]
        if not right:
            return RunStopped(f"{reason.rstrip('.')}; no earlier step is saved", None)
        chosen = right[-1]
        words = "--resume" if chosen == checkpoints[-1] else f"--resume --step {chosen.step}"
        doubts = "" if self.canary is None else self.canary.doubts(chosen.step)
        if doubts:
            assert self.canary is not None
            verified = [one.step for one in right if one.step <= self.canary.safe_step]
            choice = f", or with --step {verified[-1]} from a verified one" if verified else ""
            return RunStopped(
                f"{reason.rstrip('.')}; step {chosen.step} is saved in {chosen.path}, and "
                f"{doubts}; continue with {words} --output-dir {run_dir}{choice}",
                chosen,
            )
        return RunStopped(
            f"{reason.rstrip('.')}; step {chosen.step} is safe in {chosen.path}; continue with "
            f"{words} --output-dir {run_dir}",
            chosen,
        )

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint: weights, AdamW's two moments, a moving teacher."""
        model = self.engine.model
        moments = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return (
            tensor_bytes(model.state_dict())
            + 2 * tensor_bytes(moments)
            + tensor_bytes(self.engine.state_dict())
        )


def checkpoints_at_once(recipe: Recipe, done: int) -> int:
    """Return how many checkpoints are on the disk at most, while one is written."""
    last, every = recipe.trainer.steps, recipe.checkpoint.every
    written = sum(step == last or is_due(step, every) for step in range(done + 1, last + 1))
    return min(recipe.checkpoint.keep + 1, written + (done > 0))


def is_measured(recipe: Recipe, step: int) -> bool:
    """Return whether a step ends with an evaluation."""
    return step == recipe.trainer.steps or is_due(step, recipe.eval.every)


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
