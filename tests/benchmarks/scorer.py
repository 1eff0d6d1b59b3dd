"""Measure what a top-K support costs the teacher: time at each K against time at K = 0.

``python -m tests.benchmarks.scorer`` (from the repository) prints a table. The models are random
Qwen3 models of the sizes that the recipes use. All K score the same rollouts in turns, so that
other load on the machine affects each K alike. A ratio is that of the medians. Target: at most 1.3
at K = 32. "unchecked" is the time without the check of the values (``backends.answers``), in turns
with the rest.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch  # noqa: E402

from prime_composer.backends import alignment  # noqa: E402
from prime_composer.backends.alignment import make_rollout  # noqa: E402
from prime_composer.backends.hf_model import (  # noqa: E402
    import_transformers,
    without_progress_bars,
)
from prime_composer.teachers.transformers import TransformersScorer  # noqa: E402
from prime_composer.teachers.vllm import VLLMScorer  # noqa: E402

SIZES = {
    # name: vocabulary, hidden, layers, prompt tokens, completion tokens, rollouts
    "templates": (415, 64, 3, 40, 24, 64),
    "gsm8k": (1536, 128, 4, 100, 128, 32),
}


def make_model(directory: Path, vocab: int, hidden: int, layers: int) -> Path:
    """Save a random model and return its directory."""
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,
    )
    with without_progress_bars():
        transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def no_check(*arrays: Any, **settings: Any) -> None:
    """Stand in for ``check_scores``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ks", type=int, nargs="+", default=[0, 1, 16, 32, 64])
    arguments = parser.parse_args()
    print(
        f"{'backend':<14}{'model':<11}{'tokens':>7}{'K':>5}{'ms':>9}{'x K=0':>8}"
        f"{'unchecked':>11}{'check':>8}"
    )
    for size, (vocab, hidden, layers, prompt, completion, count) in SIZES.items():
        with tempfile.TemporaryDirectory() as directory:
            model = make_model(Path(directory), vocab, hidden, layers)
            g = torch.Generator().manual_seed(0)
            rollouts = []
            for i in range(count):
                ids = torch.randint(2, vocab, (prompt + completion,), generator=g).tolist()
                rollouts.append(
                    make_rollout(ids[:prompt], ids[prompt:], [0.0] * completion, "length", i)
                )
            vllm_scorer = VLLMScorer(
                model, max_model_len=prompt + completion + 1, max_logprobs=max(arguments.ks)
            )
            scorers = {"vllm": vllm_scorer, "transformers": TransformersScorer(model)}
            check = alignment.check_scores
            seconds: dict[tuple[str, int, bool], list[float]] = {}
            for repeat in range(arguments.repeats + 1):
                for name, scorer in scorers.items():
                    for k in arguments.ks:
                        for checked in (True, False):
                            alignment.check_scores = check if checked else no_check
                            began = time.perf_counter()
                            scorer.score(rollouts, k)
                            if repeat:  # the first round warms up
                                elapsed = time.perf_counter() - began
                                seconds.setdefault((name, k, checked), []).append(elapsed)
            alignment.check_scores = check
            vllm_scorer.close()
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        tokens = count * (prompt + completion)
        for name in scorers:
            for k in arguments.ks:
                median, unchecked = medians[name, k, True], medians[name, k, False]
                ratio = median / medians[name, arguments.ks[0], True]
                print(
                    f"{name:<14}{size:<11}{tokens:>7}{k:>5}{1e3 * median:>9.1f}{ratio:>8.2f}"
                    f"{1e3 * unchecked:>11.1f}{100 * (median / unchecked - 1):>7.1f}%"
                )


if __name__ == "__main__":
    main()
