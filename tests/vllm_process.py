"""A vLLM server of its own process group, started and ended by a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fork_server import ForkServer
from tests.stand_in import free_port

START_SECONDS = 300.0
STOP_SECONDS = 60.0
QUICK = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""Options: the engine computes in its own process, as on one GPU. vLLM gives it another one on a
CPU, for the affinity of OpenMP's threads, which takes 10 s longer to start."""

SECOND_RUNNER = {
    "PYTHONPATH": os.pathsep.join(
        [
            str(Path(__file__).parent / "second_runner"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    ),
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""Environment variables with which a server has vLLM's second model runner, on a CPU."""


class VllmProcess:
    """A vLLM server on 127.0.0.1, which can be killed and started again. Entering it waits for it.

    It listens at one port, also when it is started again. ``forks`` starts its processes with vLLM
    imported (``tests.forked_vllm``), in 2 s instead of half a minute; without, they are new, as an
    operator's. ``process`` is the API server, whose children are the engine's.
    """

    def __init__(
        self,
        directory: Path,
        log: Path,
        *options: object,
        port: int | None = None,
        forks: ForkServer | None = None,
        **env: str,
    ):
        self.directory = directory
        self.log = log
        self.port: int = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = self.command(options)
        self._forks = forks
        self.process: Any = None
        self._env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0"} | env
        self.start()

    def command(self, options: Sequence[object]) -> list[str]:
        """Return the command line."""
        words = ["--model", self.directory, "--host", "127.0.0.1", "--port", self.port]
        words += ["--kv-cache-memory-bytes", 64 * 2**20, *options]
        return [sys.executable, "-m", "prime_composer.backends.vllm_serve", *map(str, words)]

    def start(self) -> None:
        """Start it, without waiting for it."""
        with self.log.open("ab") as stream:
            if self._forks is not None:
                words = ("-m", "tests.forked_vllm", *self._command[2:])
                self.process = self._forks.start(*words, env=self._env, output=stream)
                return
            self.process = subprocess.Popen(
                self._command,
                env=self._env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """Kill the server and its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it as its operator does; kill it where that takes too long."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> "VllmProcess":
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class TeacherProcess(VllmProcess):
    """The server of ``prime-rl teacher``, which has the scoring plugin.

    The environment variable PRIME_COMPOSER_VLLM_PYTHON names another interpreter for it, whose
    environment has another vLLM, and this package.
    """

    def command(self, options: Sequence[object]) -> list[str]:
        """Return the command line."""
        words = ["--model", self.directory, "--port", self.port, "--", *options]
        python = os.environ.get("PRIME_COMPOSER_VLLM_PYTHON", sys.executable)
        return [python, "-m", "prime_composer.cli", "teacher", *map(str, words)]


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save a tokenizer of numbered words; a stock server needs one to return log-probs."""
    import tokenizers

    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
