"""The endpoint that environments ask: rounds, limits, and vLLM's wire format."""

import asyncio
from contextlib import closing
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Limits, Rollout, SamplingParams
from prime_composer.environments.token_endpoint import (
    Rounds,
    TurnRefused,
    TurnRequest,
    answer_round,
    params_of_request,
)

LIMITS = Limits(max_model_len=8, vocab_size=100)


def body(ids: list[int], **params: Any) -> dict[str, Any]:
    return {"token_ids": ids, "sampling_params": {"max_tokens": 3, **params}}


def rollout(prompt: list[int], completion: list[int]) -> Rollout:
    ids = torch.tensor([*prompt, *completion])
    mask = torch.arange(len(ids)) >= len(prompt)
    return Rollout(ids, mask, torch.where(mask, -0.5, torch.nan), "stop", 0)


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, timeout=20))


def test_rounds_rollout_that_leaves_closes_the_round() -> None:
    """The others are not kept waiting by one that ended, and its own question is dropped."""

    async def scenario() -> None:
        rounds = Rounds(3, LIMITS)
        first, second = (asyncio.ensure_future(rounds.ask(i, body([i]))) for i in (0, 1))
        await asyncio.sleep(0)
        rounds.leave(0)
        assert rounds.full.empty()
        rounds.leave(2)
        questions = rounds.full.get_nowait()
        assert questions is not None
        assert [question.rollout for question in questions] == [1]
        with pytest.raises(asyncio.CancelledError):
            await first
        second.cancel()
        with pytest.raises(TurnRefused, match="has ended"):
            await rounds.ask(2, body([1]))

    run(scenario())


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (body([1] * 8), "8 tokens.*context of 8 leaves no room.*raise rollout.max_model_len"),
        (body([1, 100]), "token id 100.*has 100 entries"),
        (body([-1]), "token id -1"),
        (body([1], top_k=5), "top_k are not supported"),
        ({**body([1]), "features": {"image": 1}}, "images are not supported"),
    ],
)
def test_ask_what_the_sampler_cannot_do_is_refused(
    request_body: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurnRefused, match=message):
        run(Rounds(1, LIMITS).ask(0, request_body))


def test_sampling_params_neutral_values_are_no_parameters() -> None:
    """What verifiers sends against a server's defaults is read; a penalty is refused."""
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert params_of_request({"max_tokens": 5, **neutral}) == SamplingParams(max_tokens=5)
    with pytest.raises(TurnRefused, match="min_p, repetition_penalty are not supported"):
        params_of_request({**neutral, "min_p": 0.1, "repetition_penalty": 1.2})


class Recorder:
    """A sampler that records its calls and answers with the last token of the prompt."""

    limits = LIMITS

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], int, int]] = []

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        self.calls.append((prompts, params.max_tokens, seed))
        return [rollout(prompt, [prompt[-1]]) for prompt in prompts]

    def update_weights(self, model: Any) -> None: ...

    def close(self) -> None: ...


def test_answer_round_equal_parameters_go_in_one_call() -> None:
    """Questions of two budgets are two calls with a seed each, answered in the round's order."""
    short, long = SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)
    with closing(asyncio.new_event_loop()) as loop:
        questions = [
            TurnRequest(index, [index], params, loop.create_future())
            for index, params in enumerate([long, short, long])
        ]
    sampler = Recorder()
    turns = answer_round(questions, sampler, seeds=[11, 12, 13])
    assert sampler.calls == [([[0], [2]], 3, 11), ([[1]], 2, 12)]
    assert [turn.completion_ids for turn in turns] == [[0], [1], [2]]
