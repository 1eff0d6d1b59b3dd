"""Measure what the teacher's answers cost prime-rl's orchestrator, in bytes and CPU time.

    python -m tests.benchmarks.orchestrator

The input is one answer to one sample as vLLM writes it: 2,048 tokens, half of them outside the
teacher's top K. The ways to read it:

    prime-rl's   what prime-rl does with ``prompt_logprobs = 1`` (559b4477, utils/client.py:479):
                 pydantic's validation of vLLM's GenerateResponse, and a loop over the rows
    ours         what runs, at K

All take turns, so that other load on the machine affects all alike. Times are medians of the
thread's CPU time, ratios are those of the medians.
"""

import json
import statistics
import time

import numpy as np
from pydantic import BaseModel
from pydantic.dataclasses import dataclass

from prime_composer.teachers.responses import read_json_response
from prime_composer.upstream.orchestrator.client import whole_sequence

VOCAB, TOKENS, K, ROUNDS = 151_936, 2048, 32, 15


@dataclass
class Logprob:
    """vLLM's (vllm/logprobs.py)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class GenerateResponse(BaseModel):
    """The part of vLLM's that grows with the tokens.

    vllm/entrypoints/scale_out/token_in_token_out/protocol.py
    """

    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def make_answer(k: int) -> tuple[list[int], bytes]:
    generator = np.random.default_rng(0)
    token_ids, rows = generator.integers(0, VOCAB, TOKENS).tolist(), [None]
    for t, token in enumerate(token_ids[1:]):
        best = [i for i in generator.choice(VOCAB, k + 1, replace=False).tolist() if i != token][:k]
        logits = np.sort(generator.normal(-8, 3, k))[::-1]
        # The support's mass is 0.7, so that a sampled token outside it has room.
        logprobs = (logits - np.logaddexp.reduce(logits) + np.log(0.7)).astype(np.float32).tolist()
        if t % 2:
            best[t % k] = token
        ranked = enumerate(zip(best, logprobs, strict=True), 1)
        entries = {
            i: {"logprob": x, "rank": rank, "decoded_token": " token"} for rank, (i, x) in ranked
        }
        own = entries.pop(
            token, {"logprob": logprobs[-1] - 1.5, "rank": 3 * k, "decoded_token": " token"}
        )
        rows.append({str(i): entry for i, entry in ({token: own} | entries).items()})
    return token_ids, json.dumps(
        {"request_id": "r", "choices": [], "prompt_logprobs": rows}, separators=(",", ":")
    ).encode()


def prime_rls(content: bytes) -> list[float]:
    flat = []
    for entry in GenerateResponse.model_validate_json(content).prompt_logprobs or []:
        flat.append(float(next(iter(entry.values())).logprob) if entry else 0.0)
    return flat


def main() -> None:
    one, many = make_answer(1), make_answer(K)
    ways = {
        "prime-rl's, K = 1": (one[1], lambda: prime_rls(one[1])),
        f"ours, K = {K}": (
            many[1],
            lambda: read_json_response(many[1], whole_sequence(many[0]), K, "The teacher"),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name, (_, way) in ways.items():
            began = time.thread_time()
            way()
            if round_:  # the first round warms up
                seconds[name].append(time.thread_time() - began)
    took = {name: statistics.median(values) for name, values in seconds.items()}
    base = next(iter(took.values()))
    print(f"{TOKENS} tokens")
    print(f"{'':<24}{'JSON bytes':>12}{'ms':>9}{'x prime-rl':>12}")
    for name, (content, _) in ways.items():
        print(f"{name:<24}{len(content):>12,}{1000 * took[name]:>9.2f}{took[name] / base:>12.1f}")


if __name__ == "__main__":
    main()
