"""Collect the batch of one step: sample, grade, pair and score rollouts."""

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.contract import given
from prime_composer.environments.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.environments.tasks import Task, parts_of
from prime_composer.local.engine import Engine
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.order import environment_batches, prompt_batches
from prime_composer.problems.prompts import marks_of
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import ReplayConfig, RolloutConfig, TrainerConfig
from prime_composer.scoring.shared_vocabulary import lacking
from prime_composer.step.balance import balanced, share_metrics
from prime_composer.step.batch import Batch, Pair, Sample
from prime_composer.step.collapse import collapse_metrics, end_metrics
from prime_composer.step.replay import pairs_of_rollouts


class Clock:
    """Measures the seconds of a step, as metrics ``time/PHASE`` and ``time/step``."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.laps: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add phases that another clock has measured meanwhile, which lengthen no step."""
        for name, value in seconds.items():
            if name != "time/step":
                self.laps[name] = self.laps.get(name, 0.0) + value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs in the block. A phase that comes twice is added up."""
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        self.laps[f"time/{name}"] = self.laps.get(f"time/{name}", 0.0) + now - began
        self.laps["time/step"] = now - self._start


@dataclass(frozen=True, eq=False)
class Collected:
    """A step's batch, and the metrics of its rollouts and scores."""

    batch: Batch
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Collector:
    """Collects the batch of a step: ``problems``, ``sample``, ``grade`` and ``score``, in order."""

    engine: Engine
    trainer: TrainerConfig
    rollout: RolloutConfig
    replay: ReplayConfig
    clock: Clock
    metrics: dict[str, float] = field(default_factory=dict)  # what was measured in this step
    # number of this island, from 0, and how many there are; None without islands
    island: tuple[int, int] | None = None

    def undivided(self, step: int) -> int:
        """Return the step of one undivided run whose problems and seeds are this island's."""
        index, islands = self.island or (0, 1)
        return (step - 1) * islands + index + 1

    def problems(self, step: int) -> list[Problem]:
        """Return the problems of a step, shared among the environments by their ratios."""
        count = self.trainer.batch_size // self.rollout.group_size
        problem_set, order = self.engine.problems.problem_set, self.undivided(step)
        return problems_of_step(problem_set, count, self.trainer.seed, order)

    def collect(self, step: int) -> Batch:
        """Return the batch of a step: sampled, graded and scored."""
        samples = self.grade(self.sample(self.problems(step), step))
        return self.score(samples, step)

    def sample(self, problems: Sequence[Problem], step: int) -> "Sampled":
        """Sample answers to the problems, and play tasks of environments by id."""
        with self.clock.phase("sample"):
            order = self.undivided(step)
            return sample_step(self.engine, self.rollout, problems, self.trainer.seed, order)

    def grade(self, sampled: "Sampled") -> list[Sample]:
        """Return the rollouts with text, reward and advantage."""
        budget, problem_set = TimeBudget(), self.engine.problems.problem_set
        with self.clock.phase("reward"):
            samples = [
                *grade(self.engine.problems, sampled.rollouts, sampled.problems, budget),
                *sampled.played.samples,
            ]
            self.metrics |= rollout_metrics(samples, problem_set) | sampled.played.metrics
            self.metrics |= collapse_metrics(samples)
        if any(source.metric == "math_verify" for source in problem_set.sources.values()):
            self.metrics["rollout/answer_timeouts"] = float(budget.timeouts)
        return samples

    def score(self, samples: Sequence[Sample], step: int) -> Batch:
        """Return the samples with the teacher's scores, and the step's preference pairs."""
        loss = self.engine.loss
        pairs: Sequence[Pair] = ()
        with self.clock.phase("score"):
            if loss.reads_pairs:
                pairs = pairs_of_step(self.engine, self.replay, samples, self.trainer.seed, step)
            scored = self.engine.score(samples)
            if loss.balance is not None:
                scored = replace(scored, samples=balanced(scored.samples, loss.balance))
        if scored.padding_ids is not None:
            self.metrics["rollout/padding_ids"] = float(scored.padding_ids)
        self.metrics |= scored.metrics
        of_teacher = self.engine.reward_scale is None
        self.metrics |= end_metrics(scored.samples, of_teacher)
        self.metrics |= share_metrics(scored.samples)
        if scored.without_hint:
            self.metrics["rollout/without_hint"] = scored.without_hint / len(samples)
        if self.engine.may_overflow:
            self.metrics["rollout/teacher_cut"] = scored.cut / len(samples)
            self.metrics["rollout/teacher_dropped"] = scored.dropped / len(samples)
        return Batch(scored.samples, pairs, self.rollout.temperature, of_teacher)


