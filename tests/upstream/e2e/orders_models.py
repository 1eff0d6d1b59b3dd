"""Write the models of recipes/agent_opd.toml to disk, in bfloat16, with their tokenizer.

The student is pruned less than the recipe's, so that it calls its tools from the first step on.

usage: orders_models.py RECIPE TARGET
"""

import sys
from pathlib import Path

from prime_composer.local.sources import problems_to_prepare
from prime_composer.recipe.loading import load_recipe
from prime_composer.tiny_models.cache import prepare_models

PRUNE = 0.46


def main(path, target):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = load_recipe(path, [f"student.prepare.prune={PRUNE}"])
    problems = problems_to_prepare(recipe)
    for role, folder in prepare_models(recipe, problems).items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(target / role)
        AutoTokenizer.from_pretrained(folder).save_pretrained(target / role)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
