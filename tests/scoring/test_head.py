"""The output head of a model whose rows several workers share, from worker to client."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

from fastapi import FastAPI  # noqa: E402

from prime_composer.backends.answers import InvalidAnswer  # noqa: E402
from prime_composer.backends.http import Connection, RequestRefused, ServerError  # noqa: E402
from prime_composer.scoring.endpoint import head_route, server_facts  # noqa: E402
from prime_composer.scoring.head import worker_head  # noqa: E402
from prime_composer.scoring.wire import HEAD_PATH  # noqa: E402
from prime_composer.teachers import served_head  # noqa: E402
from tests.scoring.conftest import post  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_without_its_libraries")

ROWS, D = 7, 4


class LogitsProcessor(nn.Module):
    """vLLM's, as far as the plugin reads it."""

    scale, soft_cap = 0.5, 30.0

    def forward(self, lm_head, hidden, embedding_bias=None):
        return hidden @ lm_head.weight.T


class Model(nn.Module):
    """One worker's part of a model: rows ``first`` to ``last`` of its head, and one for padding."""

    config = SimpleNamespace(hidden_size=D)

    def __init__(self, weight, bias, first, last):
        super().__init__()
        padding = torch.zeros(1, D, dtype=weight.dtype)
        self.lm_head = nn.Module()
        self.lm_head.weight = nn.Parameter(torch.cat([weight[first:last], padding]))
        self.lm_head.shard_indices = SimpleNamespace(
            org_vocab_start_index=first, org_vocab_end_index=last
        )
        self.bias = None if bias is None else torch.cat([bias[first:last], padding[:, 0]])
        self.logits_processor = LogitsProcessor()

    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden, self.bias)


class Direct(Connection):
    """A connection that hands each question to the routes."""

    def __init__(self, app):
        self.app = app
        self.url, self.section = "http://t", "[teacher]"

    def request(self, method, path, body, max_bytes):  # type: ignore[override]
        return post(self.app, body, path), max_bytes

    def run(self, work):
        answer, max_bytes = work
        if answer.status_code != 200:
            raise RequestRefused(answer.status_code, answer.json()["error"]["message"])
        assert len(answer.content) <= max_bytes
        return answer.content


def client_of(weight, bias, shards):
    """Return a client of workers that have rows up to each of ``shards``."""
    firsts = [0, *shards]
    models = [Model(weight, bias, *part) for part in zip(firsts, [*shards, ROWS], strict=True)]
    workers = [SimpleNamespace(get_model=lambda model=model: model) for model in models]

    class Engine:
        async def collective_rpc(self, method, args):
            await asyncio.sleep(0)
            return [worker_head(worker, *args) for worker in reversed(workers)]

    config = SimpleNamespace(
        model="m", max_model_len=20, dtype=weight.dtype, get_vocab_size=lambda: ROWS,
        get_hidden_size=lambda: D,
    )  # fmt: skip
    app = FastAPI()
    app.add_route(HEAD_PATH, head_route, methods=["POST"])
    app.state.prime_composer_facts = server_facts(config)
    app.state.engine_client = Engine()
    return served_head.ServedHead(Direct(app), app.state.prime_composer_facts), workers


@pytest.mark.parametrize(
    ("dtype", "has_bias", "shards"),
    [(torch.float32, False, []), (torch.bfloat16, True, [4]), (torch.float32, True, [1, 5])],
)
def test_head_of_several_workers_is_the_whole_head(dtype, has_bias, shards, monkeypatch, tmp_path):
    """In pieces of three rows, which cross the workers' borders; its hash is checked and kept."""
    monkeypatch.setattr(served_head, "HEAD_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, D, generator=generator).to(dtype)
    bias = torch.randn(ROWS, generator=generator).to(dtype) if has_bias else None
    client, _ = client_of(weight, bias, shards)
    found = client.read(tmp_path)
    assert torch.equal(found.weight, weight)
    assert found.bias is None if bias is None else torch.equal(found.bias, bias)
    facts = found.facts
    assert (facts.scale, facts.softcap, facts.computed_in) == (0.5, 30.0, str(dtype)[6:])
    assert [path.name for path in tmp_path.iterdir()] == [f"{facts.sha256}.safetensors"]
    head = found.of_teacher("The server")
    assert (head.weight.dtype, head.scale, head.softcap) == (dtype, 0.5, 30.0)


def test_head_is_read_without_a_product(monkeypatch):
    """A config may name another width than the head's, as of a model that projects at its end."""
    weight = torch.ones(ROWS, D)
    _, (worker,) = client_of(weight, None, [])
    model = worker.get_model()
    model.config = SimpleNamespace(hidden_size=2 * D)
    monkeypatch.delattr(LogitsProcessor, "forward")  # a wrong width would end the process
    found = worker_head(worker, 0, 0)
    assert (found["rows"], found["columns"]) == (ROWS, D)
    assert "forward" not in vars(model.logits_processor)


@pytest.mark.parametrize("side", ["hidden states", "logits"])
def test_head_beside_which_a_model_computes_is_refused(side):
    """What is done beside the product is no part of a head, and would be missing in its logits."""
    _, (worker,) = client_of(torch.ones(ROWS, D), None, [])
    model = worker.get_model()
    plain = model.compute_logits
    model.compute_logits = {
        "hidden states": lambda hidden: plain(hidden * 2),
        "logits": lambda hidden: plain(hidden) * 2,
    }[side]
    assert "one matrix" in worker_head(worker, 0, 0)["error"]


@pytest.mark.parametrize(("part", "number"), [("weight", math.nan), ("bias", math.inf)])
def test_head_that_is_not_finite_is_refused(part, number):
    """The message has the server, the part and the id. Nothing is compared with such a head."""
    weight, bias = torch.ones(ROWS, D), torch.ones(ROWS)
    {"weight": weight, "bias": bias}[part][5:7] = number
    client, _ = client_of(weight, bias, [4])
    message = (
        f"^The server has an output head whose {part} is NaN or infinite for id 5 .and 1 other"
    )
    with pytest.raises(InvalidAnswer, match=message):
        client.read().of_teacher("The server")


def test_head_that_changes_meanwhile_is_refused(monkeypatch):
    monkeypatch.setattr(served_head, "HEAD_ROWS", 3)
    client, (worker,) = client_of(torch.ones(ROWS, D), None, [])
    client.read()
    ask = client._answer

    def change(first, last, facts=None):
        with torch.no_grad():
            worker.get_model().lm_head.weight[first] += 1.0
        return ask(first, last, facts)

    monkeypatch.setattr(client, "_answer", change)
    with pytest.raises(ServerError, match="changed meanwhile"):
        client.read()


def test_head_that_cannot_be_read_says_why():
    """Whatever a model of vLLM may be, the engine goes on."""
    client, (worker,) = client_of(torch.ones(ROWS, D), None, [])
    del worker.get_model().lm_head.shard_indices
    with pytest.raises(ServerError, match="answered 400 .* cannot be read: .*shard_indices"):
        client.read()
