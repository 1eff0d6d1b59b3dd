"""Collect the batch of one step: sample, grade and score rollouts."""

import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.contract import given
from prime_composer.environments.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.environments.tasks import Task, problems_and_tasks
from prime_composer.local.engine import Engine
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.order import environment_batches
from prime_composer.problems.prompts import marks_of
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.scoring.shared_vocabulary import lacking
from prime_composer.step.balance import balanced, share_metrics
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.collapse import collapse_metrics, end_metrics
from prime_composer.step.overflow import head_of

if TYPE_CHECKING:
    from prime_composer.local.watch import Watch


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


class Weights(NamedTuple):
    """The student after a step, or a copy of it as it was then."""

    step: int  # finished steps
    model: nn.Module


@dataclass(frozen=True, eq=False)
class Collected:
    """A step's batch, the metrics of its rollouts and scores, and the seconds that they took."""

    batch: Batch
    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass
class Collector:
    """Collects a run's batches: for each ``problems``, ``sample``, ``grade`` and ``score``."""

    engine: Engine
    recipe: Recipe
    clock: Clock = field(default_factory=Clock)  # of the step under way
    metrics: dict[str, float] = field(default_factory=dict)  # what was measured in it
    # number of this island, from 0, and how many there are; None without islands
    island: tuple[int, int] | None = None
    watch: "Watch | None" = None  # None outside of a run

    def collect(self, step: int, weights: Weights, clock: Clock) -> Collected:
        """Return the batch of a step, sampled by the weights that the sampler has.

        Teachers and sampler are checked after the batch is scored and before it trains: one that
        was exchanged while it answered is seen as well.
        """
        # A collector of this step alone: the run's would keep a copy of the student alive.
        engine = replace(self.engine, model=weights.model)
        own = replace(self, engine=engine, clock=clock, metrics={})
        batch = own.score(own.grade(own.sample(own.problems(step), step)), step)
        if self.watch is not None:
            with clock.phase("checks"):
                self.watch.check(weights.step, student=weights.model)
        return Collected(batch, own.metrics, clock.laps)

    def undivided(self, step: int) -> int:
        """Return the step of one undivided run whose problems and seeds are this island's."""
        index, islands = self.island or (0, 1)
        return (step - 1) * islands + index + 1

    def problems(self, step: int) -> list[Problem]:
        """Return the problems of a step, shared among the environments by their ratios."""
        problems, seed = self.engine.problems.problem_set, self.recipe.trainer.seed
        count = self.recipe.trainer.batch_size // self.recipe.rollout.group_size
        sizes, ratios = [*problems.sizes.values()], [*map(problems.ratio, problems.sizes)]
        chosen = environment_batches(sizes, ratios, count, seed, self.undivided(step) - 1)
        return [problems.practice[index] for index in chosen]

    def sample(self, problems: Sequence[Problem], step: int) -> list[Sample]:
        """Sample answers to the problems, and play tasks of environments by id, with their reward.

        A task's rollout is several samples where its conversation branched; one that failed has
        none.
        """
        parts = problems_and_tasks(problems)
        own, tasks = [*parts.problems.values()], [*parts.tasks.values()]
        samples: list[Sample] = []
        with self.clock.phase("sample"):
            if own:
                samples += [Sample(one, own[one.prompt_index]) for one in self.answers(own, step)]
            if tasks:
                samples += self.play(tasks, step, len(own))
        return samples

    def answers(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        """Sample ``group_size`` rollouts for each problem.

        With ``student_fraction`` lambda below 1 (GKD, https://arxiv.org/abs/2306.13649, Alg. 1)
        each sequence is the student's with probability lambda. The paper draws once per step. Once
        per sequence has the same mean and less variance.
        """
        engine, config, params = self.engine, self.recipe.rollout, self.params
        prompts = [engine.problems.prompt(problem) for problem in problems]
        seed = self.seed("rollouts", step)
        if config.student_fraction == 1:
            return engine.sampler.generate(prompts, params, seed=seed)
        coin = random.Random(self.seed("student_fraction", step))
        draws = [
            (index, coin.random() < config.student_fraction)
            for index in range(len(prompts))
            for _ in range(config.group_size)
        ]
        own = [index for index, is_sampled in draws if is_sampled]
        other = [index for index, is_sampled in draws if not is_sampled]
        sampled: list[Rollout] = []
        if own:
            asked = [prompts[index] for index in own]
            sampled = engine.sampler.generate(asked, replace(params, n=1), seed=seed)
            sampled = [replace(one, prompt_index=i) for one, i in zip(sampled, own, strict=True)]
        if config.teacher_samples:
            others = self.answers_of_teachers(problems, other, step)
        else:
            others = [engine.problems.solution(problems[index], index) for index in other]
        students, rest = iter(sampled), iter(others)
        return [next(students if is_sampled else rest) for _, is_sampled in draws]

    def answers_of_teachers(
        self, problems: Sequence[Problem], indices: Sequence[int], step: int
    ) -> list[Rollout]:
        """Let the teachers sample an answer to the problem at each index.

        Their log mu is NaN: no ratio of p to it is one of two policies.
        """
        engine, teachers = self.engine, given(self.engine.teachers)
        draw = random.Random(self.seed("teacher_of_rollout", step))
        places_of: dict[TeacherId, list[int]] = defaultdict(list)
        for place, index in enumerate(indices):
            shares = teachers.routing.of(problems[index])
            places_of[draw.choices([*shares], [*shares.values()])[0]].append(place)
        answers: dict[int, Rollout] = {}
        for teacher, places in places_of.items():
            prompts = [engine.problems.prompt(problems[indices[place]]) for place in places]
            seed = self.seed(f"rollouts of {teacher.table}", step)
            sampler = given(teachers.scorers[teacher].sampler)
            sampled = sampler.generate(prompts, replace(self.params, n=1), seed)
            for place, rollout in zip(places, sampled, strict=True):
                rollout = up_to_padding(rollout, engine.vocab_size, teacher)
                unknown = torch.full_like(rollout.inference_logprobs, torch.nan)
                rollout = replace(rollout, inference_logprobs=unknown, by_teacher=True)
                answers[place] = replace(rollout, prompt_index=indices[place])
        return [answers[place] for place in range(len(indices))]

    def play(self, tasks: Sequence[Task], step: int, first_index: int) -> list[Sample]:
        """Play ``group_size`` rollouts of each task; their prompts count from ``first_index``."""
        engine, size = self.engine, self.recipe.rollout.group_size
        of_rollout = [task for task in tasks for _ in range(size)]
        params, seed = replace(self.params, n=1), self.seed("episodes", step)
        outcomes = given(engine.environments).run(engine.sampler, of_rollout, params, seed)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if len(failures) == len(outcomes) and first_index == 0:
            raise EnvironmentFailed(
                f"step {step}: every rollout failed; the first, of "
                f"[environments.{tasks[0].environment}]: {failures[0].reason}"
            )
        samples: list[Sample] = []
        for index, task in enumerate(tasks):
            played = outcomes[index * size : (index + 1) * size]
            group = [outcome for outcome in played if isinstance(outcome, Episode)]
            advantages = group_advantages([index] * len(group), [one.reward for one in group])
            for episode, advantage in zip(group, advantages, strict=True):
                graded = (episode.text, episode.reward, advantage)
                for place, rollout in enumerate(episode.rollouts):
                    rollout = replace(rollout, prompt_index=first_index + index)
                    samples.append(Sample(rollout, task, *graded, first=place == 0))
        self.metrics |= episode_metrics(outcomes, engine.problems.tokenizer)
        return samples

    @property
    def params(self) -> SamplingParams:
        """How the recipe samples a group."""
        config = self.recipe.rollout
        return SamplingParams(
            config.group_size, config.temperature, config.top_p, config.max_tokens
        )

    def seed(self, purpose: str, step: int) -> int:
        """Return a seed for one purpose and step: a resumed run has no generator to restore."""
        text = f"{self.recipe.trainer.seed}/{purpose}/{self.undivided(step)}"
        return random.Random(text).getrandbits(31)

    def grade(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the rollouts with text, reward and advantage."""
        budget, problem_set = TimeBudget(), self.engine.problems.problem_set
        answers = [sample for sample in samples if not isinstance(sample.problem, Task)]
        played = [sample for sample in samples if isinstance(sample.problem, Task)]
        with self.clock.phase("reward"):
            samples = [*grade(self.engine.problems, answers, budget), *played]
            self.metrics |= rollout_metrics(samples, problem_set) | collapse_metrics(samples)
        if any(source.metric == "math_verify" for source in problem_set.sources.values()):
            self.metrics["rollout/answer_timeouts"] = float(budget.timeouts)
        return samples

    def score(self, samples: Sequence[Sample], step: int) -> Batch:
        """Return the samples with the teacher's scores."""
        engine, loss = self.engine, self.engine.loss
        with self.clock.phase("score"):
            scored, metrics = engine.score(samples)
            if loss.balance is not None:
                scored = balanced(scored, loss.balance)
        of_teacher = engine.reward_scale is None
        self.metrics |= metrics | end_metrics(scored, of_teacher) | share_metrics(scored)
        return Batch(scored, self.recipe.rollout.temperature, of_teacher)


def episode_metrics(outcomes: Sequence[Episode | Failure], tokenizer: Any) -> dict[str, float]:
    """Return means per rollout that ended, and the share of those that failed."""
    episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
    failed = {"rollout/failed": 1 - len(episodes) / len(outcomes)}
    if not episodes:
        return failed
    return failed | {
        "rollout/turns": fmean(one.turns for one in episodes),
        "rollout/tool_calls": fmean(one.tool_calls for one in episodes),
        "rollout/samples": fmean(len(one.rollouts) for one in episodes),
        "rollout/turn_limit": fmean(one.limited for one in episodes),
        "rollout/special_texts": fmean(bool(marks_of(tokenizer, [one.told])) for one in episodes),
    }


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
    return head_of(rollout, end)


def grade(
    tokenized: TokenizedProblems, samples: Sequence[Sample], budget: TimeBudget | None = None
) -> list[Sample]:
    """Return answers to problems with text, reward and advantage."""
    rollouts = [sample.rollout for sample in samples]
    problems = [sample.problem for sample in samples]
    texts = [
        # As the data has it: a chat template may write more around an answer.
        problem.answer
        if not rollout.by_teacher and rollout.inference_logprobs.isnan().all()
        else tokenized.decode(rollout.completion_ids)
        for rollout, problem in zip(rollouts, problems, strict=True)
    ]
    rewards = [
        tokenized.reward(text, problem, budget)
        for text, problem in zip(texts, problems, strict=True)
    ]
    advantages = group_advantages([rollout.prompt_index for rollout in rollouts], rewards)
    return list(map(Sample, rollouts, problems, texts, rewards, advantages))


def group_advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Return reward minus the group's mean: prime-rl's default, GRPO without its division."""
    of_group: dict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        of_group[group].append(reward)
    means = {group: sum(own) / len(own) for group, own in of_group.items()}
    return [reward - means[group] for group, reward in zip(groups, rewards, strict=True)]


def rollout_metrics(samples: Sequence[Sample], problem_set: ProblemSet) -> dict[str, float]:
    """Return mean reward (also by environment), share of truncated rollouts and mean length."""
    rollouts = [sample for sample in samples if sample.first]
    metrics = {
        "rollout/truncated": fmean(one.rollout.finish_reason == "length" for one in rollouts),
        "rollout/tokens": Batch(samples).tokens / len(rollouts),
    }
    scored = [sample for sample in rollouts if problem_set.is_scored(sample.problem)]
    if not scored:
        return metrics
    problems, rewards = [one.problem for one in scored], [one.reward for one in scored]
    by_environment = mean_by_environment("rollout/reward", problem_set.names, problems, rewards)
    return {"rollout/reward": sum(rewards) / len(rewards), **metrics, **by_environment}


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
