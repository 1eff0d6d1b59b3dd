"""Read the JSON of a vLLM server: ``prompt_logprobs`` with their top K, and completions.

Types are exact: a JSON true, string or null is no number, and 5.0 is no token id. The values are
checked by ``backends.answers``, which the callers of this module run on what it returns.

vLLM returns one row per token, None for the first token. The others map token ids to ``{logprob,
rank}``. A row holds the top K and the sequence's own token, so it has K or K + 1 entries; the own
token comes first and the order of the rest is not documented.

Ties. vLLM gives the top K the ranks 1 to K, distinct even where log-probs are equal. It gives an
own token outside the top K the number of ids that are at least as probable, itself included
(``batched_count_greater_than`` and ``_ranks_kernel`` of vLLM 0.32, both ``>=``): K + 1 or more.
Rank therefore identifies the top K without exception. Taking the K largest log-probs would not: an
own token that ties with the K-th could displace it. Where ranks are equal, as other servers may
write them, the larger log-prob wins, and then the earlier entry.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from prime_composer.backends.answers import LOGPROB_TOLERANCE
from prime_composer.contract import InvalidAnswer, Scores

T = TypeVar("T")

ENTRY_BYTES = 256  # Of a row in JSON. vLLM writes about 90, the decoded token included

FIXED_BYTES = 2**16  # Room for what does not grow with the tokens

TEACHER = "The teacher's server"

Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # A token id, a rank or an index


class Entry(msgspec.Struct, gc=False):
    """Log-prob and rank of one token id at one position; other fields are skipped."""

    logprob: float
    rank: Natural


Row = dict[Natural, Entry] | None  # Token id -> entry at one position; None at the first token


class Choice(msgspec.Struct):
    """A choice of ``/v1/completions``, where that endpoint puts the prompt's log-probs."""

    prompt_logprobs: list[Row] | None = None


class PromptAnswer(msgspec.Struct):
    """An answer of ``/inference/v1/generate`` or ``/v1/completions``; other fields are skipped."""

    prompt_logprobs: list[Row] | None = None
    choices: list[Choice] = []


class TokenLogprobs(msgspec.Struct):
    """Log-probs of a completion's tokens."""

    token_logprobs: list[float]


class Completion(msgspec.Struct):
    """A sampled completion of ``/v1/completions``; other fields are skipped."""

    index: Natural
    token_ids: list[Natural]
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class Completions(msgspec.Struct):
    """An answer of ``/v1/completions`` with ``return_token_ids``; other fields are skipped."""

    choices: list[Completion]


def at_least_one(k: int) -> int:
    """Return the K to ask a server for, at least 1: one more entry checks the own log-prob."""
    return max(k, 1)


def answer_bytes(tokens: int, k: int) -> int:
    """Return the most bytes that a right answer may have, about three times what vLLM writes."""
    return FIXED_BYTES + ENTRY_BYTES * tokens * (k + 1)


def read_answer(content: bytes, origin: str = TEACHER) -> list[Row]:
    """Decode the rows of an answer; empty where it has no prompt_logprobs."""
    answer = _decode(content, PromptAnswer, "prompt_logprobs", origin)
    if len(answer.choices) > 1:
        raise InvalidAnswer(f"{origin} gave {len(answer.choices)} choices, where one was expected.")
    if answer.prompt_logprobs is not None:
        return answer.prompt_logprobs
    return (answer.choices[0].prompt_logprobs if answer.choices else None) or []


def read_completions(content: bytes, origin: str) -> list[Completion]:
    """Decode the completions of an answer, by index."""
    choices = _decode(content, Completions, "completions with token ids and log-probs", origin)
    return sorted(choices.choices, key=lambda choice: choice.index)


