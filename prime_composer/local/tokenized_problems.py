"""Convert problems to token ids and completions to text, and grade answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from prime_composer.backends.hf_model import read_eos_token_ids
from prime_composer.backends.model_files import read_json
from prime_composer.backends.protocols import Rollout
from prime_composer.environments.tasks import Task
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.metrics import reward
from prime_composer.problems.prompts import (
    Ends,
    around_answer,
    asked_texts,
    control_tokens,
    drops_reasoning,
    idle_arguments,
    marks_of,
    reads_plainly,
    render_answer,
    render_prompt,
)
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.teachers.compatibility import common_ends
from prime_composer.teachers.tape.store import HEADER_FILE
from prime_composer.teachers.tokenizer_pair import ends_of

LOOKED_AT = 64  # Problems of each part whose rendering is looked at before a run


@dataclass(frozen=True, eq=False)
class TokenizedProblems:
    """The problems of a recipe in the student's tokens."""

    problem_set: ProblemSet  # the problems, and how each environment asks and checks them
    tokenizer: Any  # the student's tokenizer
    _prompts: dict[Problem, list[int]] = field(default_factory=dict, repr=False)
    # what ends a text of the run; None takes the ends of tokenizer and data
    run_ends: Ends | None = None

    def prompt(self, problem: Problem) -> list[int]:
        """Return the token ids of the problem's prompt."""
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

    @cached_property
    def ends(self) -> Ends:
        """What ends a text, the data's answers included."""
        return self.run_ends or Ends.of(self.tokenizer, self.ends_of_turns())

    def ends_of_turns(self) -> set[int]:
        """Return the ids with which the chat template ends the answers to the problems."""
        config_of = self.problem_set.config_of
        ends = (around_answer(one, config_of(one), self.tokenizer)[1] for one in self._chats())
        return {one for one in ends if one is not None}

    def look(self, answers: bool) -> list[str]:
        """Look at what the tokenizer makes of the first problems, and return warnings."""
        warnings = []
        config_of, special = self.problem_set.config_of, control_tokens(self.tokenizer)
        unread = "add_generation_prompt" not in str(getattr(self.tokenizer, "chat_template", ""))
        for problem in self._chats() if unread else ():
            before, _ = around_answer(problem, config_of(problem), self.tokenizer)
            if before is not None and any(token in before for token in special.values()):
                warnings.append(
                    "The chat template writes no generation prompt: the student has to begin each "
                    f"answer with {before!r} itself. Give its tokenizer a template that reads "
                    "add_generation_prompt."
                )
        for problem in self._chats():
            unread_args = idle_arguments(problem, config_of(problem), self.tokenizer)
            warnings += [
                f"[data] template_args: {name} changes nothing that the chat template writes. "
                "Correct its name, or leave it out."
                for name in unread_args
            ]
        looked = [*self.problem_set.practice[:LOOKED_AT], *self.problem_set.held_out[:LOOKED_AT]]
        dropped = 0
        for problem in looked:
            self.prompt(problem)
            if answers and problem.answer:
                self.solution(problem)
                dropped += drops_reasoning(problem, config_of(problem), self.tokenizer)
        if dropped:
            warnings.append(
                f"{dropped} of the first {len(looked)} answers have reasoning beside them, which "
                "the chat template leaves out: the run trains without it. Give the student a "
                "template that writes it."
            )
        texts = [problem for problem in looked if not self._is_plain(problem)]
        if texts:
            warnings.append(
                f"{len(texts)} of the first {len(looked)} problems contain the text of a special "
                f"token, for example {texts[0].question[:60]!r}, which this tokenizer cannot read "
                "as plain text: it becomes the token. Replace it in the data."
            )
        return warnings

    def _chats(self) -> Iterable[Problem]:
        """Return the first problem of each table of data that goes through the chat template."""
        problems = reversed([*self.problem_set.practice, *self.problem_set.held_out])
        own = {one.environment: one for one in problems if not isinstance(one, Task)}
        return [one for one in own.values() if self.problem_set.config_of(one).chat_template]

    def _is_plain(self, problem: Problem) -> bool:
        """Return whether no text of a problem becomes a special token."""
        if isinstance(problem, Task):
            return not marks_of(self.tokenizer, [problem.messages])
        texts = [problem.answer, problem.reasoning, *asked_texts(problem)]
        return not marks_of(self.tokenizer, texts) or reads_plainly(self.tokenizer)

    def solution(self, problem: Problem, prompt_index: int = 0) -> Rollout:
        """Return the data's solution of a problem in the form of a rollout."""
        config, prompt = self.problem_set.config_of(problem), self.prompt(problem)
        answer = render_answer(problem, problem.answer, config, self.tokenizer, self.ends)
        token_ids = torch.tensor([*prompt, *answer])
        return Rollout.not_sampled(token_ids, len(prompt), "stop", prompt_index)

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return a completion as text, without its end and special tokens."""
        ended = len(completion_ids) > 0 and completion_ids[-1] in self.ends.ids
        content = completion_ids[:-1] if ended else completion_ids
        return self.tokenizer.decode(content, skip_special_tokens=True)

    def reward(self, text: str, problem: Problem, budget: TimeBudget | None = None) -> float:
        """Return the reward of an answer to the problem: 1.0 or 0.0, or a graded metric's value."""
        return reward(text, problem, self.problem_set.config_of(problem), budget)


def with_ends(
    tokenized: TokenizedProblems,
    stop: Sequence[int | str] | None,
    student: str | Path,
    teachers: Mapping[TeacherId, TeacherConfig],
    folders: Mapping[str, Path | None],
) -> tuple[TokenizedProblems, list[str]]:
    """Return the problems with what ends a text of their run, and what to say of it."""
    tokenizer = tokenized.tokenizer
    if stop is not None:
        ids = [_token_of(one, tokenizer) for one in stop]
        return replace(tokenized, run_ends=Ends(tuple(sorted({*ids})), ids[0])), []
    of_teachers = {}
    for teacher, config in teachers.items():
        model = config.model or folders.get(teacher.table)
        known = None if model is None else ends_of(model)
        if model is None and config.tape is not None:  # which alone knows its teacher
            known = (read_json(config.tape / HEADER_FILE) or {}).get("ends")
        if known is not None and config.tokenizer != "own":
            of_teachers[f"[{teacher.table}]"] = {*known}
    own, turns = {*read_eos_token_ids(student)}, tokenized.ends_of_turns()
    ends, lines = common_ends(tokenizer, own, turns, of_teachers)
    return replace(tokenized, run_ends=ends), lines


def _token_of(end: int | str, tokenizer: Any) -> int:
    if isinstance(end, int) and end not in tokenizer.get_vocab().values():
        raise ValueError(
            f"rollout.stop: the student's tokenizer has no token {end}; name one by its text"
        )
    ids = [end] if isinstance(end, int) else tokenizer.encode(end, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(
            f"rollout.stop: {end!r} is {len(ids)} tokens of the student's tokenizer, and an end "
            "is one; name a text that is one token, or its id"
        )
    return ids[0]
