"""A served stand-in for a teacher: the plugin's own routes over the rows of a table."""

import socket
import threading
from types import SimpleNamespace

import torch
import uvicorn
from fastapi import FastAPI

from prime_composer.scoring.endpoint import ScoringEndpoint
from prime_composer.scoring.patches import HEAD_METHOD
from prime_composer.scoring.worker import Prefill, Progress, RowsRequest, answer_batch, uint8
from tests.scoring.conftest import Engine

V, D = 31, 6


class Rows(Engine):
    """Stands in for vLLM's engine: the worker's own code over the states of a table.

    Args:
        seed: of the table and of the output head.
        vocab_size: of both.
    """

    def __init__(self, seed, vocab_size=V):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table, self.weight = torch.randn(2, vocab_size, D, generator=generator)
        self.model_config = SimpleNamespace(
            model=f"m{seed}", max_model_len=512, dtype=torch.float32,
            get_vocab_size=lambda: vocab_size, get_hidden_size=lambda: D,
        )  # fmt: skip

    def logprobs(self, token_ids):
        """Return log q of the whole vocabulary in float64: row t is for token t + 1."""
        return (self.table.double()[token_ids] @ self.weight.double().T).log_softmax(-1)

    async def collective_rpc(self, method, args=()):
        """Answer as a worker of vLLM does that has our methods."""
        assert method == HEAD_METHOD
        return [{"weight": bytes(4 * D), "dtype": "float32"}]

    async def generate(self, prompt, params, request_id):
        """Answer in two pieces of the prompt."""
        rows_request, ids = RowsRequest.of(params), prompt["prompt_token_ids"]
        self.asked.append(rows_request)
        progress, half = Progress(rows_request), len(ids) // 2
        for before, after in ((0, half), (half, len(ids))):
            states = self.table[torch.tensor(ids[before:after])]
            prefill = Prefill(progress, ids, before, after - before, begin=0)
            answer_batch(lambda h: h @ self.weight.T, len(self.weight), states, {"": prefill})
        yield SimpleNamespace(prompt_logprobs=[(*progress.payload(), uint8(b"start"))])


class Served:
    """A teacher's server in this process, with the plugin's own routes.

    Args:
        engine: what stands in for vLLM's.
    """

    def __init__(self, engine):
        self.engine, self.model = engine, engine.model_config.model
        app = FastAPI()

        @app.get("/v1/models")
        def models():
            return {"data": [{"id": self.model, "max_model_len": 512}]}

        plugin = ScoringEndpoint()
        plugin.attach_router(app)
        app.state.engine_client = engine
        self._start = lambda: plugin.init_state(
            engine, app.state, SimpleNamespace(model=self.model, served_model_name=None)
        )
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        import asyncio

        async def serve():
            await self._start()
            await self._server.serve(sockets=[self._listening])

        asyncio.run(serve())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()
