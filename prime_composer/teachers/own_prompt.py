"""A teacher that reads a prompt of its own: its chat template, its system message.

It reads its own prompt of a problem, and then the tokens of the student's completion. Everybody
else sees a teacher that read the student's prompt. In front of any scorer: transformers, vLLM, a
server, a tape. Of a conversation it reads each answer behind its own prompt of the messages before.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import HiddenStates, Scores, given
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import render_messages, render_prompt
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.watch import starts_of

PLAIN = TeacherPromptConfig()
"""Nothing of a prompt is the teacher's own, but its tokenizer."""


class ConversationPrompts:
    """The prompts of conversations, in a teacher's tokens.

    Args:
        tokenizer: the teacher's, with the chat template of ``asks``.
        asks: what of the prompts is the teacher's own.
        table: for messages.
    """

    def __init__(self, tokenizer: Any, asks: TeacherPromptConfig, table: str):
        self.tokenizer, self._asks, self._table = tokenizer, asks, table
        if asks.chat_template is not False:
            self._check_template()
        self.of_conversation = cache(self._rendered_conversation)

    def _check_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise PreflightError(
                f"[{self._table}.prompt] goes through a chat template, and the teacher's tokenizer "
                "has none, or is not on this machine: name its directory or hub id in "
                f"{self._table}.model, or a file with a template in chat_template."
            )

    def _rendered_conversation(self, asked: str) -> list[int]:
        """Return the prompt of what ``conversation`` has written."""
        try:
            return prompt_of_messages(
                **json.loads(asked), asks=self._asks, tokenizer=self.tokenizer
            )
        except ValueError as error:
            raise PreflightError(f"[{self._table}.prompt] {error}") from None


class TeacherPrompts(ConversationPrompts):
    """The prompts of a recipe's problems, in the teacher's tokens.

    Called with the student's token ids of a prompt, it returns the teacher's.

    Args:
        tokenizer: the teacher's.
        student_prompt: returns the student's prompt of a problem.
        asks: what of the prompts is the teacher's own.

    Raises:
        PreflightError: a chat template is needed, and there is none.
    """

    def __init__(
        self,
        problem_set: ProblemSet,
        tokenizer: Any,
        student_prompt: Callable[[Problem], Sequence[int]],
        table: str,
        asks: TeacherPromptConfig = PLAIN,
    ):
        self.problem_set, self._student_prompt = problem_set, student_prompt
        self._sources = {name: asks.of(data) for name, data in problem_set.sources.items()}
        super().__init__(with_template(tokenizer, asks, table), asks, table)
        self._problems: dict[tuple[int, ...], Problem] = {}
        # A problem is asked in many steps.
        self.of = cache(self._rendered)

    def _check_template(self) -> None:
        if any(data.chat_template for data in self._sources.values()):
            super()._check_template()

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
        messages = getattr(problem, "messages", None)  # of a task of an environment by id
        if messages is not None:
            return self.of_conversation(json.dumps({"messages": json.loads(messages)}))
        try:
            return render_prompt(problem, self.config_of(problem), self.tokenizer)
        except ValueError as error:
            raise PreflightError(f"[{self._table}.prompt] {error}") from None


def prompt_of_messages(
    messages: Sequence[Mapping[str, Any]],
    asks: TeacherPromptConfig,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    question: str | None = None,
) -> list[int]:
    """Return the teacher's prompt of a conversation that ends in what is to be answered.

    Args:
        messages: under the names of chat templates.
        asks: what of the prompt is the teacher's own.
        tokenizer: the teacher's, with the template of ``asks``.
        tools: the tools that the conversation may call, as JSON schemas.
        question: for ``prompt_template``; None takes the last message.

    Raises:
        ValueError: the template refuses the messages, or they are more than one plain text.
    """
    own = own_messages(messages, asks, question)
    if asks.chat_template is not False:
        return render_messages(own, tokenizer, asks.template_args, tools)
    if len(own) > 1 or own[0]["role"] != "user":
        raise ValueError(
            "chat_template = false: a conversation of several messages is no plain text"
        )
    return list(tokenizer.encode(own[0]["content"]))


