"""A teacher that reads a prompt of its own: its chat template, its system message.

It reads its own prompt of a problem, and then the tokens of the student's completion. Everybody
else sees a teacher that read the student's prompt. In front of any scorer: transformers, vLLM, a
server, a tape. Of a conversation it reads each answer behind its own prompt of the messages before.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import HiddenStates, Scores
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import render_messages, render_prompt
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.watch import server_starts

CONVERSATIONS = 256  # Prompts of conversations that are kept

PLAIN = TeacherPromptConfig()  # Nothing of a prompt is the teacher's own, but its tokenizer


class ConversationPrompts:
    """The prompts of conversations, in the tokens of a teacher whose tokenizer has its template."""

    def __init__(self, tokenizer: Any, asks: TeacherPromptConfig, table: str):
        self.tokenizer, self._asks, self._table = tokenizer, asks, table
        if self._chats and getattr(tokenizer, "chat_template", None) is None:
            raise PreflightError(
                f"[{table}.prompt] goes through a chat template, and the teacher's tokenizer has "
                f"none, or is not on this machine: name its directory or hub id in {table}.model, "
                "or a file with a template in chat_template."
            )
        # A group of rollouts has its first messages in common.
        self.of_conversation = lru_cache(CONVERSATIONS)(self._rendered_conversation)

    @property
    def _chats(self) -> bool:
        return self._asks.chat_template is not False

    def _rendered_conversation(self, asked: str) -> list[int]:
        """Return the prompt of what ``conversation`` has written."""
        with _naming(self._table):
            return prompt_of_messages(
                **json.loads(asked), asks=self._asks, tokenizer=self.tokenizer
            )


class TeacherPrompts(ConversationPrompts):
    """The prompts of a recipe's problems, in the teacher's tokens.

    Called with the student's token ids of a prompt, it returns the teacher's.
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

    @property
    def _chats(self) -> bool:
        return any(data.chat_template for data in self._sources.values())

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
        with _naming(self._table):
            return render_prompt(problem, self.config_of(problem), self.tokenizer)


@contextmanager
def _naming(table: str) -> Iterator[None]:
    """Within the block, a ``ValueError`` is one of a table's prompt."""
    try:
        yield
    except ValueError as error:
        raise PreflightError(f"[{table}.prompt] {error}") from None


def prompt_of_messages(
    messages: Sequence[Mapping[str, Any]],
    asks: TeacherPromptConfig,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    question: str | None = None,
) -> list[int]:
    """Return the teacher's prompt of a conversation that ends in what is to be answered.

    ``tools`` are JSON schemas. ``question`` goes into ``prompt_template``; None takes the last
    message.
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
class StudentAnswer:
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
    """Scores of a student's completions by a teacher that reads its own prompts."""

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
        return server_starts(self.scorer)

    @property
    def sampler(self) -> Sampler | None:
        """The teacher's sampler, which is given the student's prompts."""
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
        if candidate_ids is not None:
            candidate_ids = [
                ids[piece.start - rollout.start : piece.end - rollout.start]
                for ids, rollout, pieces in zip(candidate_ids, rollouts, by_rollout, strict=True)
                for piece in pieces
            ]
        pieces = [piece for own in by_rollout for piece in own]
        answers = self.scorer.score(
            [piece.rollout for piece in pieces],
            support_size,
            [piece.prompt for piece in pieces],
            candidate_ids=candidate_ids,
            hidden=hidden,
        )
        return all_joined(rollouts, by_rollout, answers)

    def pieces(self, rollout: Rollout) -> list[StudentAnswer]:
        """Return the answers in a rollout: one, or those of a conversation."""
        if rollout.turns:
            return pieces_of(rollout, self.prompts)
        if not rollout.trained.all():
            raise ValueError(
                "a teacher with a prompt of its own reads messages, and those of a conversation "
                "are not known"
            )
        return [StudentAnswer(rollout, self.prompts(rollout.token_ids[: rollout.start].tolist()))]

    def room(self, rollout: Rollout) -> int | None:
        """Return how many tokens of a rollout, with the student's prompt, the teacher can read.

        None: there is no limit.
        """
        limit = self.scorer.limits.max_model_len
        if limit is None:
            return None
        for piece in self.pieces(rollout):
            fits = self._fits(piece, limit)
            if fits < piece.end - piece.start:
                return piece.start + fits
        return len(rollout.token_ids)

    def _fits(self, piece: StudentAnswer, limit: int) -> int:
        """Return how many tokens of an answer fit; a scorer on vLLM reads one less than a window"""
        return max(0, min(piece.end - piece.start, limit - 1 - len(piece.prompt)))

    def close(self) -> None:
        self.scorer.close()


