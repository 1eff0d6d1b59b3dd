"""Measure what a tape costs and saves: scoring with a teacher, onto a tape, and from it.

``python -m tests.benchmarks.tape`` (from the repository) prints a table. The teachers are random
Qwen3 models in transformers, K = 32. The three ways take turns on the same rollouts. Times are CPU
time of this process, the medians of the turns, so that other work on the machine changes them
little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.tape.opening import with_tape
from prime_composer.teachers.transformers import TransformersScorer
from tests.benchmarks.teachers import SIZES, random_rollouts, save_teacher

K = 32


def seconds(score: Any, rollouts: Any) -> float:
    began = time.process_time()
    score(rollouts, K)
    return time.process_time() - began


def measure(name: str, turns: int, folder: Path) -> list[float]:
    """Return microseconds per token with the teacher, onto a tape and from it."""
    sizes = SIZES[name]
    model = save_teacher(folder / "model", sizes)
    found: list[list[float]] = [[], [], []]
    for turn in range(turns):
        rollouts, tape = random_rollouts(sizes, turn), folder / f"tape {turn}"
        scorer = TransformersScorer(model, dtype="float32", max_model_len=512)
        config = TeacherConfig(model=str(model), tape=tape)
        spec = BackendSpec(
            config, "[teacher]", "transformers", model, "float32", 512, sizes.rollouts
        )
        taped = with_tape(scorer, spec, ("hash", None), 0.5, True, print)
        taped.score(rollouts[:1], K)  # the known request, once per tape
        for times, way in zip(found, (scorer.score, taped.score, taped.score), strict=True):
            times.append(seconds(way, rollouts[1:]))
        taped.close()
    tokens = sizes.completion * (sizes.rollouts - 1)
    return [1e6 * statistics.median(times) / tokens for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"us per token, K = {K}{'teacher':>14}{'onto a tape':>14}{'from it':>10}")
    for name in ("templates", "135M"):
        with tempfile.TemporaryDirectory() as folder:
            plain, onto, read = measure(name, arguments.turns, Path(folder))
        print(f"{name:<20}{plain:>14.1f}{onto:>14.1f}{read:>10.2f}")


if __name__ == "__main__":
    main()
