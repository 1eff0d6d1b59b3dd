"""Print what a step of the one-machine loop costs beyond the work it cannot avoid.

    python -m tests.benchmarks.step [RECIPE] [--set KEY=VALUE]

Unavoidable are vLLM's generation and scoring (time inside ``LLM.generate``), and the student's
forward and backward. The rest is parsing, packing, the loss, the optimizer, answer checking, weight
sync and logging. The last lines are the checks of every step, which are part of all these.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402

from prime_composer.backends.vllm import VLLMEngine, VLLMSampler  # noqa: E402
from prime_composer.local import collect  # noqa: E402
from prime_composer.local.student import WeightCheck  # noqa: E402
from prime_composer.local.train import train  # noqa: E402
from prime_composer.local.watch import Watch  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.step import gradients  # noqa: E402
from prime_composer.step.mismatch import Mismatch  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402

spent: dict[str, float] = defaultdict(float)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="recipes/gsm8k_opd.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    quiet = ["trainer.steps=40", "eval.every=0", "eval.size=10", "eval.kl_size=10"]
    recipe = load_recipe(args.recipe, [*quiet, "checkpoint.every=0", *args.overrides])
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
    with tempfile.TemporaryDirectory() as folder:
        problems = load_problem_set(recipe.sources)
        train(recipe, problems, prepare_models(recipe, problems), Path(folder), steps)
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
