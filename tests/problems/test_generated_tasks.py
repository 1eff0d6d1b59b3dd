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


def test_lookup_answers_from_one_table():
    """Each name has the same entry in every problem, and another seed has another table."""
    tables = []
    for seed in (0, 1):
        table: dict[str, str] = {}
        for problem in generate_lookups(300, seed):
            names, entries = problem.question.split(", "), problem.answer.split(", ")
            assert 2 <= len(names) == len(entries) <= 5 and len(set(names)) == len(names)
            for name, entry in zip(names, entries, strict=True):
                assert table.setdefault(name, entry) == entry
        tables.append(table)
    assert tables[0].keys() == tables[1].keys() and tables[0] != tables[1]


KINDS = {
    "arithmetic": "gsm8k",
    "reversal": "exact",
    "lookup": "exact",
    "summary": "rouge2",
    "translation": "bleu",
    "facts": "short_answer",
}


@pytest.mark.parametrize("kind", KINDS)
def test_task_is_drawn_from_its_seed_and_split(kind):
    """No question comes twice, and ``kind`` chooses the generator."""

    def load(seed):
        return load_problems(DataConfig(kind=kind, metric=KINDS[kind], size=60, seed=seed))

    train, held_out = load(3)
    assert (len(train), len(held_out)) == (54, 6)
    assert len({problem.question for problem in train + held_out}) == 60
    assert load(3) == (train, held_out) != load(4)
    assert ("On " in train[0].question) == (kind == "summary")
