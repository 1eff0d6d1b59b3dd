"""A teacher with the student's tokens that reads prompts of its own, turn by turn.

prime-rl asks for the token ids of a branch. Of each turn of the student, the messages before it
become the teacher's prompt by its own template, and the turn's tokens follow, which are scored.
"""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from prime_composer.backends.protocols import Rollout, Turn
from prime_composer.contract import Scores
from prime_composer.teachers.own_prompt import (
    ConversationPrompts,
    conversation,
    joined,
    pieces_of,
    with_template,
)
from prime_composer.upstream.orchestrator.client import Requests
from prime_composer.upstream.orchestrator.own_tokenizer import asks_of, branch_of, tokenizer_at
from prime_composer.upstream.settings import PROMPTS_KEY, SWITCH, AdapterSettings


@cache
def prompts_of(name: str) -> ConversationPrompts:
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
    trace, branch = branch_of(traces, token_ids)
    prompts = await requests.compute(prompts_of, name)
    rollout = rollout_of(trace, branch, token_ids)
    pieces = await requests.compute(pieces_of, rollout, prompts)
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
    return joined(rollout, [*zip(pieces, answers, strict=True)], start=1)


def rollout_of(trace: Any, branch: Any, token_ids: Sequence[int]) -> Rollout:
    """Return a branch as a rollout, with what each turn of the student was asked."""
    mask: list[bool] = []
    turns: list[Turn] = []
    question = getattr(getattr(getattr(trace, "task", None), "data", None), "question", None)
    for index, node in enumerate(branch.nodes):
        if any(node.mask):
            start = len(mask) + node.mask.index(True)
            before = [one.message for one in branch.nodes[:index]]
            asked = conversation(before, getattr(trace, "tools", ()), question)
            if asked is None:
                raise ValueError(
                    f"{SWITCH}: {PROMPTS_KEY}: a message has more than text, which a teacher with "
                    "prompts of its own does not read: leave the environment, or the key, out."
                )
            turns.append(Turn(start, asked))
        mask += node.mask
    loss_mask = torch.tensor(mask)
    return Rollout(
        torch.tensor([*token_ids]),
        loss_mask,
        torch.full(loss_mask.shape, torch.nan),
        "length",
        0,
        turns=tuple(turns),
    )
