"""Ask a scoring server for the hidden states of one long sequence, and print what it took.

    python -m tests.scoring.long_client URL TOKENS

prints as JSON: shape, SHA-256 of the states' bits, seconds, and the largest memory in bytes above
that at the beginning.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch

from prime_composer.backends.alignment import make_rollout, sequences_to_score
from prime_composer.backends.http import Connection
from prime_composer.contract import TeacherHead
from prime_composer.recipe.backends import Served
from prime_composer.teachers.client import TeacherClient
from prime_composer.teachers.server import ServerScorer


class Bare(ServerScorer):
    """The transport of a server that has the plugin's routes alone."""

    def __init__(self, url: str):
        self._connection = Connection(Served(url=url), "[teacher]")


def memory(name: str) -> int:
    """Return a size of this process in bytes, by its name in ``/proc``."""
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(url: str, tokens: int) -> None:
    """Ask once."""
    torch.set_num_threads(1)
    transport = Bare(url)
    connection, client = transport._connection, TeacherClient(transport, "m")
    connection.run(client.discover())
    assert client.facts is not None
    rollout = make_rollout([1], [1] * (tokens - 1), [0.0] * (tokens - 1), "length", 0)
    (sequence,) = sequences_to_score([rollout])
    torch.ones(1, dtype=torch.bfloat16).isfinite().any()
    before, begin = memory("VmRSS"), time.monotonic()
    head = TeacherHead(torch.zeros(1, 1))
    scores = connection.run(client.score(sequence, k=0, head=head))
    hidden = scores.hidden[0].states
    seconds, added = time.monotonic() - begin, memory("VmHWM") - before
    digest = hashlib.sha256(hidden.view(torch.int16).numpy()).hexdigest()
    aligned = hidden.data_ptr() % 64
    print(json.dumps([list(hidden.shape), digest, seconds, added, aligned]))
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
