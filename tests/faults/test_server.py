"""The stand-in server's samples against forward passes.

Its scores are compared with float64 in ``tests/local/test_padding.py``. That it takes weights is
seen by every run of a served student; when and how it spoils, by the runs that are spoiled.
"""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.faults.server import SpoilingServer

# Making a client takes longer than an answer.
CLIENT = httpx.Client(timeout=20)


@pytest.fixture(scope="module")
def server(models: Any) -> Iterator[SpoilingServer]:
    with SpoilingServer(models.tied) as server, CLIENT:
        yield server


def sampling(server: SpoilingServer, **settings: Any) -> httpx.Response:
    """Ask for two rollouts of a prompt."""
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 0}
    body |= {"n": 2, "seed": 3, "return_token_ids": True}
    return CLIENT.post(f"{server.url}/v1/completions", json=body | settings)


def test_spoiling_server_samples_from_the_model(
    server: SpoilingServer, models: Any, plain_logprobs: Any
) -> None:
    """Log mu is the model's; a seed repeats a sample; greedy is greedy; a stop id ends it."""
    choices, again, others = (sampling(server, seed=seed).json()["choices"] for seed in (3, 3, 4))
    assert choices == again != others
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    for choice in choices:
        tokens = [5, 6, 7, *choice["token_ids"]]
        expected = plain_logprobs(models.tied_model, tokens)
        own = [float(expected[t, tokens[t]]) for t in range(3, len(tokens))]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-5)
    (greedy,) = sampling(server, n=1, temperature=0).json()["choices"]
    best = plain_logprobs(models.tied_model, [5, 6, 7, *greedy["token_ids"]]).argmax(-1)
    assert greedy["token_ids"] == best[3:].tolist()
    stop = greedy["token_ids"][2]
    (cut,) = sampling(server, n=1, temperature=0, stop_token_ids=[stop]).json()["choices"]
    assert cut["token_ids"][-1] == stop and cut["finish_reason"] == "stop"


def test_spoiling_server_mu_is_the_sampled_distribution(
    server: SpoilingServer, models: Any, plain_logprobs: Any
) -> None:
    """With a temperature and a nucleus, log mu is that of the tempered and cut distribution."""
    (choice,) = sampling(server, n=1, temperature=0.7, top_p=0.6).json()["choices"]
    tokens = [5, 6, 7, *choice["token_ids"]]
    logprobs = torch.log_softmax(plain_logprobs(models.tied_model, tokens)[3:] / 0.7, -1)
    for row, token, value in zip(
        logprobs, choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
    ):
        mass = 0.0
        for index in row.argsort(descending=True).tolist():
            mass += math.exp(row[index])
            if mass >= 0.6:
                break
        assert row[token] >= row[index]
        assert value == pytest.approx(float(row[token]) - math.log(mass), abs=1e-4)
