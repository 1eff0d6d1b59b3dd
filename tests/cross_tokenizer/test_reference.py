"""The search through a teacher's texts against their enumeration."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.cross_tokenizer.reference import Reference
from tests.cross_tokenizer.test_target import Toy, toy


def rows_of(this: Toy, asked: list[tuple[int, ...]] | None = None):
    """Return the toy teacher as a reference asks it."""

    def ask(sequences: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        if asked is not None:
            asked.extend(sequences)
        return [this.teacher.row(sequence) for sequence in sequences]

    return ask


def enumerated(this: Toy, ids: tuple[int, ...]) -> dict[int, float]:
    """Return Q after some tokens from the probabilities of all texts."""
    vocabulary = range(len(this.pair.student.of_id))
    masses = {token: this.exact.get((*ids, token), 0.0) / this.exact[ids] for token in vocabulary}
    return {token: float(mass) for token, mass in masses.items() if mass > 1e-11}


@pytest.mark.parametrize(
    "seed, words, signs, leads, least",
    [
        (1, True, (True, False), (" ", ""), 0),
        (1, False, (False, False), ("", ""), 3),
    ],
)
def test_reference_is_the_enumeration_of_all_texts(
    seed: int, words: bool, signs: tuple[bool, bool], leads: tuple[str, str], least: int
) -> None:
    """With a teacher that writes its words in several ways. ``least`` tokens come before."""
    this = toy(seed, words=words, noncanonical=0.3, signs=signs, leads=leads)
    reference = Reference(this.pair, rows_of(this), threshold=0.0, words=None)
    checked = 0
    for ids in this.rollouts(2 if words else 8, seed):
        for at in range(least, len(ids)):
            exact = reference.target(ids, at)
            assert exact is not None and exact.pruned == 0
            target = enumerated(this, ids[:at])
            assert {token: q for token, q in exact.q.items() if q > 1e-11} == pytest.approx(
                target, rel=1e-6
            )
            checked += len(target)
    assert checked > 5


def test_reference_with_a_threshold_asks_less_and_says_what_it_left() -> None:
    this = toy(0, words=True, noncanonical=0.3)
    (ids,) = this.rollouts(1, 3)
    every: list[tuple[int, ...]] = []
    few: list[tuple[int, ...]] = []
    whole = Reference(this.pair, rows_of(this, every), threshold=0.0, words=None)
    pruned = Reference(this.pair, rows_of(this, few), threshold=1e-2, words=1)
    for at in range(len(ids)):
        one, two = whole.target(ids, at), pruned.target(ids, at)
        assert one is not None and two is not None and two.pruned > 0
        # At most what was left is at another id, apart from words before the last.
        far = sum(abs(q - two.q.get(token, 0.0)) for token, q in one.q.items())
        assert far <= 2 * two.pruned + 0.1
    assert len(few) < 0.3 * len(every)
