"""Damaged answers of servers: read or refused in a short message, in little time and memory."""

import json
from typing import Any

import pytest
import torch

from prime_composer.backends.answers import InvalidAnswer, check_completion, check_scores
from prime_composer.backends.vllm_logprobs import read_answer, read_completions, top_k_of
from tests.fuzz import EXAMPLES, damaged_bytes, odd_values, survives

TOKENS = [5, 6, 7]
SCORED = {
    "prompt_logprobs": [
        None,
        {"6": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.5, "rank": 2}},
        {
            "7": {"logprob": -4.0, "rank": 8},
            "1": {"logprob": -0.1, "rank": 1},
            "2": {"logprob": -3.0, "rank": 2},
        },
    ]
}
SAMPLED = {
    "choices": [
        {"index": i, "token_ids": [3, 4], "finish_reason": "stop",
         "logprobs": {"token_logprobs": [-0.1, -2.0]}}
        for i in range(2)
    ]
}  # fmt: skip


def read_scores(content: bytes) -> None:
    """Read and check an answer as the scorers do."""
    top = top_k_of(TOKENS, read_answer(content), 2)
    sampled = torch.tensor(TOKENS[1:])
    check_scores([(top, sampled, 0)], k=2, vocab_size=10, origin="server")
    # Whatever is accepted is a part of a distribution.
    assert (top.ref_logprobs <= 1e-4).all()
    assert (top.teacher_logprobs.exp().sum(dim=1) <= 1.001).all()
    assert ((top.token_ids >= 0) & (top.token_ids < 10)).all()


def read_samples(content: bytes) -> None:
    """Read and check an answer as the sampler does."""
    for completion in read_completions(content, "server"):
        logprobs = completion.logprobs.token_logprobs if completion.logprobs else []
        ids = completion.token_ids
        check_completion(ids, logprobs, max_tokens=2, vocab_size=10, origin="server", prompt=0)
        assert len(ids) == len(logprobs) <= 2
        assert all(0 <= token < 10 for token in ids) and all(one <= 1e-4 for one in logprobs)


ROADS = [(read_scores, SCORED), (read_samples, SAMPLED)]


def refused_in_short(read: Any, content: bytes) -> None:
    try:
        read(content)
    except InvalidAnswer as error:
        assert 0 < len(str(error)) < 1000


@pytest.mark.parametrize("road", ROADS, ids=["scores", "samples"])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_answer_damaged_is_read_or_refused(examples: int, road: Any) -> None:
    """Values of other types and sizes in any place; bytes replaced, also by what no JSON has."""
    read, right = road
    text = json.dumps(right).encode()
    read(text)
    pieces = [b"[", b"{", b"9", b"-", b"1e999", b"NaN", b"\xff", b"\x00", b'"', b"null", b"\\ud800"]
    values = odd_values(right).map(lambda tree: json.dumps(tree).encode())
    for damage in (values, damaged_bytes(text, pieces)):
        survives(examples, lambda content: refused_in_short(read, content), damage)
