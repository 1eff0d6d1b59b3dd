"""Serve a model with the scoring plugin in this process, and ask it in windows of several sizes.

    VLLM_PLUGINS=prime_composer VLLM_USE_V2_MODEL_RUNNER=0 \\
        python -m tests.scoring.long_server DIRECTORY TOKENS ROUNDS WINDOW...

asks for the hidden states of one sequence, ``ROUNDS`` times with each size of ``WINDOW_BYTES`` in
turns. Prints as JSON, per size: the SHA-256 of the answers' bits, the windows that were sent, the
prompts that the engine got, and the seconds of each round.
"""

import asyncio
import hashlib
import json
import random
import socket
import sys
import time
from types import SimpleNamespace

import torch

from prime_composer.backends.alignment import make_rollout, sequences_to_score
from prime_composer.backends.cpu_guard import import_vllm
from prime_composer.contract import TeacherHead
from prime_composer.scoring import endpoint
from prime_composer.teachers.client import TeacherClient
from tests.scoring.long_client import Bare

# At the top level, because vLLM's engine process imports this module again.
import_vllm(multiprocessing=True)


def ask(url, tokens, rounds, sizes, counts):
    """Return what is printed."""
    ids = random.Random(0).choices(range(2, 100), k=tokens)
    rollout = make_rollout(ids[:1], ids[1:], [0.0] * (tokens - 1), "length", 0)
    (sequence,) = sequences_to_score([rollout])
    transport = Bare(url)
    connection, client = transport._connection, TeacherClient(transport, "m")
    connection.run(client.discover())
    head = TeacherHead(torch.zeros(1, 1))
    found = {size: ([], [], [], []) for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            endpoint.WINDOW_BYTES = size
            counts.clear()
            begin = time.perf_counter()
            scores = connection.run(client.score(sequence, k=8, head=head))
            hidden = scores.hidden[0].states
            seconds = time.perf_counter() - begin
            digest = hashlib.sha256()
            for tensor in (
                scores.ref_logprobs, scores.token_ids, scores.teacher_logprobs, hidden.float()
            ):  # fmt: skip
                digest.update(tensor.numpy())
            new = digest.hexdigest(), counts.count("window"), counts.count("prompt"), seconds
            for numbers, number in zip(found[size], new, strict=True):
                numbers.append(number)
    connection.close()
    return found


async def main(directory, tokens, rounds, sizes):
    """Serve, ask, and print."""
    import uvicorn
    from fastapi import FastAPI
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_chunked_prefill=True,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=2**26,
        )
    )
    counts, generate, send = [], engine.generate, endpoint.windows

    def counting_prompts(*args, **kwargs):
        counts.append("prompt")
        return generate(*args, **kwargs)

    def counting_windows(parts):
        for window in send(parts):
            counts.append("window")
            yield window

    engine.generate, endpoint.windows = counting_prompts, counting_windows
    plugin, app = endpoint.ScoringEndpoint(), FastAPI()
    plugin.attach_router(app)
    app.state.engine_client = engine
    names = SimpleNamespace(model="m", served_model_name=["m"])
    await plugin.init_state(engine, app.state, names)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        found = await asyncio.to_thread(ask, url, tokens, rounds, sizes, counts)
        server.should_exit = True
        await serving
    engine.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    directory, *numbers = sys.argv[1:]
    tokens, rounds, *sizes = map(int, numbers)
    asyncio.run(main(directory, tokens, rounds, sizes))
