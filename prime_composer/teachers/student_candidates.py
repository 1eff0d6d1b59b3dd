"""What a server is asked of a teacher with another tokenizer, and what its answer means.

The kind ``student_candidates`` sums each row by itself. A student's token that begins inside one of
the teacher's gets mass from several rows, each a share of the teacher's path to the last one:
omega_k = Pi_k / Pi_J, known from the log-probs of the teacher's own tokens in the same answer. So
the sums over a position's parts are made here.

What is exact, and what is bounded: totals and the sampled token's masses are exact. So are those of
a token that is listed in each of a position's parts that has it; a short part is listed whole, and
its tokens are forced into the lists of the others. What is left is a token of two long parts that
only one of them lists: it has at most the other's smallest listed mass there. Where that is more
than ``MISSING`` of its own mass it is left out, which is to say that the tail has it. Where two
long parts share a row, both lists are shorter. Then more of the mass is in the tail, with what of
it the student would not write after the token before: log Q is too low by that share at most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.cross_tokenizer.finish import ListedRows
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import Plan, Position
from prime_composer.cross_tokenizer.sums import Candidates
from prime_composer.scoring.kinds import KindRequest
from prime_composer.scoring.pair_tables import PairTables
from prime_composer.scoring.student_candidates import (
    FIELDS,
    ID_BITS,
    MOST_PARTS,
    STUDENT_CANDIDATES,
)
from prime_composer.teachers.client import Beside

LISTED = 64
"""Entries of a teacher's row that are read beside the sums: what follows its own tokens."""

FEWEST = 64
"""Columns of a part at least, where it has as many tokens."""

MOST_FORCED = 24
"""Tokens that a row's lists are made to have, at most."""

MISSING = 0.01
"""Share of a token's mass up to which a part that does not list it may have more."""

ROUNDING = 2e-6
"""Share of a part's mass up to which what is not listed is the rounding of its sums."""

CACHED_RANGES = 2**16
"""Ranges of the teacher's tokens whose student tokens are kept."""


Arrays = Mapping[str, NDArray[Any]]

List = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Ids and their masses: certain, open, and of what may begin them."""


@dataclass(eq=False)
class Part:
    """A part of a row (``scoring.student_candidates``) that a position gets mass from.

    Attributes:
        row: the teacher's.
        tokens: its range of ``order``; None for all tokens.
        skip: bytes that the student has written.
        firsts: the student's tokens that it has.
        forced: those that its list must have.
        columns: of its answer; 0 where the row has no room.
        offset: its first column.
    """

    row: int
    tokens: slice | None
    skip: int
    firsts: NDArray[np.int64]
    forced: list[int] = field(default_factory=list)
    columns: int = 0
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked about a completion.

    Attributes:
        plan: of the completion.
        most: candidates per position.
        parts: of each position that has a score, in order; that of the position's own row first.
        beside: the request.
    """

    plan: Plan
    most: int
    parts: tuple[tuple[Part, ...], ...]
    beside: Beside


class Questions:
    """Questions about completions, by the tables of a pair.

    Args:
        pair: the tokenizers.
    """

    def __init__(self, pair: Pair):
        self.pair, self.tables = pair, tables_of(pair)
        self._firsts = lru_cache(CACHED_RANGES)(self._firsts_of)

    def of(self, plan: Plan, k: int) -> Question:
        """Return the question about a completion whose supports have K ids."""
        most = max(2 * k, FEWEST)
        columns = most + most // 2
        by_row: dict[int, list[Part]] = defaultdict(list)
        found = []
        for position in plan.positions:
            if position is not None:
                parts = self._parts(position)
                found.append(tuple(parts))
                for part in parts:
                    by_row[part.row].append(part)
        for parts in by_row.values():
            share_columns(parts, most, columns)
        width = max((len(parts) for parts in by_row.values()), default=1)
        width = min(MOST_PARTS, width + width % 2)  # requests of one width are computed together
        request = KindRequest(
            STUDENT_CANDIDATES.name,
            columns,
            {"pair": self.tables.name, "parts": width},
            numbers_of(by_row, len(plan.teacher_ids) + 1, width).tobytes(),
        )
        beside = Beside(STUDENT_CANDIDATES, request, self.tables)
        return Question(plan, most, tuple(found), beside)

    def _parts(self, position: Position) -> list[Part]:
        parts = []
        if position.skip <= 0:
            firsts = self._firsts(0, len(self.tables.order), position.skip)
            parts.append(Part(position.row, None, position.skip, firsts))
        for one in position.straddling:
            firsts = self._firsts(one.tokens.start, one.tokens.stop, one.skip)
            parts.append(Part(one.row, one.tokens, one.skip, firsts))
        short = [part for part in parts if len(part.firsts) <= MOST_FORCED]
        for part in parts:
            wanted = [
                position.token,
                *(i for o in short if o is not part for i in o.firsts.tolist()),
            ]
            part.forced = [i for i in dict.fromkeys(wanted) if has(part.firsts, i)]
        return parts

    def _firsts_of(self, low: int, high: int, skip: int) -> NDArray[np.int64]:
        """Return the student tokens that a range of the teacher's goes on with, in order."""
        tables = self.pair.tables
        firsts = np.unique(tables.first[tables.start[tables.order[low:high]] + skip])
        return firsts[firsts >= 0]


