"""Train the model that comes with the package again, and write it into the package.

    python -m tests.studies.ship [recipes/gsm8k_opd.toml]

Its weights are rounded to half precision, which every processor reads as the same numbers. The
recipe's student is pruned from it, also the same everywhere. What was measured with the old model
has to be measured again.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import load_recipe
from prime_composer.tiny_models.cache import (
    DESCRIPTION,
    SHIPPED,
    WEIGHTS,
    prepare_configs,
    prepare_model,
    weights_digest,
)


def ship(recipe_file: Path) -> Path:
    """Train the recipe's teacher, and return its folder in the package."""
    recipe = load_recipe(recipe_file)
    problems = load_problem_set(recipe.sources)
    _, config = prepare_configs(recipe)["teacher"]
    with tempfile.TemporaryDirectory() as cache:
        trained = prepare_model(config, problems, Path(cache), rebuild=True)
        folder = SHIPPED / trained.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder)
    weights = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    assert all(torch.isfinite(value).all() for value in weights.values())
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    description = json.loads((folder / DESCRIPTION).read_text())
    del description["rebuilt"]
    description["sha256"] = weights_digest(folder)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("recipes/gsm8k_opd.toml"))
    print(ship(parser.parse_args().recipe))
