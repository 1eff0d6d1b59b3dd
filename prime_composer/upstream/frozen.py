"""Ask a frozen teacher again what it has answered before: its server may serve another model now.

The question is the beginning of one sequence. Whoever asks the teachers asks it every
``ASKED_EVERY`` sequences, and after contact with the server was lost.
"""

from typing import Any, NamedTuple

import numpy as np

from prime_composer.backends.answers import InvalidAnswer

ASKED_EVERY = 256
"""Sequences that a teacher scores between two questions whose answer is known."""

QUESTION_TOKENS = range(16, 65)
"""Tokens of that question: the beginning of the first sequence that is long enough."""

APART = 0.5
"""Nats by which half precision may move a log-prob."""

SHARE_APART = 0.1
"""Share of the positions that may be further apart in a right server's two answers. A model with
experts may choose others at a position, where other requests are in its batch."""


class Numbers(NamedTuple):
    """A teacher's answer as NumPy arrays, one row per scored token.

    Attributes:
        own: log q of the token, [n].
        token_ids: the top K, most probable first, [n, k].
        logprobs: their log q, [n, k].
    """

    own: Any
    token_ids: Any
    logprobs: Any


def share_apart(first: Numbers, again: Numbers) -> float:
    """Return the share of positions at which two answers are more than ``APART`` nats apart.

    Compared are the sequence's own token, and the first answer's most probable id where there is a
    support. If the second answer does not list it, the last id that it lists is an upper bound.
    """
    apart = np.abs(_finite(first.own) - _finite(again.own)) > APART
    if first.token_ids.shape[1]:
        same = again.token_ids == first.token_ids[:, :1]
        values, best = _finite(again.logprobs), _finite(first.logprobs[:, 0])
        listed = same.any(axis=1)
        value = np.where(listed, (values * same).sum(axis=1), values[:, -1])
        gap = best - value
        apart |= np.where(listed, np.abs(gap), gap) > APART
    return float(apart.mean())


def check_again(first: Numbers, again: Numbers, origin: str) -> None:
    """Check that a teacher gives its first answer again.

    Args:
        first: its first answer.
        again: the new one, to the same question.
        origin: who answered, for messages.

    Raises:
        InvalidAnswer: the answers differ.
    """
    share = share_apart(first, again)
    if share > SHARE_APART:
        raise InvalidAnswer(
            f"{origin} scores the tokens of the run's start with other numbers than then, "
            f"at {share:.0%} of the positions more than {APART:g} nat apart. It serves "
            "another model now, or in another way: start it as it was. Steps since its "
            f"last right answer, at most {ASKED_EVERY} requests ago, may have trained on "
            "wrong numbers."
        )


def _finite(logprobs: Any) -> Any:
    """Return log-probs as an array, with -1000 for less."""
    return np.maximum(np.asarray(logprobs, np.float64), -1000.0)