def has(ordered: NDArray[np.int64], token: int) -> bool:
    """Return whether a token is in an ordered array."""
    at = int(ordered.searchsorted(token))
    return at < len(ordered) and int(ordered[at]) == token


def share_columns(parts: Sequence[Part], most: int, columns: int) -> None:
    """Share a row's columns among its parts: a short one is listed whole, long ones alike.

    Args:
        parts: of the row.
        most: candidates of a part.
        columns: of the row.
    """
    # What comes later has least: the parts of a token that begins deep inside a teacher's.
    parts = parts[:MOST_PARTS]
    needs = [1 + min(len(part.firsts), most + len(part.forced)) for part in parts]
    left = columns
    for at in sorted(range(len(parts)), key=needs.__getitem__):
        waiting = sum(part.columns == 0 for part in parts)
        parts[at].columns = min(needs[at], left // waiting)
        left -= parts[at].columns
    offset = 0
    for part in parts:
        part.offset, offset = offset, offset + part.columns
        part.forced = part.forced[: max(0, part.columns - 1)]


def numbers_of(by_row: dict[int, list[Part]], n: int, width: int) -> NDArray[np.int32]:
    """Return the numbers of n rows with ``width`` parts each."""
    forced = {
        row: [(at << ID_BITS) + i for at, part in enumerate(parts[:width]) for i in part.forced]
        for row, parts in by_row.items()
    }
    # A position's own token comes first in its parts, and must not be cut off.
    most = max((len(ids) for ids in forced.values()), default=0)
    most = min(most + -most % 8, MOST_FORCED + MOST_PARTS)
    numbers = np.zeros((n, FIELDS * width + most), "<i4")
    numbers[:, FIELDS * width :] = -1
    for row, parts in by_row.items():
        for at, part in enumerate(parts[:width]):
            low, high = (0, 0) if part.tokens is None else (part.tokens.start, part.tokens.stop)
            numbers[row, FIELDS * at : FIELDS * (at + 1)] = low, high, part.skip, part.columns
        codes = forced[row]
        if len(codes) > most:
            own = [
                (at << ID_BITS) + part.forced[0]
                for at, part in enumerate(parts[:width])
                if part.forced
            ]
            codes = list(dict.fromkeys([*own, *codes]))[:most]
        numbers[row, FIELDS * width :][: len(codes)] = codes
    return numbers


def tables_of(pair: Pair) -> PairTables:
    """Return the integer tables that a server sums by."""
    tables, student = pair.tables, pair.student.of_id
    parent = np.full(len(pair.teacher.of_id), -1)
    for token in tables.order.tolist():
        content = pair.teacher.of_id[token] or b""
        shorter = (pair.id_of.get(content[:end]) for end in range(len(content) - 1, 0, -1))
        parent[token] = next((i for i in shorter if i is not None), -1)
    arrays = {
        "order": tables.order,
        "start": tables.start,
        "entries": 2 * (tables.first + 1) + tables.open,
        "ends": pair.teacher_ends,
        "parent": parent,
        "path_first": pair.path_first,
        "widths": [len(content or b"") for content in student],
    }
    return PairTables(
        **{name: np.array(array, "<i4") for name, array in arrays.items()}, lead=len(pair.before)
    )


def read_answer(
    pair: Pair, question: Question, read: Scores, origin: str = "The teacher's server"
) -> tuple[Candidates, ListedRows]:
    """Return the candidates of a completion, and what is listed of the teacher's rows.

    Args:
        pair: the tokenizers.
        question: what was asked.
        read: the answer: the teacher's scores of its own tokens, and the arrays beside them.
        origin: who answered, for messages.

    Raises:
        InvalidAnswer: the arrays cannot be what was asked for.
    """
    assert read.beside is not None
    arrays = read.beside
    check_arrays(arrays, len(pair.student.of_id), origin)
    log_path = np.concatenate([[0.0], read.ref_logprobs.double().cumsum(0).numpy()])
    positions = [one for one in question.plan.positions if one is not None]
    n, most = len(positions), question.most
    ids = np.full((n, most + 1), -1)
    masses = np.zeros((3, n, most + 1))
    numbers = np.zeros((4, n))  # total, end, nobody, unlisted
    for at, (position, parts) in enumerate(zip(positions, question.parts, strict=True)):
        shares = [np.exp(log_path[part.row] - log_path[position.row]) for part in parts]
        if not all(part.columns for part in parts):
            numbers[3, at] = np.inf
        if not parts or numbers[3, at]:
            continue
        lists = [listed(part, arrays) for part in parts]
        found = of_position(position, parts, shares, lists, most)
        count = len(found[0])
        ids[at, :count] = found[0]
        masses[:, at, :count] = found[1:]
        totals = [total_of(*one, arrays) for one in zip(parts, lists, strict=True)]
        numbers[0, at] = np.dot(shares, totals)
        behind_lead = position.before is None and position.skip > 0
        if position.skip <= 0 or behind_lead:
            numbers[1, at] = arrays["candidate_end"][position.row]
        if position.skip <= 0:
            numbers[2, at] = max(0.0, 1 - totals[0] - numbers[1, at])
    rows = listed_rows(read, question.plan)
    bounds = [bound_of(position, rows, log_path) for position in positions]
    total, end, nobody, unlisted = torch.from_numpy(numbers)
    closed, open_, begun = torch.from_numpy(masses)
    return (
        Candidates(
            torch.from_numpy(ids), closed, open_, total, end, nobody,
            torch.tensor(bounds, dtype=torch.float64), unlisted, begun,
        ),
        rows,
    )  # fmt: skip


def listed(part: Part, arrays: Arrays) -> List:
    """Return what the answer lists of a part."""
    place = slice(part.offset + 1, part.offset + part.columns)
    ids = arrays["candidate_ids"][part.row, place].astype(np.int64)
    closed, open_, begun = (
        arrays[f"candidate_{name}"][part.row, place].astype(np.float64)
        for name in ("closed", "open", "begun")
    )
    kept = ids >= 0
    return ids[kept], closed[kept], open_[kept], begun[kept]


def total_of(part: Part, its: List, arrays: Arrays) -> float:
    """Return the mass of a part: what is listed, and what is not.

    Where nearly all tokens of a position are dropped later, a total that was rounded by itself
    would leave a difference in the place of the others.
    """
    total, sums = (
        float(arrays["candidate_closed"][part.row, part.offset]),
        its[1].sum() + its[2].sum(),
    )
    return sums + (total - sums) * (total - sums > ROUNDING * total)


def of_position(
    position: Position,
    parts: Sequence[Part],
    shares: Sequence[float],
    lists: Sequence[List],
    most: int,
) -> List:
    """Return the ids with most mass at a position, the sampled one first, and their masses.

    The third mass is what may begin them and not end them; NaN where the answer does not say it.
    """
    ids = np.unique(np.concatenate([its for its, *_ in lists]))
    closed, open_, missing = np.zeros((3, len(ids)))
    begun = np.full(len(ids), np.nan)
    for part, share, (its, its_closed, its_open, its_begun) in zip(
        parts, shares, lists, strict=True
    ):
        at = ids.searchsorted(its)
        closed[at] += share * its_closed
        open_[at] += share * its_open
        if part is parts[0] and part.row == position.row and position.skip >= 0:
            both = its_closed + its_open
            begun[at] = both * its_begun / np.maximum(1 - its_begun, 1e-9)
        if len(parts) > 1 and len(its) < len(part.firsts):
            unforced = ~np.isin(its, part.forced)
            smallest = (its_closed + its_open)[unforced].min(initial=np.inf)
            near = part.firsts.searchsorted(ids).clip(max=len(part.firsts) - 1)
            unlisted = part.firsts[near] == ids
            unlisted[at] = False
            missing[unlisted] += share * smallest
    own = ids == position.token
    both = closed + open_
    order = np.lexsort((-both, ~own))
    order = order[(own | (missing <= MISSING * both))[order]][:most]
    return ids[order], closed[order], open_[order], begun[order]


def check_arrays(arrays: Arrays, student_size: int, origin: str) -> None:
    """Check what no teacher can have answered.

    Raises:
        InvalidAnswer: an id that the student does not have, or a mass that is none.
    """
    ids = arrays["candidate_ids"]
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < student_size:
        raise InvalidAnswer(
            f"{origin} gave candidates with the ids {ids.min()} to {ids.max()}, and the student "
            f"has {student_size} tokens."
        )
    for name in ("closed", "open", "begun", "end"):
        masses = arrays[f"candidate_{name}"]
        if not ((masses >= 0) & (masses <= 1 + 1e-3)).all():
            raise InvalidAnswer(
                f"{origin} gave a mass of candidates (candidate_{name}) that is no probability."
            )


def listed_rows(read: Scores, plan: Plan) -> ListedRows:
    """Return what was read of the teacher's rows, with its own tokens."""
    own = read.ref_logprobs[: len(plan.teacher_ids)].double().exp().tolist()
    sampled = dict(enumerate(zip(plan.teacher_ids, own, strict=True)))
    return ListedRows(read.token_ids.numpy(), read.teacher_logprobs.double().exp().numpy(), sampled)


def bound_of(position: Position, rows: ListedRows, log_path: NDArray[np.float64]) -> float:
    """Return a bound of the teacher's mass on other tokenizations of the text before."""
    bound = 0.0
    for row, ids in position.off_path:
        share = float(np.exp(log_path[row] - log_path[position.row]))
        bound += share * sum(rows.at_most(row, ids))
    return bound
