"""Convert problems to token ids and completions to text, and grade answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_composer.backends.hf_model import window
from prime_composer.backends.protocols import Rollout
from prime_composer.environments.tasks import Task
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.metrics import reward
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.model import ModelConfig
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.step.replay import response


@dataclass(frozen=True, eq=False)
class TokenizedProblems:
    """The problems of a recipe in the student's tokens.

    Attributes:
        problem_set: the problems, and how each environment asks and checks them.
        tokenizer: the student's tokenizer.
    """

    problem_set: ProblemSet
    tokenizer: Any
    _prompts: dict[Problem, list[int]] = field(default_factory=dict, repr=False)

    def prompt(self, problem: Problem) -> list[int]:
        """Return the token ids of the problem's prompt.

        Of a task they are those of its first messages, without its tools. Sizes and engines are
        checked with them, and nothing is trained on them.
        """
        if problem not in self._prompts:
            if isinstance(problem, Task):
                ids = self.tokenizer.apply_chat_template(
                    json.loads(problem.messages),
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
                self._prompts[problem] = list(ids)
            else:
                config = self.problem_set.config_of(problem)
                self._prompts[problem] = render_prompt(problem, config, self.tokenizer)
        return self._prompts[problem]

    def solution(self, problem: Problem, prompt_index: int = 0) -> Rollout:
        """Return the data's solution of a problem in the form of a rollout."""
        config = self.problem_set.config_of(problem)
        prompt = self.prompt(problem)
        return response(prompt, problem.answer, config, self.tokenizer, prompt_index)

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return a completion as text, without special tokens."""
        return self.tokenizer.decode(completion_ids, skip_special_tokens=True)

    def reward(self, text: str, problem: Problem, budget: TimeBudget | None = None) -> float:
        """Return the reward of an answer to the problem: 1.0 or 0.0, or a graded metric's value.

        Args:
            text: the answer.
            problem: the problem.
            budget: time for the answers of a step that Math-Verify does not finish.
        """
        return reward(text, problem, self.problem_set.config_of(problem), budget)


def context_of(
    rollout: RolloutConfig,
    tokenized: TokenizedProblems,
    models: Iterable[tuple[str, ModelConfig, str]],
    paths: Mapping[str, Path | None],
) -> int:
    """Return the context of a run's engines, also where the recipe sets none.

    Args:
        rollout: ``[rollout]``.
        tokenized: the problems.
        models: table and config of the models on this machine, with their backends.
        paths: directories of the prepared ones, by table.
    """
    if rollout.max_model_len is not None:
        return rollout.max_model_len
    problem_set = tokenized.problem_set
    prompts = map(tokenized.prompt, (*problem_set.practice, *problem_set.held_out))
    # A scorer on vLLM reads one token less.
    needed = max(map(len, prompts), default=0) + rollout.max_tokens + 1
    # A teacher that reads the head of a long rollout, or leaves it out, limits nobody else.
    origins = (
        paths.get(table) if config.model is None else config.model
        for table, config, _ in models
        if getattr(config, "on_overflow", "error") == "error"
    )
    return rollout.context(needed, [window(one) for one in origins if one is not None])
