"""The one-machine loop: sample, score, loss over the global token count, backward, clip, step, sync, log."""

import math
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from prime_composer.checkpoint import Checkpoint, save_checkpoint
from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.data import is_correct, load_problems, prompt_batches, render_prompt
from prime_composer.engine import Engine, open_engine, preflight
from prime_composer.evaluate import evaluate, teacher_accuracy
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.base import Loss
from prime_composer.recipe import Recipe, TrainerConfig
from prime_composer.rollout import Rollout, SamplingParams
from prime_composer.scorer import TeacherScores
from prime_composer.student import micro_batches, student_inputs
from prime_composer.tracker import Tracker, read_metrics


@runtime_checkable
class Display(Protocol):
    """What watches a run: a progress bar, or nothing."""

    def status(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite: the message names step, sequence and loss."""


@dataclass
class Outcome:
    """How a run ended. ``evaluations`` maps the step to what was measured there; step 0 is before training."""

    run_dir: Path
    steps: int
    interrupted: bool
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)


def train(recipe: Recipe, run_dir: Path, display: Display, resume: Checkpoint | None = None) -> Outcome:
    """Run a recipe on this machine, in ``run_dir``; from a checkpoint, continue it to the same numbers.

    Raises:
        ValueError: recipe, data, models and engines do not fit together (found before the first step).
        NonFiniteLoss: training diverged; the newest checkpoint is the last good one.
    """
    config = recipe.trainer
    practice, held_out = load_problems(recipe.data)
    loss = setup_loss_fn(recipe.loss)
    outcome = Outcome(run_dir, steps=0, interrupted=False)
    with open_engine(recipe, display.status, student_dir=resume.path if resume else None) as engine:
        prompts = [render_prompt(problem, recipe.data, engine.tokenizer) for problem in practice]
        optimizer = torch.optim.AdamW(
            engine.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        if resume is not None:
            state = resume.load()
            outcome.steps = state["step"]
            optimizer.load_state_dict(state["optimizer"])
            loss.load_state_dict(state["loss"])
            torch.set_rng_state(state["rng"])
        preflight(engine, recipe, prompts, display.status)

        with Tracker(run_dir, recipe.logging, resume_step=resume and outcome.steps) as tracker, interruptible() as stop:
            outcome.evaluations = past_evaluations(run_dir)
            if not outcome.evaluations:
                display.status("measuring the teacher and the student before training")
                outcome.evaluations[0] = evaluate(engine, recipe, held_out) | teacher_accuracy(engine, recipe, held_out)
                tracker.log(0, outcome.evaluations[0])

            for step in range(outcome.steps + 1, config.steps + 1):
                clock = Clock()
                batch = prompt_batches(
                    len(practice), config.batch_size // recipe.rollout.group_size, config.seed, step - 1
                )
                rollouts = sample(engine, recipe, [prompts[i] for i in batch], step)
                clock.lap("sample")
                rewards = [
                    float(is_correct(engine.decode(r), practice[batch[r.prompt_index]], recipe.data)) for r in rollouts
                ]
                clock.lap("reward")
                scores = None if engine.scorer is None else engine.scorer.score(rollouts, recipe.loss.support_size)
                clock.lap("score")

                for group in optimizer.param_groups:
                    group["lr"] = config.lr * lr_factor(config, step)
                metrics = accumulate_gradients(
                    engine.model, loss, rollouts, scores, group_advantages(rollouts, rewards), config, step
                )
                grad_norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loss.end_step(metrics["loss"])
                clock.lap("train")
                engine.sampler.update_weights(engine.model)
                clock.lap("sync")

                outcome.steps = step
                last = step == config.steps
                tokens = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
                metrics |= {
                    "grad_norm": float(grad_norm),
                    "lr": optimizer.param_groups[0]["lr"],
                    "rollout/reward": sum(rewards) / len(rewards),
                    "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
                    "rollout/tokens": tokens / len(rollouts),
                    "tokens_per_second": tokens / clock.total,
                    **clock.laps,
                }
                if last or (recipe.eval.every and step % recipe.eval.every == 0):
                    outcome.evaluations[step] = evaluate(engine, recipe, held_out)
                    metrics |= outcome.evaluations[step]
                tracker.log(step, metrics)
                display.step(step, metrics)
                if last or stop.requested or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                    state = {"optimizer": optimizer.state_dict(), "loss": loss.state_dict(), "rng": torch.get_rng_state()}
                    save_checkpoint(run_dir, step, engine.model, engine.tokenizer, state, recipe.checkpoint.keep)
                if stop.requested and not last:
                    outcome.interrupted = True
                    break
    return outcome


class Clock:
    """Seconds of the parts of a step, as metrics ``time/<part>``, and of the whole."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.laps[f"time/{part}"] = now - self._last
        self.laps["time/step"] = now - self._began
        self._last = now

    @property
    def total(self) -> float:
        return self.laps["time/step"]


def past_evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    """What a resumed run has already measured, by step."""
    found = {}
    for record in read_metrics(run_dir):
        measured = {name: value for name, value in record.items() if name.startswith(("eval/", "teacher/"))}
        if measured:
            found[record["step"]] = measured
    return found


def sample(engine: Engine, recipe: Recipe, prompts: Sequence[Sequence[int]], step: int) -> list[Rollout]:
    """The step's rollouts: ``group_size`` for each prompt."""
    config = recipe.rollout
    params = SamplingParams(
        n=config.group_size,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop_token_ids=engine.stop_token_ids,
    )
    return engine.sampler.generate(prompts, params, seed=derive_seed(recipe.trainer.seed, "rollouts", step))


def accumulate_gradients(
    model: torch.nn.Module,
    loss: Loss,
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    advantages: Sequence[float] | None,
    config: TrainerConfig,
    step: int,
) -> dict[str, float]:
    """Backward of (sum of the losses) / (tokens of the whole step), micro-batch by micro-batch.

    Returns:
        "loss", the loss per token of the step, and the loss's own metrics, averaged over micro-batches by tokens.

    Raises:
        NonFiniteLoss: before the bad micro-batch's backward.
    """
    total = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
    parts: list[tuple[int, LossOutputs]] = []
    for indices in micro_batches(rollouts, config.micro_batch_tokens):
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            inputs = student_inputs(
                model,
                [rollouts[i] for i in indices],
                None if scores is None else [scores[i] for i in indices],
                None if advantages is None else [advantages[i] for i in indices],
            )
        outputs = loss(inputs)
        if not torch.isfinite(outputs.loss):
            raise NonFiniteLoss(describe_non_finite(loss, inputs, outputs, indices, step))
        (outputs.loss / total).backward()
        parts.append((inputs.loss_mask.shape[0], LossOutputs(outputs.loss.detach(), outputs.metrics)))
    metrics = {"loss": float(sum(part.loss for _, part in parts)) / total}
    for name in parts[0][1].metrics:
        metrics[name] = float(sum(tokens * part.metrics[name] for tokens, part in parts)) / total
    return metrics


def describe_non_finite(
    loss: Loss, inputs: LossInputs, outputs: LossOutputs, indices: Sequence[int], step: int
) -> str:
    """Which sequence made the loss NaN or infinite: each one alone, the others masked."""
    for segment, rollout in enumerate(indices):
        alone = LossInputs(**{**vars(inputs), "loss_mask": inputs.segment_ids == segment})
        value = float(loss(alone).loss.detach())
        if not math.isfinite(value):
            return f"step {step}: the loss {loss.config.type!r} of rollout {rollout} is {value}; training stops here"
    return f"step {step}: the loss {loss.config.type!r} is {float(outputs.loss.detach())}; training stops here"


def group_advantages(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean reward of the rollout's group: prime-rl's default advantage (GRPO without the division)."""
    groups: dict[int, list[float]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        groups.setdefault(rollout.prompt_index, []).append(reward)
    return [
        reward - sum(groups[rollout.prompt_index]) / len(groups[rollout.prompt_index])
        for rollout, reward in zip(rollouts, rewards, strict=True)
    ]


def lr_factor(config: TrainerConfig, step: int) -> float:
    """Learning rate of a step (from 1) as a share of the peak: linear warm-up, then the schedule down to 0.

    The first step of the decay is at the peak, and the schedule would reach 0 one step after the last.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """A seed of its own for each use and step: a resumed run draws the same numbers with no generator to restore."""
    return random.Random(f"{seed}/{purpose}/{step}").getrandbits(31)


class StopRequest:
    """Whether the user asked to stop."""

    requested = False


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    """The first Ctrl-C lets the step finish and leaves a checkpoint; the second one stops at once."""
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
