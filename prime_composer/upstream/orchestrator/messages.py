"""Teachers that read messages: with prompts of their own, or with a tokenizer of their own.

prime-rl asks a teacher for the token ids of a branch, a path through a rollout's messages, and the
branch's nodes have these messages. Of each turn of the student, the messages before it become the
teacher's prompt by its own chat template. The turn follows and is scored: its tokens, where the
teacher has the student's, else its bytes. One request per turn; the teacher's prefix cache has what
turns share.

A teacher with a tokenizer of its own leaves a turn without scores, as a single token may be, where
its template would write the message in another way: one with tool calls, reasoning that is
stripped, or trimmed text.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from prime_composer.backends.hf_model import ModelUnavailable, load_tokenizer
from prime_composer.backends.protocols import Rollout, StudentTurn
from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import Totals, means
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan, plan_of
from prime_composer.losses import parse_loss
from prime_composer.problems.prompts import ends_of_chat
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.scoring.shared_vocabulary import MOST_PADDING
from prime_composer.scoring.wire import Facts
from prime_composer.teachers.own_prompt import (
    PLAIN,
    ConversationPrompts,
    StudentAnswer,
    as_template_reads,
    conversation,
    own_messages,
    pieces_of,
    scores_of_rollout,
    with_template,
)
from prime_composer.teachers.own_tokenizer import ByRows, FirstTokens, served_ids
from prime_composer.teachers.tokenizer_pair import ends_of, make_pair
from prime_composer.upstream import left_prompts
from prime_composer.upstream.keys import PROMPTS_KEY, SWITCH, TOKENIZERS_KEY
from prime_composer.upstream.orchestrator.client import Requests
from prime_composer.upstream.settings import AdapterSettings
from prime_composer.upstream.silent_hook import DOCTOR

Ask = Callable[[list[int], int, int], Awaitable[Scores]]
"""Returns a teacher's top K of token ids, from a position on."""

METRICS = "xtok"
"""Begins the names of metrics."""


def branches_of(traces: Sequence[Any], token_ids: Sequence[int]) -> Iterator[tuple[Any, int, Any]]:
    """Yield each rollout and branch that have these tokens, with the branch's number."""
    asked = list(token_ids)
    for trace in traces:
        for number, branch in enumerate(trace.branches):
            # A branch joins the tokens of its nodes whenever it is asked for them.
            length = sum(len(node.token_ids) for node in branch.nodes)
            if length == len(asked) and list(branch.token_ids) == asked:
                yield trace, number, branch


def branch_of(traces: Sequence[Any], token_ids: Sequence[int]) -> tuple[Any, Any]:
    """Return the rollout and its branch that have these tokens."""
    for trace, _, branch in branches_of(traces, token_ids):
        return trace, branch
    raise ValueError(
        "prime-rl asks a teacher with prompts of its own for tokens of no branch of the "
        f"rollout, so their messages are unknown. {DOCTOR}"
    )


def turns_of(branch: Any) -> Iterator[tuple[list[int], list[Any], Any]]:
    """Yield each turn of the student: the places of its tokens, messages before it, and its own."""
    end = 0
    for index, node in enumerate(branch.nodes):
        begin, end = end, end + len(node.token_ids)
        places = [begin + at for at, is_sampled in enumerate(node.mask) if is_sampled]
        if places:
            yield places, [one.message for one in branch.nodes[:index]], node.message


def tokenizer_at(key: str, place: str) -> Any:
    """Return the tokenizer of a directory or hub id, which a setting names."""
    try:
        tokenizer = load_tokenizer(place)
    except ModelUnavailable as error:
        raise ValueError(f"{SWITCH}: {key} names {place!r}. {error}") from None
    if tokenizer is None:
        raise ValueError(f"{SWITCH}: {key} names {place!r}, which has no tokenizer: add it.")
    return tokenizer


def asks_of(settings: AdapterSettings, name: str) -> TeacherPromptConfig:
    """Return what is its own of the prompts of the teacher that is served by a name."""
    own = dict((settings.teacher_prompts or {}).get(name, {}))
    own.pop("tokenizer", None)
    return TeacherPromptConfig.model_validate(own)


@cache
def served_prompts(name: str) -> ConversationPrompts:
    """Return the prompts of the teacher that is served as ``name``."""
    settings = AdapterSettings.from_env()
    assert settings is not None and settings.teacher_prompts is not None
    place, asks = f"{PROMPTS_KEY}.{name}", asks_of(settings, name)
    tokenizer = tokenizer_at(place, settings.teacher_prompts[name]["tokenizer"])
    return ConversationPrompts(with_template(tokenizer, asks, place), asks, place)


async def scored_by_prompt(
    requests: Requests,
    client: Any,
    name: str,
    traces: Sequence[Any],
    token_ids: Sequence[int],
    k: int,
) -> Scores:
    """Return a teacher's scores of a branch, from the second token on, behind its own prompts.

    What is no turn of the student is not ``scored``.
    """
    rollout = rollout_of(*branch_of(traces, token_ids))
    pieces = await requests.compute(answers_behind, name, rollout)
    answers = await asyncio.gather(
        *(
            requests.score(
                client,
                name,
                [*piece.prompt, *piece.rollout.token_ids[piece.start :].tolist()],
                k,
                start=len(piece.prompt),
                frozen=True,
            )
            for piece in pieces
        )
    )
    return scores_of_rollout(rollout, [*zip(pieces, answers, strict=True)], start=1)