def own_messages(
    messages: Sequence[Mapping[str, Any]],
    asks: TeacherPromptConfig,
    question: str | None = None,
) -> list[Mapping[str, Any]]:
    """Return a conversation with what of it is the teacher's own."""
    *before, last = messages
    if asks.prompt_template is not None and last["role"] == "user":
        text = asks.prompt_template.replace("{question}", question or last["content"])
        last = {**last, "content": text}
    own = [*before, last]
    if asks.system and own[0]["role"] != "system":
        own.insert(0, {"role": "system", "content": asks.system})
    return own


def conversation(
    messages: Sequence[Any], tools: Sequence[Any] = (), question: str | None = None
) -> str | None:
    """Return messages and tools of verifiers for a chat template, as JSON.

    None: a message has more than text.
    """
    read = [as_template_reads(message) for message in messages]
    if any(message is None for message in read):
        return None
    names = ("name", "description", "parameters")
    schemas = [
        {"type": "function", "function": {name: getattr(tool, name) for name in names}}
        for tool in tools
    ]
    return json.dumps({"messages": read, "tools": schemas, "question": question})


def as_template_reads(message: Any) -> dict[str, Any] | None:
    """Return a message of verifiers for a chat template; None where it has more than text."""
    fields = dict(message.model_dump(exclude_none=True))
    content = fields.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            return None
        content = "\n".join(part["text"] for part in content)
    calls = [_tool_call(call) for call in fields.get("tool_calls") or ()]
    return fields | {"content": content} | ({"tool_calls": calls} if calls else {})


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool as chat templates read it: its arguments are an object."""
    arguments = call.get("arguments", "")
    with suppress(ValueError):
        arguments = json.loads(arguments)
    function = {"name": call.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def with_template(tokenizer: Any, asks: TeacherPromptConfig, table: str) -> Any:
    """Return a teacher's tokenizer, with the chat template of a file where ``asks`` names one."""
    path = asks.chat_template
    if not isinstance(path, Path):
        return tokenizer
    own = copy.copy(tokenizer)
    try:
        own.chat_template = path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(
            f"[{table}.prompt] chat_template = {str(path)!r} cannot be read: {error}"
        ) from None
    return own


@dataclass(frozen=True)
class Piece:
    """An answer of the student in a rollout, and what the teacher reads before it."""

    rollout: Rollout  # up to the answer's end; the answer alone trains
    prompt: Sequence[int]  # the teacher's

    @property
    def start(self) -> int:
        """Index of the answer's first token in the rollout."""
        return self.rollout.start

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return len(self.rollout.token_ids)


class OwnPromptScorer:
    """Scores of a student's completions by a teacher that reads its own prompts.

    Attributes:
        scorer: the teacher's scorer.
        prompts: what it reads.
    """

    def __init__(self, scorer: Scorer, prompts: TeacherPrompts):
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
        """Score as ``protocols.Scorer`` says, under the teacher's own prompts.

        What lies between the answers of a conversation is not ``scored``.
        """
        assert prompts is None, "they are the teacher's own"
        by_rollout = [self.pieces(rollout) for rollout in rollouts]
        chosen = candidate_ids
        if candidate_ids is not None:
            candidate_ids = [
                ids[piece.start - rollout.start : piece.end - rollout.start]
                for ids, rollout, pieces in zip(candidate_ids, rollouts, by_rollout, strict=True)
                for piece in pieces
            ]
        pieces = [piece for own in by_rollout for piece in own]
        answers = iter(
            self.scorer.score(
                [piece.rollout for piece in pieces],
                support_size,
                [piece.prompt for piece in pieces],
                candidate_ids=candidate_ids,
                hidden=hidden,
            )
        )
        return [
            joined(
                rollout,
                [(piece, next(answers)) for piece in own],
                None if chosen is None else chosen[index],
            )
            for index, (rollout, own) in enumerate(zip(rollouts, by_rollout, strict=True))
        ]

    def pieces(self, rollout: Rollout) -> list[Piece]:
        """Return the answers in a rollout: one, or those of a conversation."""
        if rollout.turns:
            return pieces_of(rollout, self.prompts)
        if not rollout.trained.all():
            raise ValueError(
                "a teacher with a prompt of its own reads messages, and those of a conversation "
                "are not known"
            )
        return [Piece(rollout, self.prompts(rollout.token_ids[: rollout.start].tolist()))]

    def room(self, rollout: Rollout) -> int | None:
        """Return how many tokens of a rollout, with the student's prompt, the teacher can read.

        None: there is no limit.
        """
        limit = self.limits.max_model_len
        if limit is None:
            return None
        for piece in self.pieces(rollout):
            fits = limit - 1 - len(piece.prompt)  # a scorer on vLLM reads one token less
            if piece.end - piece.start > fits:
                return piece.start + max(0, fits)
        return len(rollout.token_ids)

    def close(self) -> None:
        """Close the teacher's scorer."""
        self.scorer.close()


