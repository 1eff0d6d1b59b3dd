"""The generated reports and sentences: facts, grammar, distinctness, and their settings."""

import random
import re
from collections import Counter
from typing import Any

import pytest

from prime_composer.problems.generated_text import (
    CHANGES,
    _sentence,
    generate_summaries,
)

NEWS = re.compile(r"On (\w+) (\w+) (\w+) the (\w+) (\w+) in (\w+)\.")


def test_summary_says_what_its_report_says() -> None:
    """Name, verb, shop and place of the one sentence with news, in one of three wordings."""
    wordings: Counter[int] = Counter()
    for problem in generate_summaries(300, seed=1):
        found = NEWS.findall(problem.question)
        assert len(found) == 1
        day, name, verb, adjective, shop, place = found[0]
        headline_verb = {past: present for past, present, _ in CHANGES}[verb]
        possible = [
            f"{name} {headline_verb} {shop} in {place}",
            f"{place} {shop} {verb} by {name} on {day}",
            f"{adjective} {shop} of {place}: {name} {headline_verb} it",
        ]
        wordings[possible.index(problem.answer)] += 1
        assert problem.question.count(".") in (3, 4)
    assert all(75 < wordings[index] < 125 for index in range(3))


class Chosen(random.Random):
    """It draws what a sentence names: nouns, adjectives, articles, verb and adverb."""

    def __init__(self, words: str):
        super().__init__()
        self.words = words.split(", ")

    def choice(self, options: Any) -> Any:
        word = self.words.pop(0)
        return next(one for one in options if word in (one, one[0]))

    def random(self) -> float:
        return 0.0 if self.words else 1.0


@pytest.mark.parametrize(
    ("words", "english", "german"),
    [
        ("dog, old, the, lamp, new, a, sees",
         "the old dog sees a new lamp", "der alte Hund sieht eine neue Lampe"),
        ("child, small, a, tree, red, the, looks for",
         "a small child looks for the red tree", "ein kleines Kind sucht den roten Baum"),
        ("man, good, a, book, old, a, has",
         "a good man has an old book", "ein guter Mann hat ein altes Buch"),
        ("teacher, old, the, city, small, the, draws, today",
         "today the old teacher draws the small city",
         "heute malt der alte Lehrer die kleine Stadt"),
        ("horse, new, the, child, good, the, finds, often",
         "often the new horse finds the good child",
         "oft findet das neue Pferd das gute Kind"),
    ],
)  # fmt: skip
def test_translation_is_german(words: str, english: str, german: str) -> None:
    """Written by hand: gender, case, the adjectives' endings, the verb in the second place."""
    problem = _sentence(Chosen(words))
    assert (problem.question, problem.answer) == (english, german)
