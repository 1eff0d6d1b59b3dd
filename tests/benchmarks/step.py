"""Print what a step of the one-machine loop costs beyond the work it cannot avoid.

    python -m tests.benchmarks.step [RECIPE] [--set KEY=VALUE]
    python -m tests.benchmarks.step recipes/smollm2.toml --threads --set trainer.steps=12

Unavoidable are vLLM's generation and scoring (time inside ``LLM.generate``), and the student's
forward and backward. The rest is parsing, packing, the loss, the optimizer, answer checking, weight
sync and logging. The last lines are the checks of every step, which are part of all these.

With ``--threads`` the student's forward and backward run twice per step, with one thread and with
those that a large model gets (``cpu_guard.all_cores``), also where the recipe's is too small for
them. The engines have one number in every other step. The table is per 1,000 trained tokens.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402

from prime_composer.backends import cpu_guard  # noqa: E402
from prime_composer.backends.vllm import (
    VLLMEngine,  # noqa: E402
    VLLMSampler,  # noqa: E402
)
from prime_composer.local import collect  # noqa: E402
from prime_composer.local import student as student_module  # noqa: E402
from prime_composer.local import train as train_module  # noqa: E402
from prime_composer.local.student import WeightCheck  # noqa: E402
from prime_composer.local.watch import Watch  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.step import gradients  # noqa: E402
from prime_composer.step.mismatch import Mismatch  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402

spent: dict[str, float] = defaultdict(float)
BOTH = "forward and backward"
CHECKS = ("watch", "sampler's KL", "weights' norms", "collapse")


def timed(name: Callable[[Any], str] | str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name if isinstance(name, str) else name(args[0])] += time.perf_counter() - began

    return wrapper


class Steps:
    """Adds up the steps' parts, without the first three and without those that evaluate."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.count = 0

    def status(self, text: str) -> None: ...

    def start(self, metrics: dict[str, float]) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if step > 3 and "eval/accuracy" not in metrics:
            self.count += 1
            self.parts["step"] += metrics["time/step"]
            for name, seconds in spent.items():
                self.parts[name] += seconds
        spent.clear()


class Turns:
    """Compares numbers of threads, without the first step.

    Args:
        threads: one, and several.
    """

    def __init__(self, threads: Sequence[int]) -> None:
        self.threads = list(threads)
        self.spent: dict[int, dict[str, float]] = {n: defaultdict(float) for n in threads}
        self.tokens: dict[int, float] = defaultdict(float)
        student_module.accumulate_gradients = self.twice(student_module.accumulate_gradients)

    def twice(self, gradients_of: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(model: torch.nn.Module, *args: Any) -> Any:
            for threads in self.threads:
                model.zero_grad()
                with cpu_guard.use_threads(threads):
                    began = time.perf_counter()
                    metrics = gradients_of(model, *args)
                    self.spent[threads][BOTH] += time.perf_counter() - began
            self.threads.reverse()  # whoever is second finds the memory that the first has left
            return metrics

        return wrapper

    def status(self, text: str) -> None: ...

    def start(self, metrics: dict[str, float]) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        tokens = metrics["tokens_per_second"] * metrics["time/step"]
        if step > 1:
            engines = torch.get_num_threads()
            self.tokens[engines] += tokens
            for name in ("vLLM generation", "vLLM scoring"):
                self.spent[engines][name] += spent[name]
        else:
            for times in self.spent.values():
                times.clear()
        spent.clear()
        cpu_guard._set_num_threads(self.threads[0])

    def print(self) -> None:
        """Print milliseconds per 1,000 trained tokens."""
        one, several = sorted(self.threads)
        print(f"ms per 1,000 trained tokens{one:>10} thread{several:>9} threads")
        every = sum(self.tokens.values())
        for name in (BOTH, "vLLM generation", "vLLM scoring"):
            first, second = (
                1e6 * self.spent[n][name] / (every if name == BOTH else self.tokens[n])
                for n in (one, several)
            )
            print(f"{name:>27}{first:17.1f}{second:17.1f}  {first / second:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="recipes/gsm8k_opd.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--threads", action="store_true")
    args = parser.parse_args()
    recipe = load_recipe(
        args.recipe,
        [
            "trainer.steps=40",
            "eval.every=0",
            "eval.size=10",
            "eval.kl_size=10",
            "checkpoint.every=0",
            *args.overrides,
        ],
    )
    if args.threads:
        cpu_guard.LARGE_MODEL = 0
    VLLMEngine._run = timed(
        lambda engine: "vLLM generation" if isinstance(engine, VLLMSampler) else "vLLM scoring",
        VLLMEngine._run,
    )
    gradients.student_inputs = timed("student forward", gradients.student_inputs)
    torch.Tensor.backward = timed("student backward", torch.Tensor.backward)
    Watch.check = timed("watch", Watch.check)
    Mismatch.add = timed("sampler's KL", Mismatch.add)
    WeightCheck.check = timed("weights' norms", WeightCheck.check)
    for name in ("collapse_metrics", "end_metrics"):
        setattr(collect, name, timed("collapse", getattr(collect, name)))
    steps = Steps()
    turns = Turns([1, int(os.environ[cpu_guard.THREADS_VARIABLE])]) if args.threads else None
    with tempfile.TemporaryDirectory() as folder:
        problems = load_problem_set(recipe.sources)
        train_module.train(
            recipe, problems, prepare_models(recipe, problems), Path(folder), turns or steps
        )
    if turns is not None:
        turns.print()
        return
    total = steps.parts.pop("step")
    checks = {name: steps.parts.pop(name) for name in CHECKS}
    for name, seconds in steps.parts.items():
        print(f"{name:>18}: {1000 * seconds / steps.count:7.1f} ms  {seconds / total:6.1%}")
    rest = total - sum(steps.parts.values())
    print(
        f"{'overhead':>18}: {1000 * rest / steps.count:7.1f} ms  {rest / total:6.1%}  of "
        f"{1000 * total / steps.count:.1f} ms"
    )
    for name, seconds in checks.items():
        print(f"{name:>18}: {1000 * seconds / steps.count:7.2f} ms  {seconds / total:6.2%}")


if __name__ == "__main__":
    main()
