"""Train a recipe, and print where it ran and how far its student was from the teacher.

    python -m tests.gpu.demo RECIPE FOLDER [KEY=VALUE ...]

The last line is a JSON object: ``student`` and ``engines`` are kinds of devices, ``reverse_kl`` is
exact, in nats per token, before the first step and after the last one.
"""

import json
import sys
from pathlib import Path

from prime_composer.cli.machine import set_environment

set_environment()

from torch import nn  # noqa: E402

from prime_composer.local.train import train  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.step import gradients  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402
from tests.local.helpers import Silent  # noqa: E402


def main() -> None:
    path, folder, *overrides = sys.argv[1:]
    recipe = load_recipe(path, overrides)
    devices = set()
    prepare = gradients.prepare_micro_batches

    def watched(model: nn.Module, *rest, **named):
        devices.update(parameter.device.type for parameter in model.parameters())
        return prepare(model, *rest, **named)

    gradients.prepare_micro_batches = watched
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    evaluations = train(recipe, problems, paths, Path(folder), Silent()).evaluations
    from vllm.platforms import current_platform

    kls = [evaluations[step]["eval/reverse_kl"] for step in sorted(evaluations)]
    result = {
        "student": sorted(devices),
        "engines": current_platform.device_type,
        "reverse_kl": [kls[0], kls[-1]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
