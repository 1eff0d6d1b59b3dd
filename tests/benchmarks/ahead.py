"""Measure what ``rollout.ahead`` saves: seconds per step with batches ahead of it and without.

    python -m tests.benchmarks.ahead [RECIPE] [--ahead 1 2] [--steps 14] [--rounds 3] [--threads 1]
        [--set KEY=VALUE]

Two vLLM servers, of student and teacher, and the trainer share two cores. Runs of ``--steps`` steps
take turns, so that other load meets all of them; each begins with the weights of the start, in the
same two servers. With ``--threads 1`` both servers have one core, where they work in turn, and the
trainer has the other. With ``--threads 2`` everyone has both, so that each part of a step that runs
alone is as fast as it can be here, which is the fairer comparison for a run without ``ahead``.

A row has the median step of all rounds, without a run's first two and its last, and its ratio to
the one without batches ahead, with the smallest and largest of the rounds.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402

from prime_composer.backends.cpu_guard import THREADS_VARIABLE, use_threads  # noqa: E402
from prime_composer.backends.hf_model import load_student  # noqa: E402
from prime_composer.local.tracker import read_metrics  # noqa: E402
from prime_composer.local.train import train  # noqa: E402
from prime_composer.problems.loading import ProblemSet, load_problem_set  # noqa: E402
from prime_composer.recipe.loading import apply_override, parse_recipe, read_tables  # noqa: E402
from prime_composer.samplers.server import ServerSampler  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402
from tests.local.helpers import Silent  # noqa: E402
from tests.vllm_process import TeacherProcess, VllmProcess  # noqa: E402

SKIPPED = 2


@contextmanager
def servers(
    paths: dict[str, Path], raw: dict[str, Any], folder: Path, threads: int
) -> Iterator[None]:
    """Start the servers of student and teacher, and name them in the recipe's tables."""
    options = ("--dtype", "float32", "--max-model-len", raw["rollout"]["max_model_len"])
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else "0-1"}
    processed = ("--logprobs-mode", "processed_logprobs")
    dev = {"VLLM_SERVER_DEV_MODE": "1"}
    with (
        VllmProcess(
            paths["student"], folder / "s.log", *options, *processed, **env, **dev
        ) as student,
        TeacherProcess(paths["teacher"], folder / "t.log", *options, **env) as teacher,
    ):
        raw["student"], raw["teacher"] = {"model": str(paths["student"])}, {
            "model": str(paths["teacher"]), "url": teacher.url, "dtype": "float32",
        }  # fmt: skip
        raw["rollout"] |= {"backend": "server", "url": student.url}
        yield


def measured(raw: dict[str, Any], problems: ProblemSet, ahead: int, run_dir: Path) -> list[float]:
    """Run a recipe from the start, and return its steps' seconds."""
    raw["rollout"]["ahead"] = ahead
    recipe = parse_recipe(raw)
    sampler = ServerSampler(recipe.rollout.url, raw["student"]["model"])
    sampler.update_weights(load_student(raw["student"]["model"])[0])
    sampler.close()
    run_dir.mkdir()
    train(recipe, problems, {}, run_dir, Silent())
    return [step["time/step"] for step in read_metrics(run_dir)[1 + SKIPPED : -1]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="recipes/gsm8k_opd.toml")
    parser.add_argument("--ahead", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, choices=(1, 2))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    raw = read_tables(arguments.recipe, "recipe", "recipes/")
    for override in arguments.overrides:
        apply_override(raw, override)
    raw["trainer"]["steps"] = arguments.steps
    raw |= {"eval": {"every": 0, "size": 4, "kl_size": 4}, "checkpoint": {"every": 0}}
    raw["logging"] = {"tensorboard": False}
    prepared = parse_recipe(raw)
    problems = load_problem_set(prepared.problem_sources)
    paths = dict(prepare_models(prepared, problems))
    if arguments.threads == 1:
        os.environ.pop(THREADS_VARIABLE, None)
        os.sched_setaffinity(0, {1})
    seconds: dict[int, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name, use_threads(arguments.threads):
        folder = Path(name)
        with servers(paths, raw, folder, arguments.threads):
            for turn in range(arguments.rounds):
                for ahead in (0, *arguments.ahead):
                    run_dir = folder / f"{turn}_{ahead}"
                    seconds.setdefault(ahead, []).append(measured(raw, problems, ahead, run_dir))
    print(f"torch has {torch.get_num_threads()} thread(s); seconds, medians of "
          f"{arguments.rounds} x {arguments.steps - SKIPPED - 1} steps")  # fmt: skip
    print(f"{'ahead':<8}{'step':>9}{'ratio':>22}")
    for ahead, rounds in seconds.items():
        median = statistics.median(step for one in rounds for step in one)
        pairs = zip(rounds, seconds[0], strict=True)
        ratios = [statistics.median(own) / statistics.median(plain) for own, plain in pairs]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{ahead:<8}{median:>9.3f}{spread:>22}")


if __name__ == "__main__":
    main()
