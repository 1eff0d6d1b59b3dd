"""Turns of a conversation become the rollouts that train."""

import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.environments.episodes import finish_reason, interleave


def turn(prompt: list[int], completion: list[int], reason: str = "stop") -> Rollout:
    """Return a turn whose log mu of a token is minus the token's id."""
    ids = torch.tensor([*prompt, *completion])
    mask = torch.arange(len(ids)) >= len(prompt)
    logprobs = torch.where(mask, -ids.float(), torch.nan)
    return Rollout(ids, mask, logprobs, reason, 0)


def trained(rollout: Rollout) -> list[int | None]:
    """Return the trained tokens at their places, None for context."""
    pairs = zip(rollout.token_ids.tolist(), rollout.loss_mask.tolist(), strict=True)
    return [token if mask else None for token, mask in pairs]


def test_interleave_extended_turns_are_one_rollout() -> None:
    """Three turns with a tool's and a user's words between them train on the answers alone."""
    turns = [
        turn([1, 2], [3, 4]),
        turn([1, 2, 3, 4, 5], [6]),
        turn([1, 2, 3, 4, 5, 6, 7, 8], [9, 10]),
    ]
    (rollout,) = interleave(turns, prompt_index=5)
    assert rollout.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert trained(rollout) == [None, None, 3, 4, None, 6, None, None, 9, 10]
    assert rollout.inference_logprobs[rollout.loss_mask].tolist() == [-3, -4, -6, -9, -10]
    assert rollout.inference_logprobs[~rollout.loss_mask].isnan().all()
    assert rollout.prompt_index == 5
    assert rollout.completion_ids == [3, 4, 6, 9, 10]


def test_interleave_rewritten_history_is_its_own_sample() -> None:
    """A context that is no extension begins a rollout, in which earlier answers are context."""
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 30, 4, 5], [6])]
    first, second = interleave(turns, prompt_index=0)
    assert trained(first) == [None, None, 3, 4]
    assert trained(second) == [None] * 5 + [6]


def test_interleave_fork_trains_each_token_once() -> None:
    """Two answers to one context are two rollouts, and a third turn extends the one it follows."""
    turns = [turn([1], [2]), turn([1], [3]), turn([1, 3, 4], [5]), turn([1, 2, 4], [6])]
    first, second = interleave(turns, prompt_index=0)
    assert trained(first) == [None, 2, None, 6]
    assert trained(second) == [None, 3, None, 5]


def test_interleave_of_two_fitting_histories_takes_longer() -> None:
    """A turn extends the rollout that covers more of its prompt."""
    turns = [turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])]
    first, second = interleave(turns, prompt_index=0)
    assert trained(first) == [None, 2]
    assert trained(second) == [None, 2, 3, None, 5]


def test_finish_reason_one_cut_turn_is_length() -> None:
    turns = [turn([1], [2], "length"), turn([1, 2, 3], [4])]
    assert finish_reason(turns) == "length"
    assert finish_reason(turns[1:]) == "stop"
