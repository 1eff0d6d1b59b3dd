"""The one-machine loop: sample, score, loss over the global token count, backward, clip, step, sync, log."""

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.local.checkpoint import Checkpoint, save_checkpoint
from prime_composer.local.engine import Engine, open_engine, preflight
from prime_composer.local.evaluate import evaluate, teacher_accuracy
from prime_composer.local.gradients import Batch, NonFiniteLoss, accumulate_gradients
from prime_composer.local.replay import Pair, pairs_of_rollouts, response
from prime_composer.local.tracker import Tracker, read_metrics
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.answers import is_correct
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import load_environments
from prime_composer.problems.order import environment_batches, prompt_batches
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.schema import Recipe, TrainerConfig


@runtime_checkable
class Display(Protocol):
    """What watches a run: a progress bar, or nothing."""

    def status(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...


@dataclass
class Outcome:
    """How a run ended. ``evaluations`` maps the step to what was measured there; step 0 is before training."""

    run_dir: Path
    steps: int
    interrupted: bool
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)


def train(
    recipe: Recipe, run_dir: Path, display: Display, resume: Checkpoint | None = None
) -> Outcome:
    """Run a recipe on this machine, in ``run_dir``; from a checkpoint, continue it to the same numbers.

    Raises:
        ValueError: recipe, data, models and engines do not fit together (found before the first step).
        NonFiniteLoss: training diverged; the newest checkpoint is the last good one.
    """
    config = recipe.trainer
    practice, held_out = load_environments(recipe.sources)
    for problem in [*practice, *held_out]:
        recipe.mixture(problem)  # a row may name a teacher that is not there
    outcome = Outcome(run_dir, steps=0, interrupted=False)
    with open_engine(recipe, display.status, student_dir=resume.path if resume else None) as engine:
        loss = setup_loss_fn(resolve(recipe.loss, engine.tokenizer))
        prompts = [
            render_prompt(problem, recipe.data_of(problem), engine.tokenizer)
            for problem in practice
        ]
        optimizer = torch.optim.AdamW(
            engine.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if resume is not None:
            state = resume.load()
            outcome.steps = state["step"]
            optimizer.load_state_dict(state["optimizer"])
            loss.load_state_dict(state["loss"])
            engine.load_state_dict(state["teacher"])
            torch.set_rng_state(state["rng"])
        preflight(engine, recipe, practice, prompts, display.status)

        with (
            Tracker(run_dir, recipe.logging, resume_step=resume and outcome.steps) as tracker,
            interruptible() as stop,
        ):
            outcome.evaluations = past_evaluations(run_dir)
            if not outcome.evaluations:
                display.status("measuring the teacher and the student before training")
                outcome.evaluations[0] = evaluate(engine, recipe, held_out) | teacher_accuracy(
                    engine, recipe, held_out
                )
                tracker.log(0, outcome.evaluations[0])

            for step in range(outcome.steps + 1, config.steps + 1):
                clock = Clock()
                batch, metrics = collect(engine, recipe, practice, prompts, step, clock)
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * lr_factor(config, step)
                trained = accumulate_gradients(
                    engine.model, loss, batch, config, step, engine.reference
                )
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    engine.model.parameters(), config.max_grad_norm
                )
                if not torch.isfinite(grad_norm):
                    # A finite loss may have such a gradient, and weights are not to be saved after it.
                    raise NonFiniteLoss(
                        f"step {step}: the gradient of the loss {recipe.loss.type!r} is {float(grad_norm)}; training stops here"
                    )
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if trained:
                    loss.end_step(trained["loss"])
                clock.lap("train")
                engine.end_step(step)
                clock.lap("sync")

                outcome.steps = step
                last = step == config.steps
                metrics |= (
                    trained
                    | {"grad_norm": float(grad_norm), "lr": optimizer.param_groups[0]["lr"]}
                    | clock.laps
                )
                metrics["tokens_per_second"] = batch.tokens / clock.laps["time/step"]
                if last or (recipe.eval.every and step % recipe.eval.every == 0):
                    outcome.evaluations[step] = evaluate(engine, recipe, held_out)
                    metrics |= outcome.evaluations[step]
                tracker.log(step, metrics)
                display.step(step, metrics)
                if (
                    last
                    or stop.requested
                    or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0)
                ):
                    state = {
                        "optimizer": optimizer.state_dict(),
                        "loss": loss.state_dict(),
                        "teacher": engine.state_dict(),
                        "rng": torch.get_rng_state(),
                    }
                    save_checkpoint(
                        run_dir, step, engine.model, engine.tokenizer, state, recipe.checkpoint.keep
                    )
                if stop.requested and not last:
                    outcome.interrupted = True
                    break
    return outcome


