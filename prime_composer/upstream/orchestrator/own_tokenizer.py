"""A teacher with a tokenizer of its own: it reads messages, and is asked turn by turn.

prime-rl asks a teacher for the token ids of a branch, a path through a rollout's messages. The
branch's nodes have these messages. Of each turn of the student, the messages before it become the
teacher's prompt by its own chat template, and the turn's bytes the text after it. One request per
turn; the teacher's prefix cache has what turns share.

A turn is left without scores, as a single token may be, where the teacher's template would write
its message in another way: one with tool calls, reasoning that is stripped, or trimmed text.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.hf_model import ModelUnavailable, load_tokenizer
from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import Totals, means
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import Plan, plan_of
from prime_composer.losses import parse_loss
from prime_composer.problems.prompts import ends_of_chat
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.scoring.shared_vocabulary import MOST_PADDING
from prime_composer.scoring.wire import Facts
from prime_composer.teachers.own_prompt import (
    PLAIN,
    as_template_reads,
    own_messages,
    with_template,
)
from prime_composer.teachers.own_tokenizer import ByRows, FirstTokens, served_ids
from prime_composer.teachers.tokenizer_pair import ends_of, make_pair
from prime_composer.upstream import wire
from prime_composer.upstream.settings import PROMPTS_KEY, SWITCH, TOKENIZERS_KEY, AdapterSettings
from prime_composer.upstream.tally import DOCTOR

Ask = Callable[[list[int], int, int], Awaitable[Scores]]
"""Returns a teacher's top K of token ids, from a position on."""

METRICS = "xtok"
"""Begins the names of metrics."""


@dataclass(frozen=True)
class Turn:
    """One turn of the student, with the token that ended it where the student wrote it.

    ``prompt`` is what the teacher reads before it, in its own tokens, and ``plan`` is how the turn
    is read with the teacher's rows.
    """

    token_ids: list[int]
    prompt: list[int]
    plan: Plan


