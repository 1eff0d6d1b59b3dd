"""Measure what the teacher's answers cost prime-rl's orchestrator, in bytes and CPU time.

    python -m tests.benchmarks.orchestrator

The input is one answer to one sample as vLLM writes it: 2,048 tokens, half of them outside the
teacher's top K. The ways to read it:

    K = 1, prime-rl's way  what prime-rl does with ``prompt_logprobs = 1`` (559b4477,
                           utils/client.py:479): pydantic's validation of vLLM's GenerateResponse,
                           and a loop over the rows
    plain                  json and sorted rows, the reference of test_vllm_logprobs.py
    unchecked              ours without the check of the values (``backends.answers``)
    ours                   what runs

All take turns, so that other load on the machine affects all alike. Times are medians of the
thread's CPU time, ratios are those of the medians. Aim: plain at least 4 times ours at K = 32.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from pydantic import BaseModel
from pydantic.dataclasses import dataclass

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prime_composer.backends.vllm_logprobs import read_answer, top_k_of
from prime_composer.contract import Scores
from prime_composer.teachers.responses import read_json_response
from prime_composer.upstream.orchestrator.client import IN_FLIGHT, whole_sequence
from prime_composer.upstream.wire import pack, sent
from tests.backends.test_vllm_logprobs import plain_parse

VOCAB = 151_936


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


def make_answer(tokens: int, k: int) -> tuple[list[int], bytes]:
    generator = np.random.default_rng(0)
    token_ids, rows = generator.integers(0, VOCAB, tokens).tolist(), [None]
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


def unchecked(token_ids: list[int], content: bytes, k: int) -> Scores:
    return top_k_of(token_ids, read_answer(content), k)


def parse(token_ids: list[int], content: bytes, k: int) -> Scores:
    return read_json_response(content, whole_sequence(token_ids), k, "The teacher")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256, help="samples of a batch, for the totals")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    k = arguments.k
    one, many = make_answer(arguments.tokens, 1), make_answer(arguments.tokens, k)
    ways = {
        "K = 1, prime-rl's way": (one[1], lambda: prime_rls(one[1])),
        "K = 1, unchecked": (one[1], lambda: unchecked(*one, 1)),
        "K = 1, ours": (one[1], lambda: parse(*one, 1)),
        f"K = {k}, plain": (many[1], lambda: plain_parse(*many, k)),
        f"K = {k}, unchecked": (many[1], lambda: unchecked(*many, k)),
        f"K = {k}, ours": (many[1], lambda: parse(*many, k)),
    }
    base, plain, ours = "K = 1, prime-rl's way", f"K = {k}, plain", f"K = {k}, ours"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(arguments.rounds + 1):
        for name, (_, way) in ways.items():
            began = time.thread_time()
            way()
            if round_:  # the first round warms up
                seconds[name].append(time.thread_time() - began)
    took = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{arguments.tokens} tokens; a batch is {arguments.batch} of them")
    print(f"{'':<24}{'JSON bytes':>12}{'ms':>9}{'x prime-rl':>12}{'s per batch':>13}")
    for name, (content, _) in ways.items():
        ratio, batch = took[name] / took[base], arguments.batch * took[name]
        print(f"{name:<24}{len(content):>12,}{1000 * took[name]:>9.2f}{ratio:>12.1f}{batch:>13.2f}")
    scores = parse(*many, k)
    print(f"plain / ours at K = {k}: {took[plain] / took[ours]:.1f}x")
    for size in (1, k):
        ratio = took[f"K = {size}, ours"] / took[f"K = {size}, unchecked"]
        print(f"the check at K = {size}: {100 * (ratio - 1):.1f}% of the rest")
    answers = min(IN_FLIGHT, arguments.batch)
    gigabytes = answers * len(many[1]) / 1e9
    print(f"JSON in flight: {answers} answers, {gigabytes:.2f} GB")
    payload = pack(sent(scores).scores)
    print(f"on the wire to the trainer: {payload.nbytes:,} bytes a sample")


if __name__ == "__main__":
    main()
