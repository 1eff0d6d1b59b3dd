"""Measure what an environment by id adds to a step: the same problems with one and without.

    python -m tests.benchmarks.environment [SIZE ...] [--steps 8] [--batch 8] [--backend vllm]

The problems are the generated ones. Once the engine asks and grades them itself, and once they are
an environment of verifiers with one turn. Both have the same models, prompts and budget, and take
turns step by step, so that other load on the machine affects both alike. A step is sampling,
grading, a teacher's scores, forward, backward and the new weights of the sampler.

"CPU" is the median of the pairs' ratios, per trained token, with the smallest and the largest: that
of all threads of the process, which the environments share. The last column is the CPU time that a
turn adds to sampling. Target: at most 1.15 with a model of SmolLM2's size. The models are random.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

from prime_composer.backends.cpu_guard import all_cores  # noqa: E402
from prime_composer.environments.tasks import problems_and_tasks  # noqa: E402
from prime_composer.local.collect import Clock  # noqa: E402
from prime_composer.local.engine import Engine  # noqa: E402
from prime_composer.local.opening import open_engine  # noqa: E402
from prime_composer.local.sources import ProblemsAndTasks, load_sources  # noqa: E402
from prime_composer.local.student import Student  # noqa: E402
from prime_composer.local.tokenized_problems import TokenizedProblems  # noqa: E402
from prime_composer.problems.loading import ProblemSet  # noqa: E402
from prime_composer.recipe.loading import parse_recipe  # noqa: E402
from tests.environments.kit import ENVIRONMENTS, save_student  # noqa: E402
from tests.local.helpers import collect  # noqa: E402

SIZES = {
    "gsm8k_opd": {
        "vocab_size": 415,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 192,
    },
    "smollm2": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
}
MORE = {"max_position_embeddings": 2048, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of all threads that a step took, per trained token."""

    all: float
    sampling: float  # and grading


class CpuClock(Clock):
    """Remembers the CPU time at which sampling, environments included, and grading ended."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            yield
        if name == "reward":
            self.graded_at = time.process_time()


def run_step(engine: Engine, student: Student, recipe: Any, step: int) -> Cost:
    """Run a step, and return what it took."""
    began, clock = time.process_time(), CpuClock()
    batch, _ = collect(engine, recipe, step, clock)
    student.update(batch, step)
    engine.end_step(step)
    ended = time.process_time()
    return Cost((ended - began) / batch.tokens, (clock.graded_at - began) / batch.tokens)


def measure(size: str, args: argparse.Namespace) -> None:
    """Print the row of one model size."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_student(Path(folder), 0, **SIZES[size], **MORE))
        recipe = parse_recipe(
            {
                "student": {"model": model},
                "teacher": {"model": model},
                "loss": {"type": "topk_reverse_kl", "k": 32, "normalization": "tail"},
                "rollout": {
                    "backend": args.backend,
                    "max_tokens": args.max_tokens,
                    "max_model_len": 384,
                },
                "environments": {
                    "plain": {
                        "source": "generated",
                        "size": 300,
                        "chat_template": True,
                        "prompt_template": "{question}",
                    },
                    "played": {"id": "tiny-sums", "args": {"size": 300}, "max_turns": 1},
                },
                "trainer": {
                    "steps": 1,
                    "batch_size": args.batch,
                    "micro_batch_tokens": 768,
                    "lr": 1e-6,
                },
                "eval": {"size": args.batch, "kl_size": 0},
            }
        )
        sources = load_sources(recipe)
        assert isinstance(sources, ProblemsAndTasks)
        parts = problems_and_tasks(sources.practice)
        with open_engine(recipe, sources, {}, lambda text: None) as engine:
            tokenizer = engine.problems.tokenizer
            plain = ProblemSet([*parts.problems.values()], [], sources.sources)
            played = replace(sources, practice=[*parts.tasks.values()], held_out=[])
            engines = [
                replace(engine, problems=TokenizedProblems(problems, tokenizer))
                for problems in (plain, played)
            ]
            first, second = (one.problems.prompt(one.problems.problem_set.practice[0])
                             for one in engines)  # fmt: skip
            assert first == second, "the prompts differ"
            student = Student(recipe, engine)
            with all_cores(engine.model):
                for one in engines:  # the first calls of libraries
                    run_step(one, student, recipe, 1)
                costs: tuple[list[Cost], list[Cost]] = ([], [])
                for step in range(2, args.steps + 2):
                    order = (0, 1) if step % 2 else (1, 0)
                    for kind in order:
                        costs[kind].append(run_step(engines[kind], student, recipe, step))
        print_row(size, costs, args.max_tokens)


def print_row(size: str, costs: tuple[list[Cost], list[Cost]], turn_tokens: int) -> None:
    """Print ratios and the CPU time of a turn."""
    pairs = list(zip(*costs, strict=True))
    ratios = sorted(played.all / plain.all for plain, played in pairs)
    added = statistics.median(played.sampling - plain.sampling for plain, played in pairs)
    shown = f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{size:>10}  {shown:>22}  {1000 * turn_tokens * added:18.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=[*SIZES], metavar="SIZE")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    args = parser.parse_args()
    sys.path.insert(0, str(ENVIRONMENTS))
    print(f"{'':>10}  {'CPU':>22}  {'CPU ms of a turn':>18}")
    for size in args.sizes:
        measure(size, args)


if __name__ == "__main__":
    main()
