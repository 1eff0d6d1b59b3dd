"""Answer vLLM's ``/inference/v1/generate`` in this process, from the run's own sampler.

The endpoint collects the questions of environments into rounds: a round is full when every rollout
that still runs waits for an answer. What is sampled together, and in which order, does not depend
on which rollout was quicker. So the same seed and weights give the same rollouts, as long as the
environments themselves are deterministic.
"""

import asyncio
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams

MODEL = "student"  # The model's name, as the endpoint is asked for it

IGNORED = frozenset({"logprobs", "skip_special_tokens", "routed_experts_prompt_start", "n", "seed"})
"""Sampling parameters of a request that change no distribution here."""

NEUTRAL = {
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Values with which a sampling parameter changes no distribution. Since 0.4.1 verifiers sends some
of them, against a server's own defaults."""


class TurnRefused(ValueError):
    """A question that cannot be answered; the message goes to the environment."""


@dataclass(eq=False)
class TurnRequest:
    """One prompt that an environment wants the student to continue."""

    rollout: int  # index of the rollout that asks
    prompt: list[int]  # token ids
    params: SamplingParams  # how to sample
    answer: "asyncio.Future[Rollout]"  # gets the turn


class Rounds:
    """The questions of rollouts that run side by side. All methods belong to the loop's thread.

    None in ``full`` comes after the last round. ``turns`` are by rollout and in order.
    """

    def __init__(self, count: int, limits: Limits):
        self.full: queue.SimpleQueue[list[TurnRequest] | None] = queue.SimpleQueue()
        self.turns: list[list[Rollout]] = [[] for _ in range(count)]
        self._limits = limits
        self._running = set(range(count))
        self._waiting: list[TurnRequest] = []

    def leave(self, rollout: int) -> None:
        """Expect no more questions of a rollout, and drop those that it left unanswered."""
        self._running.discard(rollout)
        for question in self._waiting:
            if question.rollout == rollout:
                question.answer.cancel()
        self._waiting = [question for question in self._waiting if question.rollout != rollout]
        self._close_round()

    async def ask(self, rollout: int, body: dict[str, Any]) -> Rollout:
        """Return the student's answer to a request."""
        if rollout not in self._running:
            raise TurnRefused("the rollout has ended")
        params = params_of_request(body.get("sampling_params") or {})
        if body.get("features") or body.get("content_parts"):
            raise TurnRefused("images are not supported on one machine")
        prompt = body["token_ids"]
        vocab_size, room = self._limits.vocab_size, self._limits.max_model_len
        alien = [i for i in prompt if i < 0 or vocab_size is not None and i >= vocab_size]
        if alien:
            raise TurnRefused(
                f"the prompt has the token id {alien[0]}, and the student's head has {vocab_size} "
                "entries: tokenizer and model do not fit together"
            )
        if room is not None:
            if len(prompt) >= room:
                raise TurnRefused(
                    f"the conversation has {len(prompt)} tokens, and the context of {room} leaves "
                    "no room for an answer; raise rollout.max_model_len, or limit max_turns"
                )
            params = replace(params, max_tokens=min(params.max_tokens, room - len(prompt)))
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting.append(TurnRequest(rollout, prompt, params, answer))
        self._close_round()
        turn = await answer
        self.turns[rollout].append(turn)
        return turn

    def _close_round(self) -> None:
        asked = {question.rollout for question in self._waiting}
        if self._waiting and asked == self._running:
            self.full.put(sorted(self._waiting, key=lambda question: question.rollout))
            self._waiting = []


def answer_round(
    questions: Sequence[TurnRequest], sampler: Sampler, seeds: Sequence[int]
) -> list[Rollout]:
    """Sample the answers of a round, in order. Questions of equal parameters go in one call."""
    answers: dict[int, Rollout] = {}
    every = list(dict.fromkeys(question.params for question in questions))
    for params, seed in zip(every, seeds, strict=False):
        places = [place for place, question in enumerate(questions) if question.params == params]
        prompts = [questions[place].prompt for place in places]
        answers |= zip(places, sampler.generate(prompts, params, seed=seed), strict=True)
    return [answers[place] for place in range(len(questions))]


def deliver(questions: Sequence[TurnRequest], turns: Sequence[Rollout]) -> None:
    """Give the questions of a round their turns, in the loop's thread."""
    for question, turn in zip(questions, turns, strict=True):
        if not question.answer.done():  # its rollout may have run into its time limit meanwhile
            question.answer.set_result(turn)


def params_of_request(asked: dict[str, Any]) -> SamplingParams:
    values = {key: value for key, value in asked.items() if value is not None}
    own = {key: values.pop(key) for key in ("temperature", "top_p", "max_tokens") if key in values}
    stop = tuple(values.pop("stop_token_ids", ()))
    unknown = sorted(
        key
        for key, value in values.items()
        if key not in IGNORED and value not in NEUTRAL.get(key, ())
    )
    if unknown:
        raise TurnRefused(f"the sampling parameters {', '.join(unknown)} are not supported")
    return SamplingParams(stop_token_ids=stop, **own)


def wire_answer(turn: Rollout) -> dict[str, Any]:
    """Return a turn as the JSON of vLLM's ``/inference/v1/generate``."""
    ids = turn.completion_ids
    logprobs = turn.inference_logprobs[turn.loss_mask].tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": ids, "finish_reason": turn.finish_reason}
    return {"request_id": "", "choices": [choice | {"logprobs": {"content": content}}]}


async def serve_turns(asking: Mapping[str, tuple[Rounds, int]], header: str) -> tuple[Any, str]:
    """Serve ``/inference/v1/generate`` on a free port of this machine."""
    from aiohttp import web

    async def generate(request: web.Request) -> web.Response:
        trace = request.headers.get(header, "")
        try:
            if trace not in asking:
                raise TurnRefused(f"no rollout of the trace {trace!r} is running")
            rounds, rollout = asking[trace]
            turn = await rounds.ask(rollout, await request.json())
        except TurnRefused as refusal:
            return web.json_response({"error": {"message": str(refusal)}}, status=400)
        return web.json_response(wire_answer(turn))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
