"""A teacher's probabilities after each of its tokens: all, or those that a server listed."""

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class TeacherRows:
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
