"""Turn what the student sampled in one run of an environment into rollouts to train on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from prime_composer.backends.protocols import Rollout, StudentTurn
from prime_composer.teachers.own_prompt import conversation


class EnvironmentFailed(ValueError):
    """Environments gave no rollout to train on or to measure."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One run of an environment that ended, and its reward."""

    rollouts: Sequence[Rollout]  # each turn of the student in exactly one of them (``interleave``)
    reward: float  # the environment's own
    text: str  # the student's last answer
    turns: int  # answers of the student
    tool_calls: int  # calls of tools in them
    limited: bool  # the turn limit ended it
    told: str = ""  # what environment and tools said in it


@dataclass(frozen=True)
class Failure:
    """One run of an environment that failed, and has no reward."""

    reason: str  # what failed, in one line


def outcome(
    episode: Any, turns: Sequence[Rollout], place: int, reads_messages: bool
) -> Episode | Failure:
    """Return what an episode of verifiers gives to train on.

    With ``reads_messages``, each turn knows the messages before it, as a teacher with a prompt of
    its own reads them.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        last = errors[-1] if errors else None
        return Failure(f"{last.type}: {last.message}" if last else "it gave no rollout")
    (trace, *_) = episode.traces
    if getattr(trace, "is_timeout", False):  # an error before verifiers 0.4
        return Failure(f"it ran into its time limit ({trace.stop_condition})")
    if not turns:
        return Failure("it ended without an answer of the student")
    if any(reward is None for reward in trace.rewards.values()):
        return Failure("its rewards were not computed")
    reward = float(trace.reward)
    if not math.isfinite(reward):
        return Failure(f"its reward is {reward}")
    reason = finish_reason(turns)
    calls = [message.tool_calls or () for message in trace.assistant_messages]
    asked = asked_by_prompt(trace) if reads_messages else {}
    named = [
        replace(one, turns=(StudentTurn(one.start, messages),))
        if (messages := asked.get(tuple(one.token_ids[: one.start].tolist()))) is not None
        else one
        for one in turns
    ]
    return Episode(
        [replace(one, finish_reason=reason) for one in interleave(named, place)],
        reward,
        trace.last_reply,
        len(turns),
        sum(map(len, calls)),
        trace.stop_condition == "max_turns",
        "\n".join(str(node.message.content) for node in trace.nodes if not node.sampled),
    )


def asked_by_prompt(trace: Any) -> dict[tuple[int, ...], str]:
    """Return what each answer of the student was asked as JSON, by the tokens of its prompt."""
    asked, tools = {}, getattr(trace, "tools", ())
    for branch in trace.branches:
        prompt: list[int] = []
        for index, node in enumerate(branch.nodes):
            if node.sampled and True in node.mask:
                before = conversation([one.message for one in branch.nodes[:index]], tools)
                if before is not None:
                    asked[(*prompt, *node.token_ids[: node.mask.index(True)])] = before
            prompt += node.token_ids
    return asked


def interleave(turns: Sequence[Rollout], prompt_index: int) -> list[Rollout]:
    """Join the turns of a conversation, in the order of sampling, into as few rollouts as possible.

    A turn whose prompt begins with all tokens of an earlier rollout extends that rollout. Another
    one begins a rollout of its own. Each sampled token trains once, and has exactly the context
    that it was sampled with.
    """
    joined: list[Rollout] = []
    for turn in turns:
        prompt = turn.token_ids[: turn.start]
        extended = [
            index
            for index, earlier in enumerate(joined)
            if len(earlier.token_ids) <= len(prompt)
            and torch.equal(earlier.token_ids, prompt[: len(earlier.token_ids)])
        ]
        if extended:
            longest = max(extended, key=lambda index: len(joined[index].token_ids))
            joined[longest] = _extend(joined[longest], turn)
        else:
            joined.append(replace(turn, prompt_index=prompt_index))
    return joined


def _extend(earlier: Rollout, turn: Rollout) -> Rollout:
    """Return the turn with the trained tokens of the rollout that its prompt begins with."""
    seen = len(earlier.token_ids)
    loss_mask, logprobs = turn.loss_mask.clone(), turn.inference_logprobs.clone()
    loss_mask[:seen], logprobs[:seen] = earlier.loss_mask, earlier.inference_logprobs
    return replace(
        turn,
        loss_mask=loss_mask,
        inference_logprobs=logprobs,
        prompt_index=earlier.prompt_index,
        turns=(*earlier.turns, *turn.turns),
    )


def finish_reason(turns: Sequence[Rollout]) -> Literal["stop", "length"]:
    """Return "length" where the token budget cut one of the turns."""
    return "length" if any(turn.finish_reason == "length" for turn in turns) else "stop"