def answers_behind(name: str, rollout: Rollout) -> list[StudentAnswer]:
    """Return the student's answers, behind the prompts of the teacher that is served so."""
    return pieces_of(rollout, served_prompts(name))


async def leave_prompts(
    requests: Requests, name: str, traces: Sequence[Any], token_ids: Sequence[int]
) -> None:
    """Leave the prompts of a branch to the trainer, which asks the teacher."""
    rollout = rollout_of(*branch_of(traces, token_ids))
    answers = await requests.compute(answers_behind, name, rollout)
    await asyncio.to_thread(left_prompts.leave, name, answers)


def sampled_of(branch: Any) -> Bool[Tensor, " seq"]:
    """Return which tokens of a branch the student sampled."""
    return torch.tensor([is_sampled for node in branch.nodes for is_sampled in node.mask])


def read_of(traces: Sequence[Any], token_ids: Sequence[int]) -> Bool[Tensor, " seq"] | None:
    """Return which tokens' scores are read; None where no rollout has these tokens.

    A turn that several branches share trains in the first of them, and keeps the scores that it got
    there (559b4477 orchestrator/trajectories.py:69, algo/routing.py:37).
    """
    for trace, number, branch in branches_of(traces, token_ids):
        earlier = {id(node) for other in trace.branches[:number] for node in other.nodes}
        return torch.tensor(
            [trains and id(node) not in earlier for node in branch.nodes for trains in node.mask]
        )
    return None


def rollout_of(trace: Any, branch: Any) -> Rollout:
    """Return a branch as a rollout, with what each turn of the student was asked."""
    turns = []
    question = getattr(getattr(getattr(trace, "task", None), "data", None), "question", None)
    for places, before, _ in turns_of(branch):
        asked = conversation(before, getattr(trace, "tools", ()), question)
        if asked is None:
            raise ValueError(
                f"{SWITCH}: {PROMPTS_KEY}: a message has more than text, which a teacher with "
                "prompts of its own does not read: leave the environment, or the key, out."
            )
        turns.append(StudentTurn(places[0], asked))
    mask = sampled_of(branch)
    none = torch.full(mask.shape, torch.nan)
    ids = torch.tensor([*branch.token_ids])
    return Rollout(ids, mask, none, "length", 0, turns=tuple(turns))


@dataclass(frozen=True)
class ByteTurn:
    """One turn of the student, as a teacher with a tokenizer of its own reads it."""

    prompt: list[int]  # what the teacher reads before it, in its own tokens
    plan: ReadingPlan  # how the turn is read with the teacher's rows


class OwnTokenizer:
    """What a teacher with a tokenizer of its own reads, and what its rows say of the student's.

    Where ``fixed``, supports must not depend on the sampled token.
    """

    def __init__(
        self,
        tokenizer: Any,
        pair: TokenizerPair,
        k: int,
        fixed: bool,
        asks: TeacherPromptConfig = PLAIN,
    ):
        self.tokenizer, self.k, self._asks = tokenizer, k, asks
        self._pair, self._by_rows = pair, ByRows(pair, fixed=fixed)
        self._first_tokens = FirstTokens()

    def turn(self, messages: Sequence[Any], message: Any, token_ids: list[int]) -> ByteTurn | None:
        """Return a turn of the student; None where the teacher would write it in another way.

        ``message`` is the turn's own, behind the others.
        """
        before, own = [*map(as_template_reads, messages)], as_template_reads(message)
        read = [each for each in before if each is not None]
        if own is None or len(read) < len(before):
            return None  # images
        asked, args = own_messages(read, self._asks), self._asks.template_args or {}
        prompt, whole = (
            self.tokenizer.apply_chat_template(
                those, tokenize=False, add_generation_prompt=opens, **args
            )
            for those, opens in ((asked, True), ([*asked, own], False))
        )
        plan = plan_of(self._pair, token_ids)
        text = self._pair.teacher.bytes_of(plan.teacher_ids).decode(errors="replace")
        if text not in whole[len(os.path.commonprefix([prompt, whole])) :]:
            return None
        # The template has written what it wants to begin with.
        return ByteTurn(self.tokenizer.encode(prompt, add_special_tokens=False), plan)

    async def scores(
        self, turn: ByteTurn, facts: Facts, ask: Ask, compute: Any
    ) -> tuple[Scores, Totals]:
        """Return the teacher's scores of a turn's tokens, and sums over them."""
        if loss := self._first_tokens.judge(turn.plan, facts.vocab_size):
            raise ValueError(
                f"{SWITCH}: {TOKENIZERS_KEY}: {loss} Choose a teacher whose tokenizer splits texts "
                "as the student's does, or run the recipe on one machine with the teacher in its "
                'process (--engine local; in [teacher], backend = "transformers" or "vllm").'
            )
        # The end of the teacher's turn is scored as well.
        reading = [*turn.prompt, *turn.plan.teacher_ids, self._pair.teacher_ends[0]]
        read = await ask(reading, len(turn.prompt), served_ids(facts.vocab_size))
        return await compute(self._by_rows.scores, turn.plan, read, self.k, facts.vocab_size)


