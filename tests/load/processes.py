"""A vLLM server process, and the memory and descriptors of processes, from ``/proc``."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MB = 2**20


def memory(pids: Sequence[int]) -> float:
    """Return the resident memory of processes together, in MB; what has ended counts nothing."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def descriptors(pids: Sequence[int]) -> int:
    """Return the number of open descriptors of processes together."""
    count = 0
    for pid in pids:
        try:
            count += len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


def tree_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in task.read_text().split()]
    return pids


@dataclass
class Level:
    """A number over time: where it was after the warm-up, and where it ended.

    Attributes:
        start: median of the first fifth of the samples.
        warm: median of the samples between two and three fifths.
        end: median of the last fifth.
    """

    start: float
    warm: float
    end: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Level":
        """Return the level of samples that were taken at equal times."""
        n = len(samples)
        parts = (samples[: n // 5], samples[2 * n // 5 : 3 * n // 5], samples[4 * n // 5 :])
        return cls(*(median(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.start:.0f} -> {self.warm:.0f} -> {self.end:.0f}"


@contextmanager
def vllm_server(directory: Path, log: Path, max_logprobs: int) -> Iterator[tuple[str, int]]:
    """Serve a model by plain vLLM on 127.0.0.1; yields the URL and the process's id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options: dict[str, object] = {
        "model": directory,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 320,
        "kv-cache-memory-bytes": 64 * MB,
        "max-logprobs": max_logprobs,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "prime_composer.backends.vllm_serve", *words]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--enforce-eager"],
            env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save a tokenizer of numbered words; a stock server needs one to return log-probs."""
    import tokenizers

    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
