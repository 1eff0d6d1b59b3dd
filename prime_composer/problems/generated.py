"""Generate word problems of one to three operations."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

from prime_composer.problems.config import FINAL_MARK, Problem

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jo Kim Leo "
    "Mia Nia Omar Pia Quinn Rosa Sam Tara Uma Vic Wanda Yan"
).split()
ITEMS = (
    "apples books cards coins eggs hats keys lamps mugs nuts pens pins rings shells stamps toys"
).split()


def generate_problems(size: int, seed: int, operations: Sequence[int] = (1, 2, 3)) -> list[Problem]:
    """Generate ``size`` problems from the templates with one of these numbers of operations."""
    turns = cycle(template for template, count in TEMPLATES.items() if count in operations)

    def draw(rng: random.Random) -> Problem:
        return next(turns)(rng, rng.choice(NAMES), rng.choice(ITEMS))

    return distinct(size, random.Random(f"problems {seed}"), draw, "questions")


def distinct(
    size: int, rng: random.Random, draw: Callable[[random.Random], Problem], what: str
) -> list[Problem]:
    """Return ``size`` problems with distinct questions, as ``draw`` makes them."""
    problems: dict[str, Problem] = {}
    for _ in range(20 * size):
        if len(problems) == size:
            break
        problem = draw(rng)
        problems.setdefault(problem.question, problem)
    if len(problems) < size:
        raise ValueError(f"[data] size = {size}: only {len(problems)} distinct {what} were drawn")
    return list(problems.values())


def _worked(question: str, *steps: tuple[int, str, int]) -> Problem:
    """Return a problem whose answer has a line ``a + b = c`` per step, then ``#### result``."""
    lines = []
    for left, operator, right in steps:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
        lines.append(f"{left} {operator} {right} = {result}")
    return Problem(question, "\n".join([*lines, f"{FINAL_MARK} {result}"]))


def _buys(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 19), rng.randint(2, 19)
    return _worked(f"{name} has {a} {items} and buys {b} more. How many in all?", (a, "+", b))


def _gives(rng: random.Random, name: str, items: str) -> Problem:
    a = rng.randint(5, 24)
    b = rng.randint(2, a - 1)
    return _worked(f"{name} has {a} {items} and gives {b} away. How many are left?", (a, "-", b))


def _boxes(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return _worked(f"{name} fills {a} boxes with {b} {items} each. How many in all?", (a, "*", b))


def _boxes_and_more(rng: random.Random, name: str, items: str) -> Problem:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    question = f"{name} has {a} boxes of {b} {items} and finds {c} more. How many in all?"
    return _worked(question, (a, "*", b), (a * b, "+", c))


def _finds_and_loses(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 19), rng.randint(2, 19)
    c = rng.randint(2, min(9, a + b - 1))
    question = f"{name} has {a} {items}, finds {b} and loses {c}. How many are left?"
    return _worked(question, (a, "+", b), (a + b, "-", c))


def _daily(rng: random.Random, name: str, items: str) -> Problem:
    a, b, c, d = rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 7)
    question = (
        f"{name} makes {a} {items} at dawn and {b} at dusk for {c} days and sells {d}. "
        "How many are left?"
    )
    return _worked(question, (a, "+", b), (a + b, "*", c), ((a + b) * c, "-", d))


TEMPLATES = {_buys: 1, _gives: 1, _boxes: 1, _boxes_and_more: 2, _finds_and_loses: 2, _daily: 3}
"""Number of operations of each template."""
