"""The kind ``student_candidates``: a teacher's mass on tokens of a student with another tokenizer.

The client says where the student's tokens begin (``teachers.student_candidates``), the worker sums
the teacher's probabilities by integer tables (``pair_tables``). Rows stay independent: a token that
begins inside one of the teacher's gets mass from several rows, and the client adds it up.

A *part* of a row is a set of the teacher's tokens, cut after their first bytes: all ordinary
tokens from byte 0 on (or with a lead in front), or a range of ``PairTables.order``, the tokens
across a student token's begin. Its mass goes to the first student token of what is left of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.scoring.kinds import (
    KINDS,
    Kind,
    KindRequest,
    Rows,
    largest,
)
from prime_composer.scoring.pair_tables import KEPT_HERE, OnDevice, Whole, most_kept
from prime_composer.scoring.wire import Facts, Field, ScoreRequest, SequenceRequest

FIELDS = 4
"""Numbers of a part: the range's begin and end in ``order``, bytes to skip, and columns."""

ID_BITS = 24
"""Of a forced token: its part's place above these bits, its id in them."""

MOST_PARTS = 32
"""Parts of a row."""

MOST_COLUMNS = 2**12
"""Columns of a row."""

MOST_SKIP = 2**16
"""Bytes of a teacher token that a student can have written already."""

MOST_RANGES = 2
"""Length of a row's ranges together, in the teacher's vocabularies: it costs what their heads do.
As many of its parts may be of all tokens."""

AT_ONCE = 2**20
"""Tokens of ranges that are summed at once."""


@dataclass(frozen=True)
class Parts:
    """The parts of some rows, row after row, on the CPU."""

    row: NDArray[np.int64]  # of each
    low: NDArray[np.int64]  # its range in ``order``
    high: NDArray[np.int64]  # its range in ``order``
    skip: NDArray[np.int64]  # bytes that the student has written; -1 in front of a lead
    columns: NDArray[np.int64]  # of its answer
    offset: NDArray[np.int64]  # its first column
    forced_part: NDArray[np.int64]  # index of the part of each forced token
    forced_id: NDArray[np.int64]  # its id

    @classmethod
    def of(cls, numbers: NDArray[np.int32], parts: int) -> "Parts":
        """Return the parts that the numbers of rows say, [n, 4 * parts + forced]."""
        n, width = len(numbers), FIELDS * parts
        asked = numbers[:, :width].reshape(n, parts, FIELDS).astype(np.int64)
        low, high, skip, columns = np.moveaxis(asked, 2, 0)
        row, slot = columns.nonzero()
        index = np.full((n, parts), -1)
        index[row, slot] = np.arange(len(row))
        codes = numbers[:, width:].astype(np.int64)
        row_of_forced, at = (codes >= 0).nonzero()
        forced = codes[row_of_forced, at]
        return cls(
            row=row,
            low=low[row, slot],
            high=high[row, slot],
            skip=skip[row, slot],
            columns=columns[row, slot],
            offset=(columns.cumsum(1) - columns)[row, slot],
            forced_part=index[row_of_forced, forced >> ID_BITS],
            forced_id=forced & (2**ID_BITS - 1),
        )

    def some(self, chosen: NDArray[np.int64]) -> "Parts":
        """Return some parts, in their order."""
        index = np.full(len(self.row) + 1, -1)  # the last one: of no part
        index[chosen] = np.arange(len(chosen))
        kept = index[self.forced_part] >= 0
        names = ("row", "low", "high", "skip", "columns", "offset")
        return Parts(
            **{name: getattr(self, name)[chosen] for name in names},
            forced_part=index[self.forced_part][kept],
            forced_id=self.forced_id[kept],
        )