@cache
def own_tokenizer(name: str) -> OwnTokenizer:
    """Return the tokenizer of the teacher that is served as ``name``, beside the student's.

    Tables of large ones take half a minute.
    """
    settings = AdapterSettings.from_env()
    assert settings is not None and settings.loss is not None, "a setting of this variable"
    assert settings.teacher_tokenizers is not None
    directory, student = settings.teacher_tokenizers[name], settings.student_tokenizer
    if student is None:
        raise ValueError(
            f"{SWITCH}: {TOKENIZERS_KEY} is set and student_tokenizer is not. prime-rl's launcher "
            "`rl` fills it in. Where processes are started one by one, give the orchestrator the "
            "directory or hub id of the student."
        )
    loss = parse_loss(settings.loss)
    fixed = any(part.needs_fixed_support for part, _ in loss.needs_by_section().values())
    own, asks = tokenizer_at("student_tokenizer", student), asks_of(settings, name)
    teacher = tokenizer_at(TOKENIZERS_KEY, directory)
    teacher = with_template(teacher, asks, f"{PROMPTS_KEY}.{name}")
    if teacher.chat_template is None:
        raise ValueError(
            f"{SWITCH}: {TOKENIZERS_KEY} names {directory!r}, whose tokenizer has no chat template "
            "to write messages with: add one."
        )
    pair = make_pair(
        teacher,
        own,
        ends_of(directory) or (),
        [],
        TOKENIZERS_KEY,
        # The student's head may have more ids than its tokenizer, and it samples them too.
        (0, len(own) + MOST_PADDING),
        student_end=next(iter(ends_of_chat(own)), None),
    )
    return OwnTokenizer(teacher, pair, settings.support_size(), fixed, asks)


async def scored_by_tokenizer(
    requests: Requests, client: Any, name: str, traces: Sequence[Any], token_ids: Sequence[int]
) -> Scores:
    """Return the scores of a branch, from its first token on, by a teacher's own tokenizer.

    NaN stands for a token of the student that has no score.
    """
    own = await requests.compute(own_tokenizer, name)
    facts = await requests.meet(client, name, own.tokenizer)
    trace, branch = branch_of(traces, token_ids)
    refuse_tools(trace, branch)
    n, k = len(token_ids), own.k
    whole = Scores(
        torch.zeros(n),
        torch.zeros(n, k, dtype=torch.long),
        torch.zeros(n, k),
        known=torch.zeros(n, k, dtype=torch.bool),
        start=0,
    )
    totals: dict[str, float] = {"tokens": 0.0, "turns": 0.0, "unscored_turns": 0.0}

    def ask(reading: list[int], start: int, k: int) -> Awaitable[Scores]:
        return requests.score(client, name, reading, k, start=start, frozen=True)

    async def add(places: list[int], before: list[Any], message: Any) -> None:
        """Put the scores of a turn's tokens into their places."""
        at = torch.tensor(places)
        whole.ref_logprobs[at] = math.nan
        turn = await requests.compute(own.turn, before, message, [token_ids[i] for i in places])
        if turn is None:
            sums: Totals = {"tokens": len(places), "unscored_turns": 1.0}
        else:
            scores, sums = await own.scores(turn, facts, ask, requests.compute)
            place_scores(whole, at, scores)
        for key, value in ({"turns": 1.0} | sums).items():
            totals[key] = totals.get(key, 0.0) + value

    await asyncio.gather(*(add(*turn) for turn in turns_of(branch)))
    turns, unscored = totals.pop("turns"), totals.pop("unscored_turns")
    metrics = means(totals) | {"unscored_turns": unscored / max(1, turns)}
    trace.metrics.update({f"{METRICS}/{key}": value for key, value in metrics.items()})
    return whole


def place_scores(whole: Scores, places: Tensor, scores: Scores) -> None:
    """Write the scores of a turn's tokens, those that have one, to their places in a branch's."""
    kept = scores.all_scored
    assert whole.known is not None
    at = places[kept]
    whole.ref_logprobs[at] = scores.ref_logprobs[kept].float()
    whole.token_ids[at] = scores.token_ids[kept]
    whole.teacher_logprobs[at] = scores.teacher_logprobs[kept].float()
    whole.known[at] = scores.all_known[kept]


def refuse_tools(trace: Any, branch: Any) -> None:
    """Refuse an environment with tools."""
    declared = [getattr(part, "tools", None) for part in (trace, *branch.nodes)]
    if any(declared) or any(node.message.role == "tool" for node in branch.nodes):
        raise ValueError(
            "The environment has tools: a tool call is written in the student's own syntax, which "
            f"a teacher with a tokenizer of its own does not write. Leave it out of {SWITCH}'s "
            f"{TOKENIZERS_KEY} (a recipe: tokenizer), or leave the environment out."
        )
