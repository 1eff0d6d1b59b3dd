"""The one check of every answer: a teacher's scores, and a sampler's completions.

What no single answer shows is not found here: right log-probs of another model or another sequence,
or the log-prob 0 of every token where no support was asked for.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.contract import InvalidAnswer, Scores

# Nats by which two log-probs that should be equal may differ, and one may exceed 0. Engines
# normalize in float32, also where weights and logits are bfloat16. With vLLM 0.32 and transformers
# in both dtypes no log-prob was above 0, a sampled token's equalled its entry in the support to the
# bit, and the mass of a whole vocabulary was 1 within 3e-7.
LOGPROB_TOLERANCE = 1e-4

MASS_TOLERANCE = 1e-3  # How far a sum of probabilities may be from 1, or beyond it

IMPOSSIBLE = -9999.0  # vLLM's servers write it for -inf, which JSON does not have


BLOCK = 2**20  # Entries of a support that are checked at once, in arrays of 8 MB


def check_scores(
    batch: Sequence[tuple[Scores, Tensor, int | None]],
    *,
    k: int,  # entries per position that were asked for
    vocab_size: int | None,  # of the teacher's head; None where it is unknown
    origin: str,  # who answered, for the message: a server by its URL, or a model
    ranked: bool = True,  # the support is the teacher's own top K, the most probable id first
    trained: bool = True,  # the sampled tokens train; those of a prompt the teacher may mask
) -> None:
    """Check that a teacher's scores can be log-probs of one distribution per position.

    Each sequence has its scores, the ids of its sampled tokens [n], and its index in its request.
    Ids that are not known are left out. They are checked together, in arrays of ``BLOCK``.

    An id that the teacher masks has log-prob -inf or -9999. It may be in a support that holds all
    of the probability, but it is never a token that trains: a loss there is infinite.
    """
    for scores, sampled, sequence in batch:
        n = len(sampled)
        own, ids, logprobs = scores.ref_logprobs, scores.token_ids, scores.teacher_logprobs
        if own.shape != (n,) or ids.shape != (n, k) or logprobs.shape != (n, k):
            shapes = [tuple(array.shape) for array in (own, ids, logprobs)]
            raise InvalidAnswer(
                f"{origin} gave scores of shapes {shapes[0]}, {shapes[1]} and {shapes[2]} for "
                f"{_place(sequence)}{n} tokens, where ({n},) and twice ({n}, {k}) were expected."
            )
    for pieces in _blocks(batch, max(1, BLOCK // max(k, 1))):
        known = [
            None if scores.known is None else scores.known[rows] for scores, _, _, rows in pieces
        ]
        _check_rows(
            _joined([scores.ref_logprobs[rows] for scores, _, _, rows in pieces]),
            _joined([scores.token_ids[rows] for scores, _, _, rows in pieces]),
            _joined([scores.teacher_logprobs[rows] for scores, _, _, rows in pieces]),
            None
            if all(one is None for one in known)
            else _joined([scores.all_known[rows] for scores, _, _, rows in pieces]),
            _joined([sampled[rows] for _, sampled, _, rows in pieces]),
            vocab_size=vocab_size,
            ranked=ranked,
            trained=trained,
            refuse=functools.partial(_refuse_score, origin, pieces),
        )


_Piece = tuple[Scores, Tensor, int | None, slice]  # Some rows of one sequence


def _blocks(
    batch: Sequence[tuple[Scores, Tensor, int | None]], size: int
) -> Iterator[list[_Piece]]:
    """Yield the rows of all sequences, in order, ``size`` at a time."""
    pieces: list[_Piece] = []
    room = size
    for scores, sampled, sequence in batch:
        first = 0
        while first < len(sampled):
            count = min(room, len(sampled) - first)
            pieces.append((scores, sampled, sequence, slice(first, first + count)))
            first, room = first + count, room - count
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _joined(parts: Sequence[Tensor]) -> NDArray[Any]:
    joined: NDArray[Any] = (parts[0] if len(parts) == 1 else torch.cat([*parts])).numpy()
    return joined


def _place(sequence: int | None) -> str:
    return "" if sequence is None else f"sequence {sequence}, "


def _refuse_score(
    origin: str, pieces: Sequence[_Piece], row: int, found: str, expected: str
) -> NoReturn:
    for scores, _, sequence, rows in pieces:
        count = rows.stop - rows.start
        if row < count:
            position = scores.start + rows.start + row
            raise InvalidAnswer(
                f"{origin} gave a wrong score at {_place(sequence)}position {position}: {found}, "
                f"where {expected} was expected."
            )
        row -= count
    raise AssertionError("the row is of one of the sequences")


def _check_rows(
    own: NDArray[Any],
    ids: NDArray[Any],
    logprobs: NDArray[Any],
    known: NDArray[np.bool_] | None,
    sampled: NDArray[Any],
    *,
    vocab_size: int | None,
    ranked: bool,
    trained: bool,
    refuse: Callable[[int, str, str], NoReturn],
) -> None:
    """Check some rows of ``check_scores``; ``refuse`` gets the wrong one's index among them."""
    n, k = ids.shape
    # Conditions that NaN must not pass are negated.
    right = own <= LOGPROB_TOLERANCE
    if trained:
        right &= own > IMPOSSIBLE
    if at := _first(~right):
        found = f"the log-prob of the sampled token {sampled[at]} is {own[at]:.6g}"
        refuse(at[0], found, "a finite number of at most 0")
    if k == 0:
        return
    is_whole = np.full(n, k == vocab_size)
    if known is not None:  # others have no probability here, and ids that no vocabulary has
        logprobs = np.where(known, logprobs, IMPOSSIBLE)
        is_whole &= known.all(axis=1)
    if at := _first(~(logprobs <= LOGPROB_TOLERANCE)):
        found = f"the log-prob of id {ids[at]} is {logprobs[at]:.6g}"
        refuse(at[0], found, "a number of at most 0")
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    alien = (ids < 0) | (ids >= limit)
    if at := _first(alien if known is None else alien & known):
        refuse(at[0], f"the support has the id {ids[at]}", _an_id(vocab_size))
    if known is not None:
        ids = np.where(known, ids, -1 - np.arange(k, dtype=ids.dtype))
    if k != vocab_size or not _are_permutations(ids):
        ordered = np.sort(ids, axis=1)
        if at := _first(ordered[:, 1:] == ordered[:, :-1]):
            refuse(at[0], f"the support has the id {ordered[at]} twice", "each id once")

    is_sampled = ids == sampled.astype(ids.dtype)[:, None]
    places = np.arange(n), is_sampled.argmax(axis=1)
    inside = is_sampled[places]
    own = np.maximum(own, IMPOSSIBLE)  # -inf has no difference
    entry = np.where(inside, np.maximum(logprobs[places], IMPOSSIBLE), own)
    if at := _first(~(np.abs(entry - own) <= LOGPROB_TOLERANCE)):
        found = f"the sampled token {sampled[at]} has log-prob {own[at]:.6g} by itself and "
        refuse(at[0], f"{found}{entry[at]:.6g} in the support", "one number")
    mass = np.exp(logprobs).sum(axis=1) + np.where(inside, 0, np.exp(own))
    if at := _first(~(mass <= 1 + MASS_TOLERANCE)):
        found = f"support and sampled token have a mass of {mass[at]:.6g}"
        refuse(at[0], found, "a probability of at most 1")
    if ranked:
        if at := _first(logprobs[:, 1:] > logprobs[:, :-1] + LOGPROB_TOLERANCE):
            row, column = at
            found = (
                f"log-prob {logprobs[row, column]:.6g} is before {logprobs[row, column + 1]:.6g}"
            )
            refuse(row, found, "the most probable id first")
        last = logprobs[:, -1]
        if at := _first(~inside & (own > last + LOGPROB_TOLERANCE)):
            found = (
                f"the sampled token {sampled[at]} has log-prob {own[at]:.6g}, is outside the top "
            )
            refuse(at[0], f"{found}{k}", f"at most {last[at]:.6g}, the last one's log-prob,")
        # Where an impossible id is among the most probable, no other id has any probability.
        is_whole |= last <= IMPOSSIBLE
    if at := _first(is_whole & (mass < 1 - MASS_TOLERANCE)):
        found = f"the ids that have a probability have a mass of {mass[at]:.6g}"
        refuse(at[0], found, "a mass of 1")