def _decode(content: bytes, kind: type[T], expected: str, origin: str) -> T:
    """Decode JSON of exact types.

    Other servers than vLLM may write the ``-Infinity`` of Python's json, which is not JSON.
    """
    try:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(content), kind, str_keys=True)
    except (ValueError, RecursionError) as error:
        raise InvalidAnswer(
            f"{origin} answered something else than {expected}: {error}. Its answer begins with "
            f"{content[:80]!r}."
        ) from error


def top_k_of(
    token_ids: Sequence[int], rows: Sequence[Row], k: int, origin: str = TEACHER, start: int = 1
) -> Scores:
    """Return the scores of ``token_ids`` from ``start`` (at least 1) on, with the top K of each.

    They are not checked. The loop over positions is Python; entries are only touched by C. The
    orchestrator runs this next to its event loop.
    """
    n = len(token_ids)
    if len(rows) != n:
        raise InvalidAnswer(
            f"{origin} scored {len(rows)} tokens of {n}; is its context long enough?"
        )
    own_logprobs = []
    for t, (token, row) in enumerate(zip(token_ids[1:], rows[1:], strict=True), 1):
        if not row:
            raise InvalidAnswer(f"{origin} left token {t} of {n} without a score.")
        own = row.get(token)
        if own is None:
            raise InvalidAnswer(
                f"{origin} gave prompt_logprobs that do not hold the token {token} of the sequence "
                f"at position {t}: student and teacher do not share a tokenizer, or the server "
                "scored another sequence."
            )
        outside = own.rank > k
        if not k + outside <= len(row) <= k + 1:
            besides = f" and the sequence's own, of rank {own.rank}," if outside else ""
            raise InvalidAnswer(
                f"{origin} returned {len(row)} log-probs at position {t}, where the top {k}"
                f"{besides} were expected: if it has fewer, start it with --max-logprobs {k} or "
                "more (vLLM's default is 20)."
            )
        own_logprobs.append(own.logprob)
    ids, logprobs = np.empty((n - 1, k), np.int32), np.empty((n - 1, k), np.float32)
    if k and n > 1:
        ordered_ids, ordered = _by_rank([row for row in rows[1:] if row])
        ids, logprobs = ordered_ids[:, :k], _float32(ordered[:, :k])
        wrong = (ordered[:, k:] > ordered[:, k - 1 : k] + LOGPROB_TOLERANCE).any(axis=1)
        if wrong.any():
            row_index = int(wrong.argmax())
            raise InvalidAnswer(
                f"{origin} ranks id {ordered_ids[row_index, k]} at position {row_index + 1} below "
                f"the top {k}, with log-prob {ordered[row_index, k]:.6g}, where at most "
                f"{ordered[row_index, k - 1]:.6g} was expected."
            )
    return Scores(
        torch.from_numpy(_float32(own_logprobs[start - 1 :])),
        torch.from_numpy(ids[start - 1 :]).long(),
        torch.from_numpy(logprobs[start - 1 :]),
        start=start,
    )


def _float32(values: ArrayLike) -> NDArray[np.float32]:
    """Return log-probs in float32. One beyond its range, which no model gives, is infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float32)


def _by_rank(
    rows: Sequence[dict[int, Entry]],
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return ids and log-probs by ascending rank, [rows, widest]; short rows end in -inf."""
    entries = list(chain.from_iterable(map(dict.values, rows)))
    sizes = np.array([len(row) for row in rows])
    filled = np.arange(sizes.max()) < sizes[:, None]

    def table(values: Any, dtype: type, padding: int | float) -> NDArray[Any]:
        cells: NDArray[Any] = np.full(filled.shape, padding, dtype)
        cells[filled] = np.fromiter(values, dtype, len(entries))
        return cells

    ids = table(chain.from_iterable(rows), np.int32, 0)
    logprobs = table(map(attrgetter("logprob"), entries), np.float64, -math.inf)
    ranks = table(map(attrgetter("rank"), entries), np.int64, np.iinfo(np.int64).max)
    order = np.lexsort((-logprobs, ranks), axis=-1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