class StudentCandidates(Kind):
    """The student's tokens with most mass in each part of a row, and what they are sure of.

    A row has K columns, which its parts share in order. The first column of a part has the mass of
    the whole part as ``candidate_closed``, and the id -1. Each other one has a token, or -1 where
    there are no more:

        candidate_ids       the student's token: those that the request forces, then the largest
        candidate_closed    mass of the teacher's tokens after which it is certain
        candidate_open      mass of those after which what follows may change it
        candidate_begun     share of the teacher's tokens that may begin it and not end it, of their
                            mass and the two others: those shorter than it in a range, the first
                            one of its path elsewhere; the token that followed is none of them
        candidate_end       the teacher's mass on the end of its turn, one number per row

    The parameters: ``shared`` has the name of the tables ("pair") and the number of parts per row
    ("parts"). A row's numbers are four for each part (``FIELDS``), 0 columns where there is none,
    and then forced tokens (``ID_BITS``), -1 where there is none.
    """

    name = "student_candidates"

    def fields(self, k: int, facts: Facts) -> list[Field]:
        """Ids, two masses and a share of K columns, and the end."""
        return [
            Field("candidate_ids", "int32", k),
            Field("candidate_closed", "float32", k),
            Field("candidate_open", "float32", k),
            Field("candidate_begun", "float16", k),
            Field("candidate_end", "float32", 0),
        ]

    def read(
        self, score_request: ScoreRequest, sequence: SequenceRequest, facts: Facts
    ) -> KindRequest | None:
        """Check ranges, ids and cost. What depends on the tables can harm nobody, nor be known."""
        request = super().read(score_request, sequence, facts)
        if request is None:
            return None
        wrong = wrong_shared(request)
        if wrong:
            raise ValueError(f"{self.name}: {wrong}")
        numbers, parts = request.per_row(sequence.rows), request.shared["parts"]
        if numbers is None or numbers.shape[1] < FIELDS * parts:
            raise ValueError(f"{self.name}: fewer numbers than {parts} parts have")
        wrong = wrong_numbers(numbers, parts, request.k, facts.vocab_size)
        if wrong:
            raise ValueError(f"{self.name}: {wrong}")
        return request

    def scratch(self, request: KindRequest) -> int:
        """Probabilities, and sums over the student's vocabulary."""
        tables = KEPT_HERE.find(request.shared["pair"])
        if tables is None:
            return 0
        return len(tables.parent) + 6 * len(tables.widths) + 8 * request.k

    def arrays(
        self, rows: Rows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        """Sum the probabilities of the parts."""
        assert numbers is not None
        tables = KEPT_HERE.on(request.shared["pair"], rows.logits.device)
        if tables.teacher_size > rows.logits.shape[1]:
            raise ValueError("the tables are of a teacher with more tokens")
        parts = Parts.of(numbers.cpu().numpy(), request.shared["parts"])
        probabilities = (rows.logits - rows.log_normalizer).exp()
        answer = Answer(len(numbers), request.k, rows.logits)
        for skip, whole in tables.wholes.items():
            chosen = (parts.skip == skip).nonzero()[0]
            if len(chosen):
                some = parts.some(chosen)
                answer.put(some, *of_whole(tables, whole, probabilities, rows.next_ids, some, skip))
        ranges = (parts.skip > 0).nonzero()[0]
        sizes = (parts.high - parts.low)[ranges].cumsum()
        for group in np.split(ranges, np.flatnonzero(np.diff(sizes // AT_ONCE)) + 1):
            if len(group):
                some = parts.some(group)
                answer.put(some, *of_ranges(tables, probabilities, rows.next_ids, some))
        end = probabilities[:, tables.ends].sum(-1)
        return answer.arrays() | {"candidate_end": end}


@dataclass(frozen=True)
class List:
    """Candidates of parts, in columns."""

    ids: Int[Tensor, "p c"]  # -1 where there is none, [p, c]
    closed: Float[Tensor, "p c"]  # masses
    open: Float[Tensor, "p c"]  # masses
    begun: Float[Tensor, "p c"]  # mass of what may begin them


class Answer:
    """The arrays of some rows.

    Args:
        n: rows.
        k: columns.
        like: on the device of the rows.
    """

    def __init__(self, n: int, k: int, like: Tensor):
        self._n, self._k = n, k
        # One entry more, for what has no column.
        self._ids = torch.full((n * k + 1,), -1, dtype=torch.int32, device=like.device)
        self._masses = like.new_zeros((3, n * k + 1))

    def put(self, parts: Parts, total: Float[Tensor, " p"], found: List) -> None:
        """Write the candidates of parts into their columns."""
        device, nowhere = total.device, self._n * self._k
        first, columns = (
            torch.from_numpy(array).to(device)
            for array in (parts.row * self._k + parts.offset, parts.columns)
        )
        self._masses[0, first] = total
        place = torch.arange(1, found.ids.shape[1] + 1, device=device)
        to = torch.where(place < columns[:, None], first[:, None] + place, nowhere).view(-1)
        self._ids.scatter_(0, to, found.ids.reshape(-1).int())
        for target, mass in zip(self._masses, (found.closed, found.open, found.begun), strict=True):
            target.scatter_(0, to, mass.reshape(-1))

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays by name."""
        shape = self._n, self._k
        closed, open_, begun = (mass[:-1].view(shape) for mass in self._masses)
        share = begun / (closed + open_ + begun).clamp_min(torch.finfo(begun.dtype).tiny)
        return {
            "candidate_ids": self._ids[:-1].view(shape),
            "candidate_closed": closed,
            "candidate_open": open_,
            "candidate_begun": share.half(),
        }


def of_whole(
    tables: OnDevice,
    whole: Whole,
    probabilities: Float[Tensor, "n v"],
    next_ids: Int[Tensor, " n"],
    parts: Parts,
    skip: int,
) -> tuple[Float[Tensor, " p"], List]:
    """Return the masses of parts of all tokens, and their candidates."""
    device, size = probabilities.device, len(whole.firsts)
    row = torch.from_numpy(parts.row).to(device)
    rows = probabilities[row]
    sums = rows.new_zeros(len(rows), 2 * size + 2)
    sums.index_add_(1, whole.index, rows[:, : tables.teacher_size])
    closed, open_ = sums[:, :size], sums[:, size : 2 * size]
    both = closed + open_
    total = both.sum(1) + sums[:, 2 * size]
    part, forced = (
        torch.from_numpy(array).to(device) for array in (parts.forced_part, parts.forced_id)
    )
    place = torch.searchsorted(whole.firsts, forced).clamp_max(size - 1)
    right = whole.firsts[place] == forced
    both[part[right], place[right]] = torch.inf
    _, at = largest(both, min(max(1, int(parts.columns.max()) - 1), size))
    ids = whole.firsts[at]
    path = tables.path_first[ids] if skip == 0 else torch.full_like(ids, -1)
    counts = (path >= 0) & (path != next_ids[row][:, None])
    begun = rows.gather(1, path.clamp_min(0)) * counts
    return total, List(ids, closed.gather(1, at), open_.gather(1, at), begun)


def of_ranges(
    tables: OnDevice,
    probabilities: Float[Tensor, "n v"],
    next_ids: Int[Tensor, " n"],
    parts: Parts,
) -> tuple[Float[Tensor, " p"], List]:
    """Return the masses of parts that are ranges, and their candidates (``of_whole``)."""
    device, count, base = probabilities.device, len(parts.row), tables.student_size + 1
    low = np.minimum(parts.low, len(tables.order))
    sizes = np.minimum(parts.high, len(tables.order)) - low
    index = np.repeat(np.arange(count), sizes)
    at = np.arange(len(index)) + np.repeat(low - (sizes.cumsum() - sizes), sizes)
    part, place = (torch.from_numpy(array).to(device) for array in (index, at))
    row, skip, columns = (
        torch.from_numpy(array).to(device) for array in (parts.row, parts.skip, parts.columns)
    )
    token = tables.order[place]
    # A range that is not of this pair may have shorter tokens.
    after = tables.start[token + 1] - tables.lead
    code = tables.entries[torch.minimum(tables.start[token] + skip[part], after - 1)]
    mass = probabilities[row[part], token]
    total = mass.new_zeros(count).index_add_(0, part, mass)

    keys, of_key = (part * base + code // 2).unique(return_inverse=True)
    sums = mass.new_zeros(len(keys), 2)
    sums.view(-1).index_add_(0, 2 * of_key + code % 2, mass)
    first, owner = keys % base - 1, keys // base
    some = torch.zeros_like(keys).scatter_(0, of_key, token)  # any of those with this token
    begun = mass_begun(tables, probabilities, next_ids, some, row[owner], skip[owner], first)

    ranking = torch.where(first < 0, -1.0, sums.sum(1))
    forced = torch.from_numpy(parts.forced_part * base + parts.forced_id + 1).to(device)
    if len(keys) and len(forced):
        found = torch.searchsorted(keys, forced).clamp_max(len(keys) - 1)
        ranking[found[keys[found] == forced]] = torch.inf
    order = ranking.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    each = torch.bincount(owner, minlength=count)
    within = torch.arange(len(keys), device=device) - (each.cumsum(0) - each)[owner[order]]
    kept = (within < columns[owner[order]] - 1) & (first[order] >= 0)
    order, to = order[kept], (owner[order][kept], within[kept])
    width = max(1, int(parts.columns.max()) - 1)
    ids = torch.full((count, width), -1, device=device)
    ids[to] = first[order]
    masses = mass.new_zeros(3, count, width)
    for target, source in zip(masses, (sums[:, 0], sums[:, 1], begun), strict=True):
        target[to] = source[order]
    return total, List(ids, *masses)


def mass_begun(
    tables: OnDevice,
    probabilities: Float[Tensor, "n v"],
    next_ids: Int[Tensor, " n"],
    token: Int[Tensor, " e"],
    row: Int[Tensor, " e"],
    skip: Int[Tensor, " e"],
    first: Int[Tensor, " e"],
) -> Float[Tensor, " e"]:
    """Return the mass of the teacher's tokens that end inside a student token.

    Args:
        token: a teacher token that has the student's after its first bytes.
        skip: these bytes.
    """
    begun = probabilities.new_zeros(len(token))
    last = skip + tables.widths[first.clamp_min(0)]
    token = tables.parent[token]
    while True:
        # Parents are shorter and shorter.
        length = tables.start[token.clamp_min(0) + 1] - tables.start[token.clamp_min(0)]
        length = length - tables.lead
        inside = (token >= 0) & (length > skip)
        if not inside.any():
            return begun
        counts = inside & (length < last) & (token != next_ids[row])
        begun += torch.where(counts, probabilities[row, token.clamp_min(0)], 0.0)
        token = torch.where(inside, tables.parent[token.clamp_min(0)], -1)


def wrong_shared(request: KindRequest) -> str:
    """Say what is wrong with the parameters of all rows; empty for nothing."""
    shared: Mapping[str, Any] = request.shared
    if shared.keys() != {"pair", "parts"}:
        return f"parameters {sorted(shared)[:9]}, where pair and parts are needed"
    parts, pair = shared["parts"], shared["pair"]
    if type(parts) is not int or not 1 <= parts <= MOST_PARTS:
        return f"{str(parts)[:20]} parts of a row, where 1 to {MOST_PARTS} are needed"
    if type(pair) is not str or len(pair) != 64 or {*pair} - {*"0123456789abcdef"}:
        return "a pair is named by a SHA-256 in 64 hexadecimal digits"
    if not 1 <= request.k <= MOST_COLUMNS:
        return f"{request.k} columns, where 1 to {MOST_COLUMNS:,} are needed"
    return ""


def wrong_numbers(numbers: NDArray[np.int32], parts: int, columns: int, vocab_size: int) -> str:
    """Say which numbers of rows are wrong; empty for none."""
    width = FIELDS * parts
    low, high, skip, asked = numbers[:, :width].reshape(len(numbers), parts, FIELDS).T
    if ((low < 0) | (high < low) | (high > vocab_size)).any():
        return f"a range that does not lie within 0 to {vocab_size}"
    if ((skip < -1) | (skip > MOST_SKIP)).any():
        return f"bytes to skip that are not within -1 to {MOST_SKIP}"
    if (asked < 0).any() or (asked > columns).any() or (asked.sum(0) > columns).any():
        return f"parts of a row with more than its {columns} columns"
    is_range = (skip > 0) & (asked > 0)
    if ((high.astype(np.int64) - low) * is_range).sum(0).max(initial=0) > MOST_RANGES * vocab_size:
        return f"ranges of a row with more than {MOST_RANGES} times the vocabulary"
    if ((skip <= 0) & (asked > 0)).sum(0).max(initial=0) > MOST_RANGES:
        return f"more than {MOST_RANGES} parts of a row that are of all tokens"
    forced = numbers[:, width:]
    if ((forced < -1) | (forced >> ID_BITS >= parts)).any():
        return f"a forced token of a part that is none of the {parts}"
    return ""


STUDENT_CANDIDATES = StudentCandidates()


def register() -> None:
    """Add the kind to ``KINDS``, unless this server takes no tables. Twice is harmless."""
    if most_kept():
        KINDS.setdefault(STUDENT_CANDIDATES.name, STUDENT_CANDIDATES)
