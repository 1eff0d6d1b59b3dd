"""Ask a frozen teacher again what it has answered before: its server may serve another model now.

The question is the beginning of one sequence. Whoever asks the teachers asks it every
``ASKED_EVERY`` sequences, and after contact with the server was lost.
"""

import torch
from torch import Tensor

from prime_composer.contract import InvalidAnswer, Scores

ASKED_EVERY = 256
"""Sequences that a teacher scores between two questions whose answer is known."""

QUESTION_TOKENS = range(16, 65)
"""Tokens of that question: the beginning of the first sequence that is long enough."""

APART = 0.5
"""Nats by which half precision may move a log-prob."""

SHARE_APART = 0.1
"""Share of the positions that may be further apart in a right server's two answers. A model with
experts may choose others at a position, where other requests are in its batch."""


def share_apart(first: Scores, again: Scores) -> float:
    """Return the share of positions at which two answers are more than ``APART`` nats apart.

    Compared are the sequence's own token, and the first answer's most probable id where there is a
    support. If the second answer does not list it, the last id that it lists is an upper bound.
    """
    apart = (_finite(first.ref_logprobs) - _finite(again.ref_logprobs)).abs() > APART
    if first.k:
        same = again.token_ids == first.token_ids[:, :1]
        values, best = _finite(again.teacher_logprobs), _finite(first.teacher_logprobs[:, 0])
        listed = same.any(dim=1)
        value = torch.where(listed, (values * same).sum(dim=1), values[:, -1])
        gap = best - value
        apart |= torch.where(listed, gap.abs(), gap) > APART
    return float(apart.double().mean())


def check_again(first: Scores, again: Scores, origin: str) -> None:
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


def _finite(logprobs: Tensor) -> Tensor:
    """Return log-probs in float64, with -1000 for less."""
    return logprobs.double().clamp(min=-1000.0)
