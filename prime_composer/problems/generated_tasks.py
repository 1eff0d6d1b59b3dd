"""Generate tasks beside arithmetic: words in reverse, and entries of a table."""

import random

from prime_composer.problems.config import Problem
from prime_composer.problems.generated import ITEMS, NAMES, distinct
from prime_composer.problems.generated_text import DAYS, GOODS, PLACES, SHOPS

WORDS = sorted({*(word.lower() for word in (*PLACES, *DAYS)), *SHOPS, *GOODS, *ITEMS})


def generate_reversals(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` distinct lists of three to six words; the answer is the list in reverse."""
    return distinct(size, random.Random(f"reversals {seed}"), _reversal, "lists of words")


def _reversal(rng: random.Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(3, 6))
    return Problem(" ".join(words), " ".join(reversed(words)))


def generate_lookups(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` distinct lists of two to five names; the answer is what each of them has.

    Who has what is drawn from the seed and not shown, so a model has to learn it.
    """
    rng = random.Random(f"lookups {seed}")
    table = {name: rng.choice(GOODS) for name in NAMES}

    def draw(rng: random.Random) -> Problem:
        names = rng.sample(NAMES, rng.randint(2, 5))
        return Problem(", ".join(names), ", ".join(table[name] for name in names))

    return distinct(size, rng, draw, "lists of names")
