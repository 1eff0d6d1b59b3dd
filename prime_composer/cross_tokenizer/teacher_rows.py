"""A teacher's probabilities after each of its tokens: all, or those that a server listed."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Rows:
    """A teacher's probabilities after each of its tokens, [rows, V_T]; 0 for ids not listed."""

    def __init__(self, probabilities: Float[Tensor, "rows vocab"]):
        self._probabilities = probabilities.cpu().numpy()

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """Return the probability of an id of each row, [e]."""
        return self._probabilities[rows, ids].astype(np.float64)

    def unlisted(self, rows: Ints) -> Floats:
        """Return the mass of the ids that are not listed, [e]."""
        return (1 - self._probabilities[rows].sum(1, dtype=np.float64)).clip(min=0.0)

    def largest(self, rows: Ints, least: Floats) -> tuple[Ints, Ints, Floats]:
        """Return the ids with at least some probability.

        They are places in ``rows`` [e], in order, and ids and probabilities; ``least`` is [e].
        """
        probabilities = self._probabilities[rows]
        at, ids = (probabilities >= least[:, None]).nonzero()
        return at, ids, probabilities[at, ids].astype(np.float64)


class ListedRows(Rows):
    """The same of which some entries are known; 0 for all others.

    ``ids`` are listed, [rows, m], the most probable one first. ``own_ids`` are the text's own token
    after each of the first rows.
    """

    def __init__(
        self, ids: Ints, probabilities: Floats, own_ids: Sequence[int], own_probabilities: Floats
    ):
        n = len(own_ids)
        self._last = probabilities[:, -1]
        self._ids = np.concatenate([np.full((len(ids), 1), -1), ids], 1)
        self._listed = np.concatenate([np.full((len(ids), 1), -1.0), probabilities], 1)
        self._ids[:n, 0] = own_ids
        self._listed[:n, 0] = own_probabilities
        # A text's own token has its own number, which a list may have as well.
        self._listed[:, 1:][self._ids[:, 1:] == self._ids[:, :1]] = -1.0

    def at(self, rows: Ints, ids: Ints) -> Floats:
        """Return the probability of an id of each row, [e]."""
        return self._found(rows, ids, np.zeros(len(rows)))

    def at_most(self, rows: Ints, ids: Ints) -> Floats:
        """Return a bound of these: an id that is not listed has the last one's at most."""
        return self._found(rows, ids, self._last[rows])

    def unlisted(self, rows: Ints) -> Floats:
        """Return the mass of the ids that are not listed, [e]."""
        return (1 - self._listed[rows].clip(min=0.0).sum(1)).clip(min=0.0)

    def largest(self, rows: Ints, least: Floats) -> tuple[Ints, Ints, Floats]:
        """Return the listed ids with at least some probability, as ``Rows`` does."""
        at, column = (self._listed[rows] >= least[:, None]).nonzero()
        return at, self._ids[rows[at], column], self._listed[rows[at], column]

    def _found(self, rows: Ints, ids: Ints, otherwise: Floats) -> Floats:
        column = (self._ids[rows] == ids[:, None]).argmax(1)
        return np.where(self._ids[rows, column] == ids, self._listed[rows, column], otherwise)
