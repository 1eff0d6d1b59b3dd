"""List the keys of a recipe that are not carried to prime-rl.

The marks on the recipe's fields (``prime_composer/recipe/carried.py``) say which these are.
"""

from prime_composer.recipe.carried import keys_set
from prime_composer.recipe.schema import Recipe


def not_carried(recipe: Recipe) -> dict[str, str]:
    """Return each key that the recipe sets and prime-rl has no setting for, with the reason.

    A key is left out where its value loses nothing.
    """
    return {
        entry.key: entry.mark.why
        for entry in keys_set(recipe)
        if entry.mark.export == "not carried" and entry.value not in entry.mark.harmless
    }