def pieces_of(rollout: Rollout, prompts: ConversationPrompts) -> list[Piece]:
    """Return the answers of the student in a conversation."""
    pieces = []
    for turn in rollout.turns:
        behind_it = rollout.loss_mask[turn.start :]
        length = int((~behind_it).int().argmax()) if not behind_it.all() else len(behind_it)
        if length:  # 0: cut off, as beyond a window
            ids = rollout.token_ids[: turn.start + length]
            own = Rollout.not_sampled(ids, turn.start, rollout.finish_reason)
            pieces.append(Piece(own, prompts.of_conversation(turn.asked)))
    return pieces


def joined(
    rollout: Rollout,
    answers: Sequence[tuple[Piece, Scores]],
    ids: Int[Tensor, "n k"] | None = None,
    start: int | None = None,
) -> Scores:
    """Return the scores of a rollout from those of its answers. Other tokens are not scored.

    A token that is not scored has a row of a uniform distribution, which is one for every check.

    Args:
        ids: what the caller chose to score.
        start: the first row's token; None for the first that trains.
    """
    start = rollout.start if start is None else start
    first, n = answers[0][1], len(rollout.token_ids) - start
    if len(answers) == 1 and len(first) == n:
        return replace(first, start=start)
    if ids is None:
        ids = torch.arange(first.k).expand(n, -1)
    logprob = -math.log(max(first.k, 2))
    whole = Scores(
        torch.full((n,), logprob),
        ids.clone(),
        torch.full((n, first.k), logprob),
        tuple(_no_states(share, n) for share in first.hidden),
        None if first.known is None else torch.zeros(n, first.k, dtype=torch.bool),
        start,
        scored=torch.zeros(n, dtype=torch.bool),
    )
    for piece, scores in answers:
        at = slice(piece.start - start, piece.end - start)
        whole.ref_logprobs[at] = scores.ref_logprobs
        whole.token_ids[at] = scores.token_ids
        whole.teacher_logprobs[at] = scores.teacher_logprobs
        given(whole.scored)[at] = True if scores.scored is None else scores.scored
        if whole.known is not None:
            whole.known[at] = scores.all_known
        for share, own in zip(whole.hidden, scores.hidden, strict=True):
            share.states[at] = own.states
            if share.ref_logprobs is not None:
                share.ref_logprobs[at] = given(own.ref_logprobs)
    return whole


def _no_states(share: HiddenStates, n: int) -> HiddenStates:
    """Return a teacher's share in so many tokens that are not scored."""
    logprobs = None if share.ref_logprobs is None else share.ref_logprobs.new_zeros(n)
    states = share.states.new_zeros(n, share.states.shape[1])
    return replace(share, states=states, ref_logprobs=logprobs)


class OwnPromptSampler:
    """A teacher's sampler that reads its own prompts. Its answers follow the student's."""

    def __init__(self, sampler: Sampler, prompts: TeacherPrompts):
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