class OwnTokenizer:
    """What a teacher with a tokenizer of its own reads, and what its rows say of the student's.

    Where ``fixed``, supports must not depend on the sampled token.
    """

    def __init__(
        self,
        tokenizer: Any,
        pair: Pair,
        k: int,
        *,
        fixed: bool = False,
        asks: TeacherPromptConfig = PLAIN,
    ):
        self.tokenizer, self.k, self._asks = tokenizer, k, asks
        self._pair, self._by_rows = pair, ByRows(pair, fixed=fixed)
        self._first_tokens = FirstTokens()

    def turn(self, messages: Sequence[Any], token_ids: list[int]) -> Turn | None:
        """Return a turn of the student; None where the teacher would write it in another way.

        ``messages`` are those of the branch up to the turn, with its own.
        """
        *before, own = (as_template_reads(message) for message in messages)
        read = [message for message in before if message is not None]
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
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return Turn(token_ids, ids, plan)

    async def scores(
        self, turn: Turn, facts: Facts, ask: Ask, compute: Any
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
def opened(directory: str, student: str | None, name: str = "") -> OwnTokenizer:
    """Return a teacher's tokenizer beside the student's. Tables of large ones take half a minute.

    Both are named by a directory or hub id. ``name`` is that under which the teacher is served.
    """
    settings = AdapterSettings.from_env()
    assert settings is not None and settings.loss is not None, "a setting of this variable"
    if student is None:
        raise ValueError(
            f"{SWITCH}: {TOKENIZERS_KEY} is set and student_tokenizer is not. prime-rl's launcher "
            "`rl` fills it in. Where processes are started one by one, give the orchestrator the "
            "directory or hub id of the student."
        )
    loss = parse_loss(settings.loss)
    fixed = any(part.needs_fixed_support for part, _ in loss.needs_by_section().values())
    teacher = tokenizer_at(TOKENIZERS_KEY, directory)
    own = tokenizer_at("student_tokenizer", student)
    asks = asks_of(settings, name)
    teacher = with_template(teacher, asks, f"{PROMPTS_KEY}.{name}")
    if teacher.chat_template is None:
        raise ValueError(
            f"{SWITCH}: {TOKENIZERS_KEY} names {directory!r}, whose tokenizer has no chat template "
            "to write messages with: add one."
        )
    # The student's head may have more ids than its tokenizer, and it samples them too.
    sizes = 0, len(own) + MOST_PADDING
    pair = make_pair(
        teacher,
        own,
        ends_of(directory) or (),
        [],
        TOKENIZERS_KEY,
        sizes,
        student_end=next(iter(ends_of_chat(own)), None),
    )
    return OwnTokenizer(teacher, pair, settings.support_size(), fixed=fixed, asks=asks)


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


async def scored_branch(
    own: OwnTokenizer,
    facts: Facts,
    traces: Sequence[Any],
    token_ids: Sequence[int],
    ask: Ask,
    compute: Any,
) -> wire.Sent:
    """Return what prime-rl gets for the token ids of a branch of one of the rollouts (``traces``).

    NaN stands for a token of the student that has no score. ``compute`` runs a function off the
    event loop.
    """
    trace, branch = branch_of(traces, token_ids)
    refuse_tools(trace, branch)
    n, k = len(token_ids), own.k
    whole = Scores(
        torch.zeros(n),
        torch.zeros(n, k, dtype=torch.long),
        torch.zeros(n, k),
        known=torch.zeros(n, k, dtype=torch.bool),
    )
    totals: dict[str, float] = {"tokens": 0.0}
    left_out = []

    async def add(places: Int[Tensor, " m"], messages: list[Any]) -> None:
        """Put the scores of a turn's tokens into their places."""
        ids = [token_ids[at] for at in places.tolist()]
        whole.ref_logprobs[places] = math.nan
        turn = await compute(own.turn, messages, ids)
        if turn is None:
            left_out.append(messages)
            totals["tokens"] += len(ids)
            return
        scores, sums = await own.scores(turn, facts, ask, compute)
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
        kept = torch.ones(len(ids), dtype=torch.bool) if scores.scored is None else scores.scored
        assert whole.known is not None
        at = places[kept]
        whole.ref_logprobs[at] = scores.ref_logprobs[kept].float()
        whole.token_ids[at] = scores.token_ids[kept]
        whole.teacher_logprobs[at] = scores.teacher_logprobs[kept].float()
        whole.known[at] = scores.all_known[kept]

    end, turns = 0, []
    for index, node in enumerate(branch.nodes):
        begin, end = end, end + len(node.token_ids)
        places = begin + torch.tensor(node.mask, dtype=torch.bool).nonzero()[:, 0]
        if len(places):
            turns.append(add(places, [each.message for each in branch.nodes[: index + 1]]))
    await asyncio.gather(*turns)
    metrics = means(totals) | {"unscored_turns": len(left_out) / max(1, len(turns))}
    trace.metrics.update({f"{METRICS}/{name}": value for name, value in metrics.items()})
    return wire.Sent(whole.ref_logprobs.tolist(), whole)


def branch_of(traces: Sequence[Any], token_ids: Sequence[int]) -> tuple[Any, Any]:
    """Return the rollout and its branch that have these tokens."""
    for trace in traces:
        for branch in trace.branches:
            if list(branch.token_ids) == list(token_ids):
                return trace, branch
    raise ValueError(
        "prime-rl asks a teacher with prompts of its own for tokens of no branch of the rollout, "
        f"so their messages are unknown. {DOCTOR}"
    )


def refuse_tools(trace: Any, branch: Any) -> None:
    """Refuse an environment with tools."""
    declared = [getattr(part, "tools", None) for part in (trace, *branch.nodes)]
    if any(declared) or any(node.message.role == "tool" for node in branch.nodes):
        raise ValueError(
            "The environment has tools: a tool call is written in the student's own syntax, which "
            f"a teacher with a tokenizer of its own does not write. Leave it out of {SWITCH}'s "
            f"{TOKENIZERS_KEY} (a recipe: tokenizer), or leave the environment out."
        )
