"""Lines and words stay within budgets that may only fall, and functions within limits.

`python -m tests.measures` prints the numbers.
"""

from tests.measures import budgets, containers_of_scores, functions, totals

LONGEST_BODY = 70
DEEPEST_BLOCK = 4
CONTAINERS = {"contract.Scores", "contract.Support"}
"""A teacher's response from the wire to the loss: the record, and its columns at the loss."""


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


def test_no_function_is_longer_or_deeper_than_the_limits() -> None:
    found = functions()
    assert [f.name for f in found if f.body > LONGEST_BODY or f.nesting > DEEPEST_BLOCK] == []


def test_scores_have_two_containers() -> None:
    assert set(containers_of_scores()) == CONTAINERS
