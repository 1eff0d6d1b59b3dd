"""Generated tasks beside arithmetic: right answers, distinct questions, what a seed decides."""

import pytest

from prime_composer.problems.config import DataConfig
from prime_composer.problems.generated_tasks import generate_lookups, generate_reversals
from prime_composer.problems.loading import load_problems


def test_reversal_has_its_words_from_last_to_first():
    problems = generate_reversals(300, 0)
    assert len({problem.question for problem in problems}) == 300
    for problem in problems:
        words = problem.question.split(" ")
        assert 3 <= len(words) <= 6 and len(set(words)) == len(words)
        assert problem.answer.split(" ")[::-1] == words


def test_lookup_asks_for_a_number_of_its_table():
    places = set()
    for problem in generate_lookups(300, 0):
        table, wanted = problem.question.removesuffix("?").split(". ")
        entries = dict(entry.split(" ") for entry in table.split(", "))
        assert 3 <= len(entries) <= 5
        assert problem.answer == entries[wanted]
        places.add(list(entries).index(wanted))
    assert places == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["reversal", "lookup"])
def test_task_is_drawn_from_its_seed_and_split(kind):
    def load(seed):
        return load_problems(DataConfig(kind=kind, metric="exact", size=40, seed=seed))

    train, held_out = load(3)
    assert (len(train), len(held_out)) == (36, 4)
    assert load(3) == (train, held_out) != load(4)


def test_task_without_a_number_refuses_a_math_metric():
    with pytest.raises(ValueError, match='kind = "lookup" has none: set metric = "exact"'):
        DataConfig(kind="lookup")
