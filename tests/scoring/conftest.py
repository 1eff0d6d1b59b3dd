"""The plugin's routes over a stand-in for vLLM's engine."""

import asyncio
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch

from prime_composer.scoring.wire import SCORE_PATH, VERSION
from prime_composer.scoring.worker import Progress, RowsRequest, uint8

CONFIG = SimpleNamespace(
    model="m", max_model_len=20, dtype=torch.float32, get_vocab_size=lambda: 100,
    get_hidden_size=lambda: 8,
)  # fmt: skip


ARGS = SimpleNamespace(model="m", served_model_name=None)


class Engine:
    """Answers with the numbers of the rows, or as a test wants.

    Attributes:
        asked: the requests that came: tokens and rows_request.
        aborted: how many were cancelled.
    """

    def __init__(self):
        self.model_config = CONFIG
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            cache_config=SimpleNamespace(block_size=2, kv_sharing_fast_prefill=False),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        )
        self.asked, self.aborted, self.gate, self.gap = [], 0, None, False

    async def collective_rpc(self, method, args):
        return [{"weight": bytes(4 * CONFIG.get_hidden_size()), "dtype": "float32"}]

    async def generate(self, prompt, params, request_id):
        rows_request = RowsRequest.of(params)
        assert prompt["type"] == "token"
        tokens = prompt["prompt_token_ids"]
        self.asked.append((tokens, rows_request, params.skip_reading_prefix_cache))
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        n, progress = rows_request.n, Progress(rows_request)
        if not (self.gap and not params.skip_reading_prefix_cache):
            progress.write(0, {"sampled": -torch.arange(n, dtype=torch.float32)})
        yield SimpleNamespace(prompt_logprobs=[(*progress.payload(), uint8(b"start"))])


@pytest.fixture
def vllm_without_its_libraries(monkeypatch):
    """Two names of vLLM, all that the routes use."""
    from prime_composer.scoring.engine import plugin_sampling_params

    modules = {
        "vllm": SimpleNamespace(SamplingParams=SimpleNamespace, __version__="0.32.0"),
        "vllm.sampling_params": SimpleNamespace(
            RequestOutputKind=SimpleNamespace(FINAL_ONLY="final")
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    plugin_sampling_params.cache_clear()
    yield
    plugin_sampling_params.cache_clear()


@pytest.fixture
def engine():
    """Return the stand-in."""
    return Engine()


@pytest.fixture
def app(engine, vllm_without_its_libraries):
    """Return the application with the plugin's routes."""
    from fastapi import FastAPI

    from prime_composer.scoring.endpoint import ScoringEndpoint

    plugin, app = ScoringEndpoint(), FastAPI()
    plugin.attach_router(app)
    app.state.engine_client = engine
    asyncio.run(plugin.init_state(engine, app.state, ARGS))
    return app


def post(app, body, path=SCORE_PATH):
    """Return the answer to a body, given as bytes or as what JSON holds."""
    import httpx

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            content = body if isinstance(body, bytes) else msgspec.json.encode(body)
            return await client.post(path, content=content)

    return asyncio.run(send())


def scope_of(path):
    """Return a request as the server hands it to the application."""
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "scheme": "http", "server": ("t", 80), "client": ("t", 1),
        "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"},
    }  # fmt: skip


def asking(app, body):
    """Return a request that the application works for, and the event of its client hanging up."""
    gone, messages = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        """Nobody listens."""

    return asyncio.ensure_future(app(scope_of(SCORE_PATH), receive, send)), gone


def question(*sequences, **changes):
    """Return a question about (tokens, start, further keys), with other keys than the usual."""
    shown = [{"token_ids": ids, "start": start, **more} for ids, start, more in sequences]
    return {"version": VERSION, "kinds": ["sampled"], "sequences": shown} | changes


GOOD = ([5, 6, 7], 1, {})
