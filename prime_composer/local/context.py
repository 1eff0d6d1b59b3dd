"""What fits the context of a run's engines: prompts with completions, hints, the data's answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prime_composer.backends.protocols import Limits
from prime_composer.backends.transformers import window
from prime_composer.local.requirements import local_models
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.step.overflow import Rule
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.policy import PolicyTeacher

PromptOf = Callable[[Problem], Sequence[int]]  # Returns a problem's prompt as somebody reads it

RESERVED = {"student's sampler": 0, "teacher's scorer": 1}
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


def check_prompts(
    reader: str,
    limit: int | None,
    prompt_of: PromptOf,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
) -> None:
    """Check that the longest prompt and a completion fit the context of a key of ``RESERVED``."""
    if not (problems or held_out):
        raise PreflightError("There is no prompt to sample from; check [data].")
    for kind, asked in (("prompt", problems), ("held-out prompt", held_out)):
        lengths = [len(prompt_of(problem)) for problem in asked]
        if 0 in lengths:
            raise PreflightError(
                f"One of the {kind}s has no tokens; check the data and the prompt template in "
                "[data]."
            )
        needed = max(lengths, default=0) + config.max_tokens
        if limit is not None and lengths and needed > limit - RESERVED[reader]:
            raise PreflightError(
                f"The longest {kind} has {max(lengths)} tokens, with {config.max_tokens} new ones "
                f"that is {needed}, and the {reader} takes {limit - RESERVED[reader]}; raise "
                "rollout.max_model_len (a server's --max-model-len) to "
                f"{needed + RESERVED[reader]} where the model's window has room for it, lower "
                "rollout.max_tokens, or shorten the prompts ([data] prompt_chars)."
            )


def check_read_by_teacher(
    teacher: TeacherId,
    limits: Limits,
    rule: Rule,
    tokenized: TokenizedProblems,
    prompt_of: PromptOf,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
) -> None:
    """Check that prompts and completions, or the data's solutions, fit a teacher's context.

    By another ``rule`` than "error" a longer rollout is cut or dropped.
    """
    limit = limits.max_model_len if rule == "error" else None
    if problems and config.trains_on_data and limit is not None:
        longest = max(
            len(prompt_of(problem)) + len(tokenized.solution(problem).completion_ids)
            for problem in problems
        )
        if longest >= limit:
            raise PreflightError(
                f"The longest solution of the data has {longest} tokens with its prompt, and the "
                f"{teacher.display} takes {limit - 1}; raise rollout.max_model_len (a server's "
                f"--max-model-len) to {longest + 1}, set rollout.student_fraction = 1, or leave "
                "such problems out of the data."
            )
    if problems or held_out:
        check_prompts("teacher's scorer", limit, prompt_of, problems, held_out, config)


def check_hinted_prompts(
    policy: PolicyTeacher,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
    positions: int,
) -> None:
    """Check that the longest prompt with its hint and a full response fit the context."""
    max_tokens, limit = config.max_tokens, config.context()
    if policy.config.hint == "sibling":  # a rollout's text, which may take all of max_tokens
        hinted = max(len(policy.prompt(problem, "")) for problem in problems) + max_tokens
    else:
        hinted = max(len(policy.best_prompt(problem)) for problem in problems)
    attempt = max_tokens if "{attempt}" in policy.config.text else 0
    best = max((len(policy.best_prompt(problem)) for problem in held_out), default=0)
    for kind, prompt, needed, parts in (
        ("prompt", hinted, hinted + attempt + max_tokens, "attempt and response"),
        ("held-out prompt", best, best + max_tokens, "a response"),
    ):
        if needed > min(limit, positions):
            raise PreflightError(
                f"The longest {kind} with its hint has {prompt} tokens, with {parts} up to "
                f"{needed}, and the context has {limit}, the student {positions} positions; raise "
                f"rollout.max_model_len to {needed}, shorten the hint's template, or lower "
                "rollout.max_tokens."
            )
