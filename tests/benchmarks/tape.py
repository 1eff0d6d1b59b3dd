"""Measure what a tape costs and saves: scoring with a teacher, onto a tape, and from it.

``python -m tests.benchmarks.tape`` (from the repository) prints a table. The teachers are random
Qwen3 models in transformers. The three ways take turns on the same rollouts. Times are CPU time of
this process, the medians of the turns, so that other work on the machine changes them little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.tape.opening import with_tape
from prime_composer.teachers.tape.store import inspect
from prime_composer.teachers.transformers import TransformersScorer
from tests.benchmarks.scorer import make_model

SIZES = {
    # name: vocabulary, hidden, layers, prompt tokens, completion tokens, rollouts
    "templates": (415, 64, 3, 40, 24, 64),
    "gsm8k": (1536, 128, 4, 100, 128, 32),
    "135M": (49152, 576, 30, 100, 64, 8),
}
ASKED: dict[str, dict[str, Any]] = {
    "K = 16": {"support_size": 16},
    "K = 32": {"support_size": 32},
    "hidden states": {"support_size": 0, "hidden": True},
}


def seconds(score: Any, rollouts: Any, asked: dict[str, Any]) -> float:
    began = time.process_time()
    score(rollouts, **asked)
    return time.process_time() - began


def measure(name: str, asked: dict[str, Any], turns: int, folder: Path) -> list[float]:
    """Return microseconds per token with the teacher, onto a tape and from it; bytes per token."""
    vocab, hidden, layers, prompt, completion, count = SIZES[name]
    model = make_model(folder / "model", vocab, hidden, layers)
    dtype = "bfloat16" if asked.get("hidden") else "float32"
    found: list[list[float]] = [[], [], []]
    for turn in range(turns):
        generator = torch.Generator().manual_seed(turn)
        rollouts = [
            make_rollout(
                torch.randint(2, vocab, (prompt,), generator=generator).tolist(),
                torch.randint(2, vocab, (completion,), generator=generator).tolist(),
                [-1.0] * completion,
                "length",
                index,
            )
            for index in range(count)
        ]
        tape = folder / f"tape {turn}"
        scorer = TransformersScorer(model, dtype=dtype, max_model_len=512)
        config = TeacherConfig(model=str(model), tape=tape)
        spec = BackendSpec(config, "[teacher]", "transformers", model, dtype, 512, count)
        taped = with_tape(scorer, spec, ("hash", None), 0.5, True, print)
        taped.score(rollouts[:1], **asked)  # the known request and the head, once per tape
        ways = (scorer.score, taped.score, taped.score)
        for times, way in zip(found, ways, strict=True):
            times.append(seconds(way, rollouts[1:], asked))
        taped.close()
    tokens = completion * (count - 1)
    kinds = inspect(tape).kinds
    (totals,) = [own for (kind, *_), own in kinds.items() if kind == "top K"]
    return [
        *(1e6 * statistics.median(times) / tokens for times in found),
        totals["bytes"] / totals["rows"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("us per token       teacher   onto a tape   from it   bytes per token")
    for name in arguments.sizes:
        for words, asked in ASKED.items():
            with tempfile.TemporaryDirectory() as folder:
                plain, onto, read, size = measure(name, asked, arguments.turns, Path(folder))
            print(f"{name + ', ' + words:<26}{plain:>8.1f}{onto:>14.1f}{read:>10.2f}{size:>18.0f}")


if __name__ == "__main__":
    main()
