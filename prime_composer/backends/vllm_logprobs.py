"""Read the ``prompt_logprobs`` of a vLLM server: its JSON, and the top K of each position.

This is the only reader of that structure: ``backends.vllm_server`` and prime-rl's orchestrator
(``upstream.orchestrator``) both use it. The engine inside this process returns tensors instead,
which ``backends.vllm.parse_prompt_logprobs`` reads. Needs NumPy and msgspec, not torch.

Layout. vLLM returns one row per token, None for the first token. The other rows map token ids to
``{logprob, rank}``. A row holds the top K and the sequence's own token, so it has K or K + 1
entries; the own token comes first and the order of the rest is not documented.

Ties. vLLM gives the top K the ranks 1 to K, distinct even where log-probs are equal. It gives an
own token outside the top K the number of ids that are at least as probable, itself included
(``batched_count_greater_than`` and ``_ranks_kernel`` of vLLM 0.32, both ``>=``): K + 1 or more,
also where it ties with the K-th. Rank therefore identifies the top K without exception, and
dropping the own token of a row of K + 1 entries selects the same ids. Taking the K largest
log-probs would not: an own token that ties with the K-th could displace it. Where ranks are equal,
as other servers may write them, the larger log-prob wins, and then the earlier entry.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray


class Entry(msgspec.Struct, gc=False):
    """Log-prob and rank of one token id at one position; other fields are skipped."""

    logprob: float
    rank: int


Row = dict[int, Entry] | None
"""Token id -> entry at one position; None at the first token."""


class Choice(msgspec.Struct):
    """A choice of ``/v1/completions``, where that endpoint puts the prompt's log-probs."""

    prompt_logprobs: list[Row] | None = None


class Answer(msgspec.Struct):
    """An answer of ``/inference/v1/generate`` or ``/v1/completions``; other fields are skipped."""

    prompt_logprobs: list[Row] | None = None
    choices: list[Choice] = []


class TopK(NamedTuple):
    """Log-probs of a sequence's own tokens, and its top-K support.

    Attributes:
        own: log q of each token, n numbers; 0.0 for the first token (prime-rl's convention).
        token_ids: int32 [n, k], most probable first; 0 for the first token.
        logprobs: float32 [n, k]; NaN for the first token.
    """

    own: list[float]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def read_answer(content: bytes) -> list[Row]:
    """Decode the rows of an answer; empty where it has no prompt_logprobs.

    vLLM clamps infinities to -9999. Other servers may write the ``-Infinity`` of Python's json,
    which is not JSON: what msgspec cannot read is read by json.

    Raises:
        ValueError: the content is no such answer.
    """
    try:
        answer = msgspec.json.decode(content, type=Answer)
    except msgspec.DecodeError:
        try:
            answer = msgspec.convert(json.loads(content), Answer, str_keys=True)
        except ValueError as error:
            raise ValueError(
                f"The teacher's server answered something else than prompt_logprobs: {error}"
            ) from error
    if answer.prompt_logprobs is None and answer.choices:
        return answer.choices[0].prompt_logprobs or []
    return answer.prompt_logprobs or []


def top_k_of(token_ids: Sequence[int], rows: Sequence[Row], k: int) -> TopK:
    """Return the log-probs of ``token_ids`` and the top K of each position, by rank.

    The loop over positions is Python; entries are only touched by C. The orchestrator runs this
    next to its event loop.

    Args:
        token_ids: the sequence that was scored, n ids.
        rows: what ``read_answer`` returned, one per token.
        k: entries per position of the support; rows may hold more.

    Raises:
        ValueError: rows and tokens do not match, or a row lacks its own token or has fewer than K
            entries.
    """
    n = len(token_ids)
    if len(rows) != n:
        raise ValueError(
            f"The teacher's server scored {len(rows)} tokens of {n}; is its context long enough?"
        )
    own_logprobs = []
    for t, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        if not row:
            if t > 0:
                raise ValueError(f"The teacher's server left token {t} of {n} without a score.")
            own_logprobs.append(0.0)
            continue
        own = row.get(token)
        if own is None:
            raise ValueError(
                f"The teacher's prompt_logprobs at position {t} do not hold the token {token} of "
                "the sequence: student and teacher do not share a tokenizer, or the server scored "
                "another sequence."
            )
        if len(row) < k:
            raise ValueError(
                f"The teacher's server returned {len(row)} of the top {k} log-probs at position "
                f"{t}: start it with --max-logprobs {k} or more (vLLM's default is 20)."
            )
        own_logprobs.append(own.logprob)
    ids = np.zeros((n, k), np.int32)
    logprobs = np.full((n, k), math.nan, np.float32)
    scored = [t for t, row in enumerate(rows) if row]
    if k and scored:
        ids[scored], logprobs[scored] = _best_by_rank([row for row in rows if row], k)
    return TopK(own_logprobs, ids, logprobs)


def _best_by_rank(
    rows: Sequence[dict[int, Entry]], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return ids and log-probs of the K entries of the smallest ranks, [rows, k]."""
    entries = list(chain.from_iterable(map(dict.values, rows)))
    sizes = np.array([len(row) for row in rows])
    filled = np.arange(sizes.max()) < sizes[:, None]

    def table(values: Any, dtype: type, padding: int) -> NDArray[Any]:
        cells: NDArray[Any] = np.full(filled.shape, padding, dtype)
        cells[filled] = np.fromiter(values, dtype, len(entries))
        return cells

    ids = table(chain.from_iterable(rows), np.int32, 0)
    logprobs = table(map(attrgetter("logprob"), entries), np.float64, 0)
    ranks = table(map(attrgetter("rank"), entries), np.int64, np.iinfo(np.int64).max)
    best = np.lexsort((-logprobs, ranks), axis=-1)[:, :k]
    return np.take_along_axis(ids, best, axis=1), np.take_along_axis(logprobs, best, axis=1)
