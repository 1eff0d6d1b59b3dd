"""Measurement on held-out problems: greedy accuracy, and the exact reverse KL on the student's own rollouts."""

from collections.abc import Sequence
from typing import Literal

import torch

from prime_composer.backends.protocols import Sampler, SamplingParams
from prime_composer.divergences import reverse_kl
from prime_composer.local.engine import Engine, teacher_backend, teacher_sampler
from prime_composer.local.student_forward import micro_batches, student_inputs
from prime_composer.problems.answers import is_correct
from prime_composer.problems.config import Problem
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.schema import Recipe

FULL_VOCABULARY_UP_TO = 8192
"""Largest vocabulary whose reverse KL is measured in full under ``kl_support = "auto"``."""

KL_SEED = 20_251_017
"""Seed of the rollouts that measure the KL: the same draws at every evaluation of every run."""


def evaluate(engine: Engine, recipe: Recipe, held_out: Sequence[Problem]) -> dict[str, float]:
    """The student's greedy accuracy, the share of its answers that were cut off, and its reverse KL to the teacher; where
    there are several environments also accuracy and KL of each, as ``eval/accuracy/NAME``.

    The KL is a mean over the tokens of rollouts sampled at T = 1, top-p 1, from the current student:
    (1/N) sum_t sum_v p(v) (log p(v) - log q(v)), over the full vocabulary, or, with ``kl_support`` = K, on the teacher's
    top K and one tail bucket, which is a lower bound of it. Where teachers are mixed, q is the mixture; on a top K of it the
    number is no bound (see ``teachers.mix``).
    """
    problems = held_out[: recipe.eval.size]
    correct, truncated = greedy_answers(engine, engine.sampler, recipe, problems)
    measured = {
        "eval/accuracy": sum(correct) / len(correct),
        "eval/truncated": sum(truncated) / len(truncated),
    }
    measured |= by_environment("eval/accuracy", recipe, problems, correct)
    if engine.teachers is not None and recipe.eval.kl_size:
        problems = held_out[: recipe.eval.kl_size]
        total, tokens = reverse_kl_sums(engine, recipe, problems)
        measured["eval/reverse_kl"] = sum(total) / sum(tokens)
        measured |= by_environment("eval/reverse_kl", recipe, problems, total, tokens)
    return measured


def by_environment(
    name: str,
    recipe: Recipe,
    problems: Sequence[Problem],
    total: Sequence[float],
    count: Sequence[float] | None = None,
) -> dict[str, float]:
    """``name/ENVIRONMENT``: the mean over each environment's problems; nothing where there is a single one.

    Args:
        total: one per problem.
        count: what each of them is a sum over; 1 unless given.
    """
    if len(recipe.sources) == 1:
        return {}
    means = {}
    for environment in recipe.sources:
        mine = [
            index for index, problem in enumerate(problems) if problem.environment == environment
        ]
        if mine:
            over = len(mine) if count is None else sum(count[index] for index in mine)
            means[f"{name}/{environment}"] = sum(total[index] for index in mine) / over
    return means


def greedy_answers(
    engine: Engine,
    sampler: Sampler,
    recipe: Recipe,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]] | None = None,
) -> tuple[list[float], list[float]]:
    """Which of the greedy answers to some problems are correct, and which were cut off: 1 or 0.

    Args:
        prompts: what is read in the place of each problem's own prompt.
    """
    if prompts is None:
        prompts = [
            render_prompt(problem, recipe.data_of(problem), engine.tokenizer)
            for problem in problems
        ]
    params = SamplingParams(
        temperature=0.0, max_tokens=recipe.rollout.max_tokens, stop_token_ids=engine.stop_token_ids
    )
    rollouts = sampler.generate(prompts, params, seed=KL_SEED)
    correct = [
        float(is_correct(engine.decode(rollout), problem, recipe.data_of(problem)))
        for rollout, problem in zip(rollouts, problems, strict=True)
    ]
    return correct, [float(rollout.finish_reason == "length") for rollout in rollouts]


def teacher_accuracy(
    engine: Engine, recipe: Recipe, held_out: Sequence[Problem]
) -> dict[str, float]:
    """The teachers' own greedy accuracy: of a policy teacher the policy's own, told everything.

    Of several teachers, each one's on the problems that it has a share in, as ``teacher/NAME/accuracy``; and over all
    problems, and those of each environment, where each problem has a single teacher.
    """
    problems = held_out[: recipe.eval.size]
    if engine.policy_teacher is not None:
        prompts = [engine.policy_teacher.best_prompt(problem) for problem in problems]
        correct, _ = greedy_answers(engine, engine.sampler, recipe, problems, prompts)
        return {"teacher/accuracy": sum(correct) / len(correct)}
    if engine.teachers is None:
        return {}
    measured: dict[str, float] = {}
    shares = [recipe.mixture(problem) for problem in problems]
    correct = [0.0] * len(problems)
    for role, scorer in engine.teachers.scorers.items():
        mine = [index for index, share in enumerate(shares) if role in share]
        if not mine:
            continue
        sampler = teacher_sampler(scorer, recipe.scored_by[role], recipe)
        answers, _ = greedy_answers(engine, sampler, recipe, [problems[index] for index in mine])
        for index, answer in zip(mine, answers, strict=True):
            correct[index] = answer
        if recipe.teachers:
            measured[f"teacher/{role.removeprefix('teachers.')}/accuracy"] = sum(answers) / len(
                answers
            )
    if all(len(share) == 1 for share in shares):
        measured["teacher/accuracy"] = sum(correct) / len(correct)
        measured |= by_environment("teacher/accuracy", recipe, problems, correct)
    return measured


@torch.no_grad()
def reverse_kl_sums(
    engine: Engine, recipe: Recipe, problems: Sequence[Problem]
) -> tuple[list[float], list[float]]:
    """KL(student || teacher) in nats, summed over the tokens of one rollout of each problem, and how many those are."""
    prompts = [
        render_prompt(problem, recipe.data_of(problem), engine.tokenizer) for problem in problems
    ]
    size = kl_support(engine, recipe)
    params = SamplingParams(
        max_tokens=recipe.rollout.max_tokens, stop_token_ids=engine.stop_token_ids
    )
    rollouts = engine.sampler.generate(prompts, params, seed=KL_SEED)
    scores = engine.teachers.score(rollouts, problems, size)
    total = [0.0] * len(rollouts)
    for indices in micro_batches(rollouts, recipe.trainer.micro_batch_tokens):
        inputs = student_inputs(
            engine.model, [rollouts[i] for i in indices], [scores[i] for i in indices]
        )
        kl = reverse_kl(
            inputs.support.student_logprobs,
            inputs.support.teacher_logprobs,
            normalization="full" if size == "full" else "tail",
        )
        sums = torch.zeros(len(indices), dtype=torch.float64).index_add_(
            0, inputs.segment_ids.cpu(), kl.double().cpu()
        )
        for index, value in zip(indices, sums.tolist(), strict=True):
            total[index] = value
    return total, [float(rollout.loss_mask.sum()) for rollout in rollouts]


def kl_support(engine: Engine, recipe: Recipe) -> int | Literal["full"]:
    """Ids per position of the measured KL. A server answers as many as the loss asks for, or vLLM's default of 20."""
    size = recipe.eval.kl_support
    if size != "auto":
        return size
    if any(teacher_backend(teacher, recipe) == "server" for teacher in recipe.scored_by.values()):
        return recipe.loss.support_size or 20
    return "full" if engine.vocab_size <= FULL_VOCABULARY_UP_TO else 64
