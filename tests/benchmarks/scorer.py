"""Measure what a top-K support costs the teacher: time at K = 32 against time at K = 0.

``python -m tests.benchmarks.scorer`` (from the repository) prints a table. The teachers are random
Qwen3 models of the sizes that the recipes use, in vLLM. Both K score the same rollouts in turns, so
that other load on the machine affects them alike. A ratio is that of the medians. Target: at most
1.3.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from prime_composer.teachers.vllm import VLLMScorer  # noqa: E402
from tests.benchmarks.teachers import SIZES, random_rollouts, save_teacher  # noqa: E402

K, ROUNDS = 32, 15


def main() -> None:
    print(f"{'model':<11}{'tokens':>7}{'K = 0, ms':>12}{f'K = {K}, ms':>12}{'ratio':>8}")
    for size in ("templates", "gsm8k"):
        sizes = SIZES[size]
        rollouts, tokens = random_rollouts(sizes, 0), sizes.prompt + sizes.completion
        seconds: dict[int, list[float]] = {0: [], K: []}
        with tempfile.TemporaryDirectory() as directory:
            model = save_teacher(Path(directory), sizes)
            scorer = VLLMScorer(model, max_model_len=tokens + 1, max_logprobs=K)
            for round_ in range(ROUNDS + 1):
                for k, times in seconds.items():
                    began = time.perf_counter()
                    scorer.score(rollouts, k)
                    if round_:  # the first round warms up
                        times.append(time.perf_counter() - began)
            scorer.close()
        plain, top = (1e3 * statistics.median(times) for times in seconds.values())
        count = sizes.rollouts * tokens
        print(f"{size:<11}{count:>7}{plain:>12.1f}{top:>12.1f}{top / plain:>8.2f}")


if __name__ == "__main__":
    main()
