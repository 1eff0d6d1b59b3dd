"""A teacher that reads a prompt of its own: its chat template, its system message.

It reads its own prompt of a problem, and then the tokens of the student's completion. Everybody
else sees a teacher that read the student's prompt. In front of any scorer: transformers, vLLM, a
server, a tape.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import Scores
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.watch import starts_of

Prompts = Callable[[Sequence[int]], Sequence[int]]
"""Returns the teacher's prompt of a student's."""


class TeacherPrompts:
    """The prompts of a recipe's problems, in the teacher's tokens.

    Called with the student's token ids of a prompt, it returns the teacher's.

    Args:
        tokenizer: the teacher's.
        student_prompt: returns the student's prompt of a problem.
        asks: what of the prompts is the teacher's own; None: its tokenizer alone.

    Raises:
        PreflightError: a chat template is needed, and there is none.
    """

    def __init__(
        self,
        problem_set: ProblemSet,
        tokenizer: Any,
        student_prompt: Callable[[Problem], Sequence[int]],
        table: str,
        asks: TeacherPromptConfig | None = None,
    ):
        self.problem_set, self.tokenizer, self._table = problem_set, tokenizer, table
        self._sources = {
            name: data if asks is None else asks.of(data)
            for name, data in problem_set.sources.items()
        }
        if asks is not None and isinstance(asks.chat_template, Path):
            self.tokenizer = copy.copy(tokenizer)
            self.tokenizer.chat_template = _template_in(asks.chat_template, table)
        chats = any(data.chat_template for data in self._sources.values())
        if chats and getattr(self.tokenizer, "chat_template", None) is None:
            raise PreflightError(
                f"[{table}.prompt] goes through a chat template, and the teacher's tokenizer has "
                f"none, or is not on this machine: name its directory or hub id in {table}.model, "
                "or a file with a template in chat_template."
            )
        self._student_prompt = student_prompt
        self._problems: dict[tuple[int, ...], Problem] = {}
        # A problem is asked in many steps.
        self.of = cache(self._rendered)

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """Return the teacher's prompt of the problem whose prompt this is."""
        if not self._problems:
            self._problems = {
                tuple(self._student_prompt(problem)): problem
                for problem in [*self.problem_set.held_out, *self.problem_set.practice]
            }
        problem = self._problems.get(tuple(prompt))
        if problem is None:
            raise ValueError(
                f"[{self._table}] writes its own prompts, and this is the prompt of no problem of "
                "the recipe"
            )
        return self.of(problem)

    def config_of(self, problem: Problem) -> DataConfig:
        """Return how the teacher is asked a problem."""
        return self._sources[problem.environment]

    def longest(self, problems: Sequence[Problem]) -> int:
        """Return how many of the teacher's tokens the longest prompt has."""
        return max(len(self.of(problem)) for problem in problems)

    @property
    def surplus(self) -> int:
        """How many tokens its longest prompt is longer than the student's longest one."""
        problems = [*self.problem_set.practice, *self.problem_set.held_out]
        return max(0, self.longest(problems) - max(len(self._student_prompt(p)) for p in problems))

    def _rendered(self, problem: Problem) -> list[int]:
        try:
            return render_prompt(problem, self.config_of(problem), self.tokenizer)
        except ValueError as error:
            raise PreflightError(f"[{self._table}.prompt] {error}") from None


def _template_in(path: Path, table: str) -> str:
    """Return the chat template in a file."""
    try:
        return path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(
            f"[{table}.prompt] chat_template = {str(path)!r} cannot be read: {error}"
        ) from None


class OwnPromptScorer:
    """Scores of a student's completions by a teacher that reads its own prompts.

    Attributes:
        scorer: the teacher's scorer.
        prompts: what it reads.
    """

    def __init__(self, scorer: Scorer, prompts: Prompts):
        self.scorer, self.prompts = scorer, prompts

    @property
    def limits(self) -> Limits:
        """Those of the scorer. Lengths are with the teacher's prompts."""
        return self.scorer.limits

    @property
    def gives_any_ids(self) -> bool:
        """Whether the scorer gives any K, chosen ids and hidden states."""
        return self.scorer.gives_any_ids

    @property
    def starts(self) -> int | None:
        """Starts that the teacher's server has named."""
        return starts_of(self.scorer)

    @property
    def sampler(self) -> Sampler | None:
        """The teacher's sampler, which reads the teacher's prompts."""
        sampler = self.scorer.sampler
        return None if sampler is None else self.reading(sampler)

    def reading(self, sampler: Sampler) -> Sampler:
        """Return a sampler of the teacher that is given the student's prompts."""
        return OwnPromptSampler(sampler, self.prompts)

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says, under the teacher's own prompts."""
        assert prompts is None, "they are the teacher's own"
        own = [self.prompt_of(rollout) for rollout in rollouts]
        scores = self.scorer.score(
            rollouts, support_size, own, candidate_ids=candidate_ids, hidden=hidden
        )
        return [
            replace(one, start=rollout.start) for one, rollout in zip(scores, rollouts, strict=True)
        ]

    def prompt_of(self, rollout: Rollout) -> Sequence[int]:
        """Return what the teacher reads in front of a rollout's completion."""
        return self.prompts(rollout.token_ids[: rollout.start].tolist())

    def room(self, rollout: Rollout) -> int | None:
        """Return how many tokens of a rollout, with the student's prompt, the teacher can read.

        None: there is no limit.
        """
        limit = self.limits.max_model_len
        if limit is None:
            return None
        # A scorer on vLLM reads one token less.
        return max(rollout.start, limit - 1 - len(self.prompt_of(rollout)) + rollout.start)

    def close(self) -> None:
        """Close the teacher's scorer."""
        self.scorer.close()


class OwnPromptSampler:
    """A teacher's sampler that reads its own prompts. Its answers follow the student's."""

    def __init__(self, sampler: Sampler, prompts: Prompts):
        self._sampler, self._prompts = sampler, prompts

    @property
    def limits(self) -> Limits:
        """Those of the teacher's sampler. Lengths are with the teacher's prompts."""
        return self._sampler.limits

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Sample as ``protocols.Sampler`` says."""
        own = [self._prompts(prompt) for prompt in prompts]
        return [
            behind(rollout, prompts[rollout.prompt_index])
            for rollout in self._sampler.generate(own, params, seed)
        ]

    def update_weights(self, model: nn.Module) -> None:
        """Refuse: a teacher's weights are fixed."""
        raise NotImplementedError("the weights of a teacher are fixed")

    def close(self) -> None:
        """Do nothing: the scorer closes its sampler."""


def behind(rollout: Rollout, prompt: Sequence[int]) -> Rollout:
    """Return a rollout's completion behind another prompt."""
    start, count = rollout.start, len(prompt)
    return replace(
        rollout,
        token_ids=torch.cat([torch.tensor([*prompt]), rollout.token_ids[start:]]),
        loss_mask=torch.cat([torch.zeros(count, dtype=torch.bool), rollout.loss_mask[start:]]),
        inference_logprobs=torch.cat(
            [torch.full((count,), torch.nan), rollout.inference_logprobs[start:]]
        ),
    )
