"""Masses of student tokens at many positions, changed at all of these at once."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prime_composer.cross_tokenizer.sums import Candidates
from prime_composer.cross_tokenizer.teacher_rows import Floats, Ints


def added(places: Ints, values: Floats, size: int) -> Floats:
    """Return the sum of the values of each place, [size]."""
    # Of nothing, NumPy's sums are whole numbers.
    return np.bincount(places, values, size).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Masses:
    """Masses of student tokens at n positions, an entry for each token of a position."""

    width: int  # entries of the student's vocabulary
    keys: Ints  # position times ``width``, plus the token, in order, [e]
    closed: Floats  # mass that is certain, [e]
    open: Floats  # mass that may turn out to be another token's, [e]
    total: Floats  # of each position, with the tokens that have no entry, [n]
    # open mass of dropped tokens: it belongs to another token, or to another text, [n]
    doubtful: Floats
    # mass of what follows the rollout's own tokens and is in no list of theirs, [n]: it counts as
    # if nothing followed, and may be another token's
    unlisted: Floats

    @classmethod
    def of(cls, candidates: Candidates, width: int) -> "Masses":
        ids = candidates.ids.cpu().numpy()
        n = len(ids)
        kept = ids >= 0
        keys = (np.arange(n)[:, None] * width + ids)[kept]
        order = keys.argsort()
        closed, open_ = (
            part.cpu().numpy()[kept][order].astype(np.float64)
            for part in (candidates.closed, candidates.open)
        )
        total = candidates.total.cpu().numpy().astype(np.float64)
        return cls(width, keys[order], closed, open_, total, np.zeros(n), np.zeros(n))

    @property
    def positions(self) -> Ints:
        return self.keys // self.width

    @property
    def tokens(self) -> Ints:
        return self.keys % self.width

    def find(self, positions: Ints, tokens: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the entry of a token at each position, and whether it has one."""
        keys = positions * self.width + tokens
        at = self.keys.searchsorted(keys)
        has = at < len(self.keys)
        has[has] = self.keys[at[has]] == keys[has]
        return at, has

    def less(
        self, positions: Ints, tokens: Ints, mass: Floats, is_open: NDArray[np.bool_]
    ) -> "Masses":
        """Return these without mass of a token at each of some positions, which are different."""
        at, has = self.find(positions, tokens)
        closed, open_ = self.closed.copy(), self.open.copy()
        for target, use in ((closed, has & ~is_open), (open_, has & is_open)):
            target[at[use]] = np.maximum(target[at[use]] - mass[use], 0.0)
        return replace(self, closed=closed, open=open_)

    def more(
        self, positions: Ints, tokens: Ints, mass: Floats, is_open: NDArray[np.bool_]
    ) -> "Masses":
        """Return these with more mass of some tokens. The totals have it already."""
        every = np.concatenate([self.keys, positions * self.width + tokens])
        keys, of_key = np.unique(every, return_inverse=True)
        closed, open_ = (
            added(of_key, np.concatenate([own, mass * use]), len(keys))
            for own, use in ((self.closed, ~is_open), (self.open, is_open))
        )
        return replace(self, keys=keys, closed=closed, open=open_)

    def only(self, kept: NDArray[np.bool_]) -> "Masses":
        """Return these without the entries that are not kept, and without their mass."""
        n, at = len(self.total), self.positions[~kept]
        unsure = added(at, self.open[~kept], n)
        return replace(
            self,
            keys=self.keys[kept],
            closed=self.closed[kept],
            open=self.open[kept],
            total=self.total - added(at, self.closed[~kept], n) - unsure,
            doubtful=self.doubtful + unsure,
        )