def collect(
    engine: Engine,
    recipe: Recipe,
    practice: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    step: int,
    clock: "Clock",
) -> tuple[Batch, dict[str, float]]:
    """The step's batch: rollouts, their rewards, the teacher's scores, preference pairs; and what they measured."""
    config = recipe.trainer
    counted = Counter(problem.environment for problem in practice)
    sizes, ratios = zip(
        *((counted[name], source.ratio) for name, source in recipe.sources.items()), strict=True
    )
    asked = environment_batches(
        sizes, ratios, config.batch_size // recipe.rollout.group_size, config.seed, step - 1
    )
    rollouts = sample(
        engine, recipe, [practice[i] for i in asked], [prompts[i] for i in asked], step
    )
    clock.lap("sample")
    problems = [practice[asked[rollout.prompt_index]] for rollout in rollouts]
    texts = [engine.decode(rollout) for rollout in rollouts]
    rewards = [
        float(is_correct(text, problem, recipe.data_of(problem)))
        for text, problem in zip(texts, problems, strict=True)
    ]
    advantages = group_advantages(rollouts, rewards)
    pairs = preference_pairs(engine, recipe, rollouts, rewards, step)
    metrics = {
        "rollout/reward": sum(rewards) / len(rewards),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/tokens": sum(int(r.loss_mask.sum()) for r in rollouts) / len(rollouts),
    }
    if len(sizes) > 1:
        for name in recipe.sources:
            mine = [
                reward
                for reward, problem in zip(rewards, problems, strict=True)
                if problem.environment == name
            ]
            if mine:
                metrics[f"rollout/reward/{name}"] = sum(mine) / len(mine)
    clock.lap("reward")
    told, scores = engine.score(rollouts, texts, problems, rewards)
    clock.lap("score")
    if len(told) < len(rollouts):
        metrics["rollout/without_hint"] = 1 - len(told) / len(rollouts)
    return Batch([rollouts[i] for i in told], scores, [advantages[i] for i in told], pairs), metrics


def sample(
    engine: Engine,
    recipe: Recipe,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    step: int,
) -> list[Rollout]:
    """The step's rollouts: ``group_size`` for each prompt.

    Under ``student_fraction`` lambda below 1 (GKD, https://arxiv.org/abs/2306.13649, Alg. 1) each sequence is sampled
    with probability lambda, and otherwise it is the data's solution. The paper tosses its coin once per step; one per
    sequence has the same mean and less variance.
    """
    config = recipe.rollout
    params = SamplingParams(
        n=config.group_size,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop_token_ids=engine.stop_token_ids,
    )
    seed = derive_seed(recipe.trainer.seed, "rollouts", step)
    if config.student_fraction == 1:
        return engine.sampler.generate(prompts, params, seed=seed)
    coin = random.Random(derive_seed(recipe.trainer.seed, "student_fraction", step))
    sequences = [index for index in range(len(prompts)) for _ in range(config.group_size)]
    sampled = [coin.random() < config.student_fraction for _ in sequences]
    asked = [index for index, mine in zip(sequences, sampled, strict=True) if mine]
    params = replace(params, n=1)
    fresh = iter(
        engine.sampler.generate([prompts[i] for i in asked], params, seed=seed) if asked else []
    )
    return [
        replace(next(fresh), prompt_index=index)
        if mine
        else response(
            prompts[index],
            problems[index].answer,
            recipe.data_of(problems[index]),
            engine.tokenizer,
            index,
        )
        for index, mine in zip(sequences, sampled, strict=True)
    ]


def preference_pairs(
    engine: Engine, recipe: Recipe, rollouts: Sequence[Rollout], rewards: Sequence[float], step: int
) -> list[Pair]:
    """The step's pairs for the replay channel; none where the loss has no such channel."""
    if "replay" not in recipe.loss.needs:
        return []
    count = recipe.replay.pairs_per_step
    if recipe.replay.source == "rollouts":
        return pairs_of_rollouts(rollouts, rewards, count)
    order = prompt_batches(len(engine.pairs), count, recipe.trainer.seed, step - 1)
    return [engine.pairs[i] for i in order]


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


def past_evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    """What a resumed run has already measured, by step."""
    found = {}
    for record in read_metrics(run_dir):
        measured = {
            name: value for name, value in record.items() if name.startswith(("eval/", "teacher/"))
        }
        if measured:
            found[record["step"]] = measured
    return found


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
