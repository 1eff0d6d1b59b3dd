"""Long rollouts: an answer is in the client's memory once, and in the server's engine once."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prime_composer.scoring.wire import (
    NAME,
    VERSION,
    Facts,
    Field,
    ScoreResponse,
    SequenceRows,
    response_parts,
)
from tests.stand_in import Reply, serving

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc for the memory of a process"
)


@pytest.mark.parametrize(
    ("tokens", "columns", "says_length", "more"),
    [
        # Less than a second copy of 134 MB. The process itself grows by 38 MB, and by 74 MB where
        # its modules are compiled for the first time.
        (16_384, 4096, True, 3 * 2**25),
        (1024, 4095, False, 3 * 2**25),
        pytest.param(131_072, 4096, True, 0.3 * 2**30, marks=pytest.mark.slow),
    ],
    ids=["16k", "unknown length", "131k"],
)
def test_long_answer_is_in_memory_once(tokens, columns, says_length, more, capsys):
    """Hidden states in bfloat16, bit for bit. A proxy may hide how long the answer is."""
    n = tokens - 1
    states = np.arange(n * columns, dtype=np.uint32).astype(np.uint16) % 0x7F80  # all finite
    states = states.reshape(n, columns)
    arrays = {
        "sampled": ("float32", np.full(n, -1.0, "<f4")),
        "top_ids": ("int32", np.full((n, 1), 2, "<i4")),
        "top_logprobs": ("float32", np.full((n, 1), -0.5, "<f4")),
        "hidden": ("bfloat16", states),
    }
    fields = [
        Field(name, dtype, 0 if array.ndim == 1 else array.shape[1])
        for name, (dtype, array) in arrays.items()
    ]
    facts = Facts("m", 1000, columns, 2**18, "bfloat16", ["sampled", "top_k", "hidden"], "0.32.0")
    data = np.concatenate([array.reshape(-1).view(np.uint8) for _, array in arrays.values()])
    parts = response_parts(
        ScoreResponse(NAME, VERSION, facts, [SequenceRows(n, fields, data.data)])
    )
    whole, greeting = Reply.of(*parts), ScoreResponse(NAME, VERSION, facts, [])

    def answer(path, body):
        if not body["sequences"]:
            return Reply.of(msgspec.msgpack.encode(greeting))
        return replace(whole, length=whole.length if says_length else None)

    with serving(answer) as url:
        command = [sys.executable, "-m", "tests.scoring.long_client", url, str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shape, digest, seconds, added, misaligned = json.loads(done.stdout)
    assert shape == [n, columns]
    assert digest == hashlib.sha256(states).hexdigest()
    assert not says_length or misaligned % 2 == 0
    with capsys.disabled():
        print(f"\n{len(data):,} bytes: {seconds:.1f} s, {added / len(data):.2f} times in memory")
    assert added < len(data) + more