def check_completion(
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    max_tokens: int | None,
    vocab_size: int | None,
    origin: str,
    prompt: int,
) -> None:
    """Check that a sampler can have drawn a completion with these log-probs mu, [m]."""
    refuse = functools.partial(_refuse_completion, origin, prompt)
    if len(ids) != len(logprobs):
        refuse(f"{len(ids)} tokens with {len(logprobs)} log-probs", "one of each per token")
    if not ids:
        refuse("no token", "at least one")
    if max_tokens is not None and len(ids) > max_tokens:
        refuse(f"{len(ids)} tokens", f"at most max_tokens = {max_tokens}")
    limit = math.inf if vocab_size is None else vocab_size
    for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if not 0 <= token < limit:
            refuse(f"the id {token} at position {position}", _an_id(vocab_size))
        if not IMPOSSIBLE < logprob <= LOGPROB_TOLERANCE:
            refuse(
                f"log-prob {logprob:.6g} of token {token} at position {position}",
                "a finite number of at most 0",
            )


def _refuse_completion(origin: str, prompt: int, found: str, expected: str) -> NoReturn:
    raise InvalidAnswer(
        f"{origin} gave a wrong completion of prompt {prompt}: {found}, where {expected} was "
        "expected."
    )


def check_choices(found: int, asked: int, *, origin: str, prompt: int) -> None:
    """Check that a sampler returned as many completions of a prompt as were asked for."""
    if found != asked:
        raise InvalidAnswer(
            f"{origin} gave {found} completions of prompt {prompt}, where {asked} were expected."
        )


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...] | None:
    if not wrong.any():
        return None
    return tuple(int(index) for index in np.unravel_index(int(wrong.argmax()), wrong.shape))


def _are_permutations(ids: NDArray[Any]) -> bool:
    """Return whether each row has each id from 0 to K - 1 once; no id is outside of these."""
    k = ids.shape[1]
    if (ids == np.arange(k, dtype=ids.dtype)).all():
        return True
    for row in ids:
        has = np.zeros(k, bool)
        has[row] = True
        if not has.all():
            return False
    return True


def _an_id(vocab_size: int | None) -> str:
    return "an id of at least 0" if vocab_size is None else f"an id from 0 to {vocab_size - 1}"
