"""Generate tasks beside arithmetic: words in reverse, and lookups in a small table."""

import random

from prime_composer.problems.config import Problem
from prime_composer.problems.generated import ITEMS, NAMES
from prime_composer.problems.generated_text import DAYS, GOODS, PLACES, SHOPS, distinct

WORDS = sorted({*(word.lower() for word in (*PLACES, *DAYS)), *SHOPS, *GOODS, *ITEMS})


def generate_reversals(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` distinct lists of three to six words; the answer is the list in reverse.

    Args:
        size: number of problems.
        seed: seed of everything that is drawn.

    Raises:
        ValueError: there are not so many distinct lists.
    """
    return distinct(size, random.Random(f"reversals {seed}"), _reversal, "lists of words")


def _reversal(rng: random.Random) -> Problem:
    words = rng.sample(WORDS, rng.randint(3, 6))
    return Problem(" ".join(words), " ".join(reversed(words)))


def generate_lookups(size: int, seed: int) -> list[Problem]:
    """Generate ``size`` distinct tables of three to five names with a number each, and ask for one.

    Args:
        size: number of problems.
        seed: seed of everything that is drawn.

    Raises:
        ValueError: there are not so many distinct tables.
    """
    return distinct(size, random.Random(f"lookups {seed}"), _lookup, "tables")


def _lookup(rng: random.Random) -> Problem:
    names = rng.sample(NAMES, rng.randint(3, 5))
    table = {name: rng.randint(10, 99) for name in names}
    entries = ", ".join(f"{name} {number}" for name, number in table.items())
    wanted = rng.choice(names)
    return Problem(f"{entries}. {wanted}?", str(table[wanted]))
