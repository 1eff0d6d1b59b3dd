"""Collect the batch of one step: sample, grade, pair and score rollouts."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.local.batch import Batch, Pair, Sample
from prime_composer.local.clock import Clock
from prime_composer.local.engine import Engine
from prime_composer.local.replay import pairs_of_rollouts
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.order import environment_batches, prompt_batches
from prime_composer.recipe.schema import Recipe, ReplayConfig, RolloutConfig


def collect(
    engine: Engine, recipe: Recipe, step: int, clock: Clock
) -> tuple[Batch, dict[str, float]]:
    """Collect a step's batch.

    Args:
        engine: the open models.
        recipe: its ``[trainer]``, ``[rollout]`` and ``[replay]`` tables are read.
        step: from 1.
        clock: measures sampling, grading and scoring.

    Returns:
        The samples with the teacher's scores and the preference pairs, and what was measured.
    """
    seed, group_size = recipe.trainer.seed, recipe.rollout.group_size
    prompts_per_step = recipe.trainer.batch_size // group_size
    problems = problems_of_step(engine.problems.problem_set, prompts_per_step, seed, step)
    rollouts = sample_rollouts(engine, recipe.rollout, problems, seed, step)
    clock.lap("sample")
    budget = TimeBudget()
    samples = grade(engine.problems, rollouts, problems, budget)
    pairs: Sequence[Pair] = ()
    if "replay" in recipe.loss.needs:
        pairs = pairs_of_step(engine, recipe.replay, samples, seed, step)
    sources = engine.problems.problem_set.sources
    metrics = rollout_metrics(samples, sources)
    if any(source.answer_check == "math_verify" for source in sources.values()):
        metrics["rollout/answer_timeouts"] = float(budget.timeouts)
    clock.lap("reward")
    scored = engine.score(samples)
    clock.lap("score")
    if scored.without_hint:
        metrics["rollout/without_hint"] = scored.without_hint / len(samples)
    teachers = [*recipe.teachers.values(), *([recipe.teacher] if recipe.teacher else [])]
    if any(teacher.on_overflow != "error" for teacher in teachers):
        metrics["rollout/teacher_cut"] = scored.cut / len(samples)
        metrics["rollout/teacher_dropped"] = scored.dropped / len(samples)
    return Batch(scored.samples, pairs), metrics


def problems_of_step(problems: ProblemSet, count: int, seed: int, step: int) -> list[Problem]:
    """Return the ``count`` problems of a step, shared among the environments by their ratios."""
    sizes = Counter(problem.environment for problem in problems.practice)
    indices = environment_batches(
        [sizes[name] for name in problems.sources],
        [source.ratio for source in problems.sources.values()],
        count,
        seed,
        step - 1,
    )
    return [problems.practice[index] for index in indices]


def sample_rollouts(
    engine: Engine, config: RolloutConfig, problems: Sequence[Problem], seed: int, step: int
) -> list[Rollout]:
    """Sample ``group_size`` rollouts for each problem.

    With ``student_fraction`` lambda below 1 (GKD, https://arxiv.org/abs/2306.13649, Alg. 1) each
    sequence is sampled with probability lambda. Otherwise it is the data's solution. The paper
    draws once per step. Drawing once per sequence has the same mean and less variance.
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
    if sampled_prompts:
        params = replace(params, n=1)
        sampled = engine.sampler.generate(sampled_prompts, params, seed=rollouts_seed)
    remaining = iter(sampled)
    return [
        replace(next(remaining), prompt_index=index)
        if is_sampled
        else engine.problems.solution(problems[index], index)
        for index, is_sampled in sequences
    ]


def grade(
    tokenized: TokenizedProblems,
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    budget: TimeBudget | None = None,
) -> list[Sample]:
    """Return one sample per rollout, with text, reward and advantage.

    Args:
        tokenized: decodes and checks answers.
        rollouts: the step's rollouts.
        problems: the step's problems, indexed by ``Rollout.prompt_index``.
        budget: time for answers that Math-Verify does not finish; it counts them.
    """
    samples = []
    for rollout in rollouts:
        problem = problems[rollout.prompt_index]
        text = tokenized.decode(rollout.completion_ids)
        samples.append(Sample(rollout, problem, text, tokenized.reward(text, problem, budget)))
    return with_advantages(samples)


def with_advantages(samples: Sequence[Sample]) -> list[Sample]:
    """Set each advantage to the reward minus the mean reward of the group.

    This is prime-rl's default: GRPO without the division by the standard deviation.
    """
    rewards_of_group: dict[int, list[float]] = {}
    for sample in samples:
        rewards_of_group.setdefault(sample.rollout.prompt_index, []).append(sample.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in rewards_of_group.items()}
    return [
        replace(sample, advantage=sample.reward - means[sample.rollout.prompt_index])
        for sample in samples
    ]


def pairs_of_step(
    engine: Engine, config: ReplayConfig, samples: Sequence[Sample], seed: int, step: int
) -> list[Pair]:
    """Return a step's preference pairs, of its own rollouts or of the recipe's file."""
    if config.source == "rollouts":
        return pairs_of_rollouts(samples, config.pairs_per_step)
    order = prompt_batches(len(engine.pairs), config.pairs_per_step, seed, step - 1)
    return [engine.pairs[index] for index in order]


def rollout_metrics(
    samples: Sequence[Sample], environments: Mapping[str, object]
) -> dict[str, float]:
    """Return mean reward, share of truncated rollouts and mean length; reward by environment."""
    count = len(samples)
    rewards = [sample.reward for sample in samples]
    truncated = sum(sample.rollout.finish_reason == "length" for sample in samples)
    tokens = Batch(samples).tokens
    metrics = {
        "rollout/reward": sum(rewards) / count,
        "rollout/truncated": truncated / count,
        "rollout/tokens": tokens / count,
    }
    problems = [sample.problem for sample in samples]
    return metrics | mean_by_environment("rollout/reward", environments, problems, rewards)


def mean_by_environment(
    name: str,
    environments: Mapping[str, object],
    problems: Sequence[Problem],
    values: Sequence[float],
    counts: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return ``name/ENVIRONMENT``, the mean over each environment's problems.

    Empty where the recipe has a single environment. An environment without a problem is left out.

    Args:
        name: of the metric.
        environments: the recipe's environments by name.
        problems: what was measured.
        values: one per problem, a sum over ``counts`` items.
        counts: one per problem; 1 unless given.
    """
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