def pieces_of(rollout: Rollout, prompts: ConversationPrompts) -> list[StudentAnswer]:
    """Return the answers of the student in a conversation."""
    pieces = []
    for turn in rollout.turns:
        others = (~rollout.loss_mask[turn.start :]).nonzero()
        end = turn.start + int(others[0]) if len(others) else len(rollout.token_ids)
        if turn.start < end:  # else cut off, as beyond a window
            own = Rollout.not_sampled(rollout.token_ids[:end], turn.start, rollout.finish_reason)
            pieces.append(StudentAnswer(own, prompts.of_conversation(turn.asked)))
    return pieces


def all_joined(
    rollouts: Sequence[Rollout],
    by_rollout: Sequence[Sequence[StudentAnswer]],
    answers: Iterable[Scores],
) -> list[Scores]:
    """Return the scores of rollouts from those of all their answers, one after the other."""
    following = iter(answers)
    return [
        scores_of_rollout(rollout, [(piece, next(following)) for piece in own])
        for rollout, own in zip(rollouts, by_rollout, strict=True)
    ]


def scores_of_rollout(
    rollout: Rollout, answers: Sequence[tuple[StudentAnswer, Scores]], start: int | None = None
) -> Scores:
    """Return the scores of a rollout from those of its answers, from token ``start`` on.

    None: from the first that trains. Another token is not scored, and has some answer's row.
    """
    start = rollout.start if start is None else start
    n = len(rollout.token_ids) - start
    rows, scored = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.bool)
    count = 0
    for piece, scores in answers:
        at = slice(piece.start - start, piece.end - start)
        rows[at] = torch.arange(count, count + len(scores))
        scored[at] = scores.all_scored
        count += len(scores)
    parts = [scores for _, scores in answers]
    first = parts[0]
    return Scores(
        torch.cat([one.ref_logprobs for one in parts])[rows],
        torch.cat([one.token_ids for one in parts])[rows],
        torch.cat([one.teacher_logprobs for one in parts])[rows],
        tuple(
            _states_of([one.hidden[place] for one in parts], rows)
            for place in range(len(first.hidden))
        ),
        None if first.known is None else torch.cat([one.all_known for one in parts])[rows],
        start,
        None if scored.all() and all(one.scored is None for one in parts) else scored,
    )


def _states_of(shares: Sequence[HiddenStates], rows: Int[Tensor, " n"]) -> HiddenStates:
    """Return rows of one teacher's hidden states of several answers."""
    own = [one.ref_logprobs for one in shares if one.ref_logprobs is not None]
    states = torch.cat([one.states for one in shares])[rows]
    return replace(shares[0], states=states, ref_logprobs=torch.cat(own)[rows] if own else None)


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
    start, before = rollout.start, torch.tensor([*prompt])
    own = (rollout.token_ids[start:], rollout.loss_mask[start:], rollout.inference_logprobs[start:])
    none, unknown = (
        torch.zeros(len(before), dtype=torch.bool),
        torch.full((len(before),), torch.nan),
    )
    ids, mask, logprobs = map(torch.cat, zip((before, none, unknown), own, strict=True))
    return replace(rollout, token_ids=ids, loss_mask=mask, inference_logprobs=logprobs)
