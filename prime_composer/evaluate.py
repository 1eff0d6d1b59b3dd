"""Measurement on held-out problems: greedy accuracy, and the exact reverse KL on the student's own rollouts."""

from collections.abc import Sequence
from typing import Literal

import torch

from prime_composer.data import Problem, is_correct, render_prompt
from prime_composer.divergences import reverse_kl
from prime_composer.engine import Engine, teacher_backend, teacher_sampler
from prime_composer.recipe import Recipe
from prime_composer.rollout import Sampler, SamplingParams
from prime_composer.student import micro_batches, student_inputs

FULL_VOCABULARY_UP_TO = 8192
"""Largest vocabulary whose reverse KL is measured in full under ``kl_support = "auto"``."""

KL_SEED = 20_251_017
"""Seed of the rollouts that measure the KL: the same draws at every evaluation of every run."""


def evaluate(engine: Engine, recipe: Recipe, held_out: Sequence[Problem]) -> dict[str, float]:
    """The student's greedy accuracy, the share of its answers that were cut off, and its reverse KL to the teacher.

    The KL is a mean over the tokens of rollouts sampled at T = 1, top-p 1, from the current student:
    (1/N) sum_t sum_v p(v) (log p(v) - log q(v)), over the full vocabulary, or, with ``kl_support`` = K, on the teacher's
    top K and one tail bucket, which is a lower bound of it.
    """
    accuracy, truncated = greedy_accuracy(engine, engine.sampler, recipe, held_out)
    measured = {"eval/accuracy": accuracy, "eval/truncated": truncated}
    if engine.scorer is not None and recipe.eval.kl_size:
        measured["eval/reverse_kl"] = mean_reverse_kl(engine, recipe, held_out)
    return measured


def greedy_accuracy(
    engine: Engine,
    sampler: Sampler,
    recipe: Recipe,
    held_out: Sequence[Problem],
    prompts: Sequence[Sequence[int]] | None = None,
) -> tuple[float, float]:
    """Share of correct, and of truncated, greedy answers to the first ``eval.size`` held-out problems.

    Args:
        prompts: what is read in the place of each problem's own prompt.
    """
    problems = held_out[: recipe.eval.size]
    if prompts is None:
        prompts = [render_prompt(problem, recipe.data, engine.tokenizer) for problem in problems]
    params = SamplingParams(temperature=0.0, max_tokens=recipe.rollout.max_tokens, stop_token_ids=engine.stop_token_ids)
    rollouts = sampler.generate(prompts, params, seed=KL_SEED)
    correct = [is_correct(engine.decode(r), problems[r.prompt_index], recipe.data) for r in rollouts]
    truncated = [rollout.finish_reason == "length" for rollout in rollouts]
    return sum(correct) / len(correct), sum(truncated) / len(truncated)


def teacher_accuracy(engine: Engine, recipe: Recipe, held_out: Sequence[Problem]) -> dict[str, float]:
    """The teacher's own greedy accuracy: of a policy teacher the policy's own, told everything."""
    prompts = None
    if engine.policy_teacher is not None:
        sampler = engine.sampler
        prompts = [engine.policy_teacher.best_prompt(problem) for problem in held_out[: recipe.eval.size]]
    else:
        sampler = teacher_sampler(engine, recipe)
    if sampler is None:
        return {}
    return {"teacher/accuracy": greedy_accuracy(engine, sampler, recipe, held_out, prompts)[0]}


@torch.no_grad()
def mean_reverse_kl(engine: Engine, recipe: Recipe, held_out: Sequence[Problem]) -> float:
    """Mean KL(student || teacher) per token, in nats, on rollouts of the first ``eval.kl_size`` held-out problems."""
    prompts = [render_prompt(problem, recipe.data, engine.tokenizer) for problem in held_out[: recipe.eval.kl_size]]
    size = kl_support(engine, recipe)
    params = SamplingParams(max_tokens=recipe.rollout.max_tokens, stop_token_ids=engine.stop_token_ids)
    rollouts = engine.sampler.generate(prompts, params, seed=KL_SEED)
    scores = engine.scorer.score(rollouts, size)
    total = tokens = 0.0
    for indices in micro_batches(rollouts, recipe.trainer.micro_batch_tokens):
        inputs = student_inputs(engine.model, [rollouts[i] for i in indices], [scores[i] for i in indices])
        kl = reverse_kl(
            inputs.support.student_logprobs,
            inputs.support.teacher_logprobs,
            normalization="full" if size == "full" else "tail",
        )
        total += float(kl.double().sum())
        tokens += kl.shape[0]
    return total / tokens


def kl_support(engine: Engine, recipe: Recipe) -> int | Literal["full"]:
    """Ids per position of the measured KL. A server answers as many as the loss asks for, or vLLM's default of 20."""
    size = recipe.eval.kl_support
    if size != "auto":
        return size
    if teacher_backend(recipe) == "server":
        return recipe.loss.support_size or 20
    return "full" if engine.vocab_size <= FULL_VOCABULARY_UP_TO else 64
