"""Lines and words stay within budgets that may only fall, and functions within limits.

`python -m tests.measures` prints the numbers.
"""

import pytest

from tests.measures import PROJECT, budgets, functions, totals

LONGEST_BODY = 70
DEEPEST_BLOCK = 4
WORDS = {
    "README.md": 700,
    "recipes/README.md": 4500,
    "recipes/results.md": 3000,
    "prime_composer/upstream/README.md": 3000,
    "tests/faults/README.md": 2500,
    "tests/README.md": 1200,
}


def test_lines_and_words_stay_within_their_budgets() -> None:
    """A room without a budget has none: its lines come from another room's."""
    allowed = budgets()
    above = {
        f"{table}.{key}": count
        for table, counts in totals().items()
        for key, count in counts.items()
        if count > allowed[table].get(key, 0)
    }
    assert not above


@pytest.mark.parametrize("page", WORDS)
def test_page_stays_within_its_words(page: str) -> None:
    """With its tables and code."""
    assert len((PROJECT / page).read_text().split()) <= WORDS[page]


def test_no_function_is_longer_or_deeper_than_the_limits() -> None:
    found = functions()
    assert [f.name for f in found if f.body > LONGEST_BODY or f.nesting > DEEPEST_BLOCK] == []
