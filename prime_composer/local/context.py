"""What fits the context of a run's engines: prompts with completions, hints, the data's answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prime_composer.backends.transformers import window
from prime_composer.local.requirements import local_models
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import Recipe
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.policy import PolicyTeacher

PromptOf = Callable[[Problem], Sequence[int]]  # Returns a problem's prompt as somebody reads it

RESERVED = {"student's sampler": 0, "student with a hint": 0, "teacher's scorer": 1}
"""Tokens of a context that its reader does not take: a scorer on vLLM reads one less."""


def context_of(
    recipe: Recipe, tokenized: TokenizedProblems, paths: Mapping[str, Path | None]
) -> int:
    """Return the context of a run's engines, also where the recipe sets none."""
    rollout = recipe.rollout
    if rollout.max_model_len is not None:
        return rollout.max_model_len
    problem_set = tokenized.problem_set
    prompts = map(tokenized.prompt, (*problem_set.practice, *problem_set.held_out))
    needed = max(map(len, prompts), default=0) + rollout.max_tokens + RESERVED["teacher's scorer"]
    # A teacher that reads the head of a long rollout, or leaves it out, limits nobody else.
    origins = (
        paths.get(table) if config.model is None else config.model
        for table, config, _ in local_models(recipe)
        if getattr(config, "on_overflow", "error") == "error"
    )
    return rollout.context(needed, [window(one) for one in origins if one is not None])


def check_fits(
    reader: str, limit: int | None, lengths: Mapping[str, Sequence[int]], answer: int
) -> None:
    """Check that the longest text of each kind, and ``answer`` tokens behind it, fit a context.

    ``lengths`` are in tokens, by kind; ``limit`` None holds any.
    """
    room = None if limit is None else limit - RESERVED[reader]
    for kind, own in lengths.items():
        longest = max(own, default=0)
        if room is not None and longest and longest + answer > room:
            raise PreflightError(
                f"The longest {kind} has {longest} tokens, with {answer} new ones that is "
                f"{longest + answer}, and the {reader} takes {room}; raise rollout.max_model_len "
                f"(a server's --max-model-len) to {longest + answer + RESERVED[reader]} where the "
                "model's window has room for it, lower rollout.max_tokens, shorten prompts ([data] "
                "prompt_chars) and templates, or leave such problems out of the data."
            )


def prompt_lengths(
    prompt_of: PromptOf, problems: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, list[int]]:
    """Return the tokens of prompts as somebody reads them, by kind."""
    asked = {"prompt": problems, "held-out prompt": held_out}
    return {kind: [len(prompt_of(one)) for one in own] for kind, own in asked.items()}


def hinted_lengths(
    policy: PolicyTeacher,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    max_tokens: int,
) -> dict[str, list[int]]:
    """Return the most tokens of prompts with their hints, by kind."""
    attempt = max_tokens if "{attempt}" in policy.config.text else 0
    hinted = [len(policy.best_prompt(problem)) for problem in problems]
    if policy.config.hint == "sibling":  # a rollout's text, which may take all of max_tokens
        hinted = [len(policy.prompt(problem, "")) + max_tokens for problem in problems]
    return {
        "prompt with its hint": [one + attempt for one in hinted],
        "held-out prompt with its hint": [len(policy.best_prompt(one)) for one in held_out],
    }
