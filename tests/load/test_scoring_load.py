"""Sixty-four clients of one vLLM server for a minute, a tenth of which hang up.

Once in JSON, and once through the scoring plugin.
"""

import json
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.scoring.wire import SCORE_PATH, VERSION
from prime_composer.teachers.server import ServerScorer
from tests.load.processes import Level, descriptors, memory, tree_of
from tests.tiny_qwen import VOCAB, make_model
from tests.vllm_process import TeacherProcess, VllmProcess, save_tokenizer

CLIENTS = 64
DROPPING = 6
SECONDS = 60.0
KS = (0, 1, 8, 32, 64)
SEQUENCES = 60
TOLERANCE = 1e-3
"""Nats between vLLM's float32 and a forward pass in transformers; 2e-5 was measured."""

pytestmark = [
    pytest.mark.load,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]


class Load:
    """Sequences with their reference log-probs, and what the clients counted."""

    def __init__(self, model: Any, seconds: float, plugin: bool):
        self.plugin = plugin
        generator = random.Random(0)
        self.rollouts, self.expected = [], []
        for index in range(SEQUENCES):
            prompt, completion = generator.randint(1, 40), generator.randint(1, 260)
            ids = [generator.randrange(2, VOCAB) for _ in range(prompt + completion)]
            self.rollouts.append(
                make_rollout(ids[:prompt], ids[prompt:], [0.0] * completion, "length", index)
            )
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
            self.expected.append(torch.log_softmax(logits.double(), -1).float())
        self.end = time.monotonic() + seconds
        self.answers = self.tokens = self.drops = 0
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def check(self, index: int, k: int, score: Any) -> None:
        """Count an answer, and compare it with the reference."""
        expected, rollout = self.expected[index], self.rollouts[index]
        own = expected.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        best = expected.topk(k, dim=-1).values
        there = expected.gather(1, score.token_ids)
        found = [
            name
            for name, ours, theirs in (
                ("own", score.ref_logprobs, own),
                ("top K", score.teacher_logprobs, best),
                ("ids", score.teacher_logprobs, there),
            )
            if ours.shape != theirs.shape
            or not torch.allclose(ours, theirs, atol=TOLERANCE, rtol=0)
        ]
        with self.lock:
            self.answers += 1
            self.tokens += len(own)
            self.wrong += [f"sequence {index}, K = {k}: {name}" for name in found]

    def ask(self, url: str, seed: int) -> None:
        """Be a client that waits for its answers."""
        generator = random.Random(seed)
        scorer = ServerScorer(url, concurrency=1)
        try:
            assert scorer.gives_any_ids == self.plugin
            while time.monotonic() < self.end:
                index, k = generator.randrange(SEQUENCES), generator.choice(KS)
                (score,) = scorer.score([self.rollouts[index]], k)
                self.check(index, k, score)
        except Exception as error:
            with self.lock:
                self.wrong.append(f"client {seed}: {error!r}")
        finally:
            scorer.close()

    def question(self, generator: random.Random, model: str) -> tuple[str, dict[str, Any]]:
        """Return the path and body of a random question."""
        rollout, k = generator.choice(self.rollouts), generator.choice(KS)
        tokens = rollout.token_ids.tolist()
        if not self.plugin:
            body = {"model": model, "prompt": tokens, "prompt_logprobs": k, "max_tokens": 1}
            return "/v1/completions", body
        kinds = ["sampled", "top_k"] if k else ["sampled", "hidden"]
        sequence = {"token_ids": tokens, "start": rollout.start}
        return SCORE_PATH, {"version": VERSION, "kinds": kinds, "k": k, "sequences": [sequence]}

    def hang_up(self, url: str, model: str, seed: int) -> None:
        """Be a client that cuts its connection while it asks, waits or reads."""
        generator = random.Random(seed)
        address = urlsplit(url)
        while time.monotonic() < self.end:
            path, body = self.question(generator, model)
            content = json.dumps(body)
            request = (
                f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
                f"{content}"
            ).encode()
            with socket.create_connection((address.hostname, address.port), 30) as connection:
                cut = generator.choice((len(request) // 2, len(request)))
                connection.sendall(request[:cut])
                time.sleep(generator.uniform(0, 1.0))
                if cut == len(request) and generator.random() < 0.5:
                    connection.settimeout(1.0)
                    try:
                        connection.recv(1000)
                    except TimeoutError:
                        pass
            with self.lock:
                self.drops += 1


@pytest.mark.parametrize("process", [VllmProcess, TeacherProcess], ids=["json", "plugin"])
def test_scoring_under_load_is_right_and_level(
    process: type[VllmProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No answer is wrong, and neither the server's memory nor ours grows after the warm-up."""
    model = make_model(tied=True, seed=0)
    directory = tmp_path / "served"
    model.save_pretrained(directory)
    save_tokenizer(directory, VOCAB)
    options = ("--dtype", "float32", "--max-model-len", 320, "--max-logprobs", max(KS))
    with process(directory, tmp_path / "server.log", *options) as server:
        load = Load(model, SECONDS, plugin=process is TeacherProcess)
        threads = [
            threading.Thread(target=load.ask, args=(server.url, seed), daemon=True)
            for seed in range(CLIENTS - DROPPING)
        ]
        threads += [
            threading.Thread(
                target=load.hang_up, args=(server.url, str(directory), 1000 + seed), daemon=True
            )
            for seed in range(DROPPING)
        ]
        for thread in threads:
            thread.start()
        ours, theirs, open_here, open_there = [], [], [], []
        while time.monotonic() < load.end:
            time.sleep(1.0)
            servers = tree_of(server.process.pid)
            ours.append(memory([os.getpid()]))
            theirs.append(memory(servers))
            open_here.append(descriptors([os.getpid()]))
            open_there.append(descriptors(servers))
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    levels = {
        "our memory, MB": Level.of(ours),
        "server's memory, MB": Level.of(theirs),
        "our descriptors": Level.of(open_here),
        "server's descriptors": Level.of(open_there),
    }
    with capsys.disabled():
        print(
            f"\n{load.answers} answers with {load.tokens} tokens, {load.drops} cut connections, "
            f"{len(load.wrong)} wrong"
        )
        for name, level in levels.items():
            print(f"{name}: {level}")
    assert load.wrong == [] and load.answers > CLIENTS and load.drops > DROPPING
    for name, level in levels.items():
        assert level.end <= 1.05 * level.warm + 5, name