def problems_of_step(problems: ProblemSet, count: int, seed: int, step: int) -> list[Problem]:
    """Return the ``count`` problems of a step, shared among the environments by their ratios."""
    indices = environment_batches(
        list(problems.sizes.values()),
        [problems.ratio(name) for name in problems.sizes],
        count,
        seed,
        step - 1,
    )
    return [problems.practice[index] for index in indices]


@dataclass(frozen=True)
class Played:
    """A step's rollouts in environments by id, with reward and advantage, and their metrics.

    A rollout is several samples where its conversation branched. One that failed has none.
    """

    samples: Sequence[Sample] = ()
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, before answers to problems are graded; ``played`` are those by id."""

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    played: Played


def sample_step(
    engine: Engine, config: RolloutConfig, problems: Sequence[Problem], seed: int, step: int
) -> Sampled:
    """Sample answers to problems, and play tasks of environments by id. Steps count from 1."""
    parts = parts_of(problems)
    own, tasks = [*parts.problems.values()], [*parts.tasks.values()]
    rollouts = sample_rollouts(engine, config, own, seed, step) if own else []
    played = play(engine, config, tasks, seed, step, len(own)) if tasks else Played()
    return Sampled(own, rollouts, played)


def play(
    engine: Engine,
    config: RolloutConfig,
    tasks: Sequence[Task],
    seed: int,
    step: int,
    first_index: int = 0,
) -> Played:
    """Play ``group_size`` rollouts of each task; their prompts count from ``first_index``."""
    params = SamplingParams(
        temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens
    )
    of_rollout = [task for task in tasks for _ in range(config.group_size)]
    outcomes = given(engine.environments).run(
        engine.sampler, of_rollout, params, derive_seed(seed, "episodes", step)
    )
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if len(failures) == len(outcomes) and first_index == 0:
        raise EnvironmentFailed(
            f"step {step}: every rollout failed; the first, of "
            f"[environments.{tasks[0].environment}]: {failures[0].reason}"
        )
    samples: list[Sample] = []
    for index, task in enumerate(tasks):
        first = index * config.group_size
        group = [
            outcome
            for outcome in outcomes[first : first + config.group_size]
            if isinstance(outcome, Episode)
        ]
        for episode in group:
            advantage = episode.reward - sum(one.reward for one in group) / len(group)
            samples += [
                Sample(
                    replace(rollout, prompt_index=first_index + index),
                    task,
                    episode.text,
                    episode.reward,
                    advantage,
                    first=place == 0,
                )
                for place, rollout in enumerate(episode.rollouts)
            ]
    return Played(samples, episode_metrics(outcomes, engine.problems.tokenizer))


def episode_metrics(outcomes: Sequence[Episode | Failure], tokenizer: Any) -> dict[str, float]:
    """Return means per rollout that ended, and the share of those that failed."""
    episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
    count = len(episodes)
    failed = {"rollout/failed": 1 - count / len(outcomes)}
    if not episodes:
        return failed
    return failed | {
        "rollout/turns": sum(one.turns for one in episodes) / count,
        "rollout/tool_calls": sum(one.tool_calls for one in episodes) / count,
        "rollout/samples": sum(len(one.rollouts) for one in episodes) / count,
        "rollout/turn_limit": sum(one.limited for one in episodes) / count,
        "rollout/special_texts": sum(bool(marks_of(tokenizer, [one.told])) for one in episodes)
        / count,
    }


def sample_rollouts(
    engine: Engine, config: RolloutConfig, problems: Sequence[Problem], seed: int, step: int
) -> list[Rollout]:
    """Sample ``group_size`` rollouts for each problem.

    With ``student_fraction`` lambda below 1 (GKD, https://arxiv.org/abs/2306.13649, Alg. 1) each
    sequence is the student's with probability lambda. The paper draws once per step. Once per
    sequence has the same mean and less variance.
    """
    prompts = [engine.problems.prompt(problem) for problem in problems]
    params = SamplingParams(
        n=config.group_size,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
    )
    rollouts_seed = derive_seed(seed, "rollouts", step)
    if config.student_fraction == 1:
        return engine.sampler.generate(prompts, params, seed=rollouts_seed)
    coin = random.Random(derive_seed(seed, "student_fraction", step))
    sequences = [
        (index, coin.random() < config.student_fraction)
        for index in range(len(prompts))
        for _ in range(config.group_size)
    ]
    sampled_prompts = [prompts[index] for index, is_sampled in sequences if is_sampled]
    sampled: list[Rollout] = []
    params = replace(params, n=1)
    if sampled_prompts:
        sampled = engine.sampler.generate(sampled_prompts, params, seed=rollouts_seed)
    other_indices = [index for index, is_sampled in sequences if not is_sampled]
    if config.teacher_samples:
        others = teacher_rollouts(engine, params, problems, other_indices, seed, step)
    else:
        others = [engine.problems.solution(problems[index], index) for index in other_indices]
    remaining, remaining_others = iter(sampled), iter(others)
    return [
        replace(next(remaining), prompt_index=index) if is_sampled else next(remaining_others)
        for index, is_sampled in sequences
    ]


def teacher_rollouts(
    engine: Engine,
    params: SamplingParams,
    problems: Sequence[Problem],
    indices: Sequence[int],
    seed: int,
    step: int,
) -> list[Rollout]:
    """Let the teachers sample an answer to the problem at each index.

    Their log mu is NaN: no ratio of p to it is one of two policies.
    """
    assert engine.teachers is not None, "the recipe has a teacher that samples"
    draw = random.Random(derive_seed(seed, "teacher_of_rollout", step))
    writers: list[TeacherId] = []
    for index in indices:
        shares = engine.teachers.routing.of(problems[index])
        writers += draw.choices([*shares], [*shares.values()])
    answers: dict[int, Rollout] = {}
    for teacher in dict.fromkeys(writers):
        places = [place for place, writer in enumerate(writers) if writer == teacher]
        sampler = engine.teachers.scorers[teacher].sampler
        assert sampler is not None, "a teacher of its own can sample"
        rollouts = sampler.generate(
            [engine.problems.prompt(problems[indices[place]]) for place in places],
            params,
            seed=derive_seed(seed, f"rollouts of {teacher.table}", step),
        )
        own = [up_to_padding(rollout, engine.vocab_size, teacher) for rollout in rollouts]
        answers |= zip(places, own, strict=True)
    return [
        replace(
            answers[place],
            prompt_index=index,
            inference_logprobs=torch.full_like(answers[place].inference_logprobs, torch.nan),
            by_teacher=True,
        )
        for place, index in enumerate(indices)
    ]


def up_to_padding(rollout: Rollout, vocab_size: int, teacher: TeacherId) -> Rollout:
    """Return a teacher's answer as if cut at its first id that the student's head lacks."""
    places = lacking(rollout.token_ids, vocab_size).nonzero()
    if not len(places):
        return rollout
    end = int(places[0])
    if not rollout.loss_mask[:end].any():
        raise InvalidAnswer(
            f"[{teacher.table}] began an answer with id {int(rollout.token_ids[end])}, and the "
            f"student's head has {vocab_size} entries; choose a teacher with the student's "
            "vocabulary"
        )
    return replace(
        rollout,
        token_ids=rollout.token_ids[:end],
        loss_mask=rollout.loss_mask[:end],
        inference_logprobs=rollout.inference_logprobs[:end],
        finish_reason="length",
    )


def grade(
    tokenized: TokenizedProblems,
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    budget: TimeBudget | None = None,
) -> list[Sample]:
    """Return one sample per rollout, with text, reward and advantage."""
    of_rollout = [problems[rollout.prompt_index] for rollout in rollouts]
    texts = [
        # As the data has it: a chat template may write more around an answer.
        problem.answer if is_of_data(rollout) else tokenized.decode(rollout.completion_ids)
        for rollout, problem in zip(rollouts, of_rollout, strict=True)
    ]
    rewards = [
        tokenized.reward(text, problem, budget)
        for text, problem in zip(texts, of_rollout, strict=True)
    ]
    advantages = group_advantages([rollout.prompt_index for rollout in rollouts], rewards)
    return list(map(Sample, rollouts, of_rollout, texts, rewards, advantages))


def is_of_data(rollout: Rollout) -> bool:
    """Return whether nobody has sampled a rollout."""
    return not rollout.by_teacher and bool(rollout.inference_logprobs.isnan().all())


def group_advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Return reward minus the group's mean: prime-rl's default, GRPO without its division."""
    rewards_of_group: dict[int, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        rewards_of_group.setdefault(group, []).append(reward)
    means = {group: sum(own) / len(own) for group, own in rewards_of_group.items()}
    return [reward - means[group] for group, reward in zip(groups, rewards, strict=True)]


def pairs_of_step(
    engine: Engine, config: ReplayConfig, samples: Sequence[Sample], seed: int, step: int
) -> list[Pair]:
    """Return a step's preference pairs, of its own rollouts or of the recipe's file."""
    if config.source == "rollouts":
        return pairs_of_rollouts(samples, config.pairs_per_step)
    order = prompt_batches(len(engine.pairs), config.pairs_per_step, seed, step - 1)
    return [engine.pairs[index] for index in order]


def rollout_metrics(samples: Sequence[Sample], problem_set: ProblemSet) -> dict[str, float]:
    """Return mean reward, share of truncated rollouts and mean length; reward by environment."""
    rollouts = [sample for sample in samples if sample.first]
    count = len(rollouts)
    scored = [sample for sample in rollouts if problem_set.is_scored(sample.problem)]
    rewards = [sample.reward for sample in scored]
    truncated = sum(sample.rollout.finish_reason == "length" for sample in rollouts)
    tokens = Batch(samples).tokens
    metrics = {
        "rollout/truncated": truncated / count,
        "rollout/tokens": tokens / count,
    }
    if not scored:
        return metrics
    problems = [sample.problem for sample in scored]
    return {
        "rollout/reward": sum(rewards) / len(rewards),
        **metrics,
        **mean_by_environment("rollout/reward", problem_set.names, problems, rewards),
    }


def mean_by_environment(
    name: str,
    environments: Collection[str],
    problems: Sequence[Problem],
    values: Sequence[float],
    counts: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return ``name/ENVIRONMENT``, the mean over each one's problems; empty for a single one."""
    if len(environments) == 1:
        return {}
    means = {}
    for environment in environments:
        indices = [i for i, problem in enumerate(problems) if problem.environment == environment]
        count = len(indices) if counts is None else sum(counts[i] for i in indices)
        if count:
            means[f"{name}/{environment}"] = sum(values[i] for i in indices) / count
    return means


def derive_seed(seed: int, purpose: str, step: int) -> int:
    """Return a seed for one purpose and step, so that a resumed run has no generator to restore."""
    return random.Random(f"{seed}/{purpose}/{step}").getrandbits(31)
