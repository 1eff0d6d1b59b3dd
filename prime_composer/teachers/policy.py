"""Self-distillation: the teacher is the policy itself, given privileged information (a hint)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.lora.views import base_of, frozen_copy, weights_of
from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores
from prime_composer.problems.answers import verdict
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.schema import PolicyTeacherConfig
from prime_composer.scoring.shared_vocabulary import lacking
from prime_composer.step.batch import Sample
from prime_composer.teachers.transformers import TransformersScorer


class PolicyTeacher:
    """A teacher that reads a hint, with the policy's weights, their moving average, or a copy.

    ``update = "live"`` scores with the very model that trains, and ``"base"`` with it as it is
    without its adapter.

    Sources: SDPO, https://arxiv.org/abs/2601.20802 (sibling or feedback, EMA); OPSD,
    https://arxiv.org/abs/2601.18734 (reference solution); SDFT, https://arxiv.org/abs/2601.19897.
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
        fixed = {"live": lambda model: model, "base": base_of}
        self.model = fixed.get(config.update, frozen_copy)(model)

    def prompt(self, problem: Problem, hint: str, attempt: str = "") -> list[int]:
        """Return the teacher's prompt as token ids; ``attempt`` is the student's own answer."""
        values = {"{hint}": hint, "{attempt}": attempt, "{question}": problem.question}
        # One pass, so that braces inside the values stay as they are.
        placeholder = "|".join(map(re.escape, values))
        text = re.sub(placeholder, lambda match: values[match[0]], self.config.text)
        return render_prompt(
            replace(problem, question=text), self.sources[problem.environment], self.tokenizer
        )

    def prompt_of(self, sample: Sample, hint: str) -> list[int]:
        """Return the teacher's prompt for a sample, whose text is the attempt."""
        return self.prompt(sample.problem, hint, sample.text.strip())

    def hints(self, samples: Sequence[Sample]) -> list[str | None]:
        """Return the hint for each sample of a step; None where there is none."""
        if self.config.hint == "reference":
            return [sample.problem.answer for sample in samples]
        if self.config.hint == "feedback":
            return [self._verdict(sample.problem, sample.reward) for sample in samples]
        correct = [sample for sample in samples if sample.reward > 0]
        return [next(iter(_others_of_group(sample, correct)), None) for sample in samples]

    def _verdict(self, problem: Problem, reward: float) -> str:
        """Return the verifier's feedback, with the reference of the problem's metric."""
        return verdict(problem.reference(self.sources[problem.environment].metric), reward)

    def best_prompt(self, problem: Problem) -> list[int]:
        """Return a prompt with the full hint: the solution, or the verdict on a wrong attempt."""
        hint = self._verdict(problem, 0.0) if self.config.hint == "feedback" else problem.answer
        return self.prompt(problem, hint)

    def score(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Sequence[int]],
        support_size: int | Literal["full"],
        chosen_by_student: bool = False,
        hidden: bool = False,
    ) -> list[Scores]:
        """Return the hint-conditioned policy's scores of the rollouts' own tokens.

        ``chosen_by_student`` takes the K most probable ids of the policy without the hint.
        """
        candidates = None
        if chosen_by_student:
            candidates = students_choice(self.policy, rollouts, support_size)
        return TransformersScorer(self.model).score(
            rollouts, support_size, prompts=prompts, candidate_ids=candidates, hidden=hidden
        )

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """Update the teacher after optimizer step ``step``, as ``update`` says."""
        if self.config.update == "ema":
            own = dict(self.model.named_parameters())  # a tied weight once
            for name, weight in weights_of(self.policy):
                if name in own:
                    own[name].lerp_(weight, self.config.ema_rate)
        elif self.config.update == "sync" and step % self.config.sync_every == 0:
            self.model.load_state_dict(dict(weights_of(self.policy)))

    @property
    def _moves(self) -> bool:
        return self.config.update in ("ema", "sync")

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher's weights; empty where they are the policy's own, or its base's."""
        return self.model.state_dict() if self._moves else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._moves:
            self.model.load_state_dict(state)


def _others_of_group(sample: Sample, samples: Sequence[Sample]) -> list[str]:
    """Return the texts of the other samples that answer the same prompt."""
    return [
        other.text.strip()
        for other in samples
        if other is not sample and other.rollout.prompt_index == sample.rollout.prompt_index
    ]


def students_choice(
    student: nn.Module,
    rollouts: Sequence[Rollout],
    support_size: int | Literal["full"],
    vocab_size: int | None = None,
) -> list[Int[Tensor, "_ _k"]]:
    """Return the student's K most probable ids at each token of each rollout, [n, K].

    ``vocab_size`` has the entries of the shared vocabulary, whose ids are chosen from; None: all.
    """
    scorer = TransformersScorer(student)
    size = scorer.limits.vocab_size
    beyond = 0 if size is None or vocab_size is None else size - vocab_size
    if beyond <= 0 or support_size == "full":
        return [one.token_ids for one in scorer.score(rollouts, support_size)]
    # At most so many of the top ids are beyond; a stable sort moves these behind the others.
    scores = scorer.score(rollouts, support_size + beyond)
    orders = [lacking(one.token_ids, vocab_size).int().argsort(stable=True) for one in scores]
    return [
        one.token_ids.gather(1, order)[:, :support_size]
        for one, order in zip(scores, orders, strict=True)
    ]
