"""Self-distillation: the policy itself as the teacher, told more than the student that it scores."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from prime_composer.backends.protocols import Rollout, TeacherScores
from prime_composer.backends.transformers import TransformersScorer
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.schema import PolicyTeacherConfig


class PolicyTeacher:
    """Scores a rollout's own tokens after a prompt with a hint, with the policy's weights, their average or a copy.

    Sources: SDPO, https://arxiv.org/abs/2601.20802 (sibling or feedback, EMA); OPSD, https://arxiv.org/abs/2601.18734
    (reference solution); SDFT, https://arxiv.org/abs/2601.19897.

    Args:
        config: the recipe's ``[teacher.policy]``.
        sources: how prompts are written, by environment.
        model: the student that trains. ``update = "live"`` scores with this very model.
        tokenizer: the student's.
    """

    def __init__(
        self,
        config: PolicyTeacherConfig,
        sources: Mapping[str, DataConfig],
        model: nn.Module,
        tokenizer: Any,
    ):
        self.config = config
        self.sources = sources
        self.tokenizer = tokenizer
        self.policy = model
        self.model = (
            model if config.update == "live" else copy.deepcopy(model).requires_grad_(False)
        )

    def prompt(self, problem: Problem, hint: str, attempt: str = "") -> list[int]:
        """The prompt that the teacher reads."""
        values = {"{hint}": hint, "{attempt}": attempt, "{question}": problem.question}
        # In one pass: braces in what goes in stay as they are.
        text = re.sub(
            "|".join(map(re.escape, values)), lambda found: values[found[0]], self.config.text
        )
        return render_prompt(
            replace(problem, question=text), self.sources[problem.environment], self.tokenizer
        )

    def hints(
        self,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        problems: Sequence[Problem],
        rewards: Sequence[float],
    ) -> list[str | None]:
        """What the teacher is told about each rollout; None where there is nothing to tell."""
        if self.config.hint == "reference":
            return [problem.answer for problem in problems]
        if self.config.hint == "feedback":
            return [
                verdict(problem, reward) for problem, reward in zip(problems, rewards, strict=True)
            ]
        found: list[str | None] = []
        for own, rollout in enumerate(rollouts):
            siblings = (
                texts[other].strip()
                for other, sibling in enumerate(rollouts)
                if other != own
                and sibling.prompt_index == rollout.prompt_index
                and rewards[other] > 0
            )
            found.append(next(siblings, None))
        return found

    def best_prompt(self, problem: Problem) -> list[int]:
        """A prompt that tells everything: the solution, or the verdict on an attempt that was wrong."""
        told = verdict(problem, reward=0.0) if self.config.hint == "feedback" else problem.answer
        return self.prompt(problem, told)

    def score(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Sequence[int]],
        support_size: int | Literal["full"],
        chosen_by_student: bool = False,
    ) -> list[TeacherScores]:
        """The told policy's scores of the rollouts' own tokens.

        Args:
            prompts: what the teacher reads in the place of each rollout's prompt.
            support_size: K.
            chosen_by_student: take the untold policy's K most probable ids instead of the teacher's.
        """
        candidates = None
        if chosen_by_student:
            candidates = [
                s.token_ids for s in TransformersScorer(self.policy).score(rollouts, support_size)
            ]
        return TransformersScorer(self.model).score(
            rollouts, support_size, prompts=prompts, candidate_ids=candidates
        )

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """Follow the policy after an optimiser step."""
        if self.config.update == "ema":
            for mine, policys in zip(
                self.model.parameters(), self.policy.parameters(), strict=True
            ):
                mine.lerp_(policys, self.config.ema_rate)
        elif self.config.update == "sync" and step % self.config.sync_every == 0:
            self.model.load_state_dict(self.policy.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The teacher's weights, where they are not the policy's own."""
        return {} if self.config.update == "live" else self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.config.update != "live":
            self.model.load_state_dict(state)


def verdict(problem: Problem, reward: float) -> str:
    """The verifier's feedback on a rollout."""
    return (
        "This is correct." if reward > 0 else f"This is wrong; the right answer is {problem.final}."
    )
