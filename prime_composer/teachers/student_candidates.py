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
from prime_composer.cross_tokenizer.masses import added
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import Plan, Position
from prime_composer.cross_tokenizer.sums import Candidates
from prime_composer.cross_tokenizer.teacher_rows import ListedRows
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
    """What is asked about a completion."""

    plan: Plan  # of the completion
    most: int  # candidates per position
    # of each position that has a score, in order; that of the position's own row first
    parts: tuple[tuple[Part, ...], ...]
    beside: Beside  # the request


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
            others = (i for o in short if o is not part for i in o.firsts.tolist())
            wanted = [position.token, *others]
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
    """Share a row's columns among its parts: a short one is listed whole, long ones alike."""
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
    """Return the candidates of a completion, and what is listed of the teacher's rows."""
    assert read.beside is not None
    arrays, student = read.beside, len(pair.student.of_id)
    check_arrays(arrays, student, origin)
    log_path = np.concatenate([[0.0], read.ref_logprobs.double().cumsum(0).numpy()])
    positions = [one for one in question.plan.positions if one is not None]
    n, own_row = len(positions), np.array([one.row for one in positions], dtype=int)
    parts = Flat.of(question.parts, positions, log_path)
    listed = Listed.of(parts, arrays)
    at, place, ids, masses = of_positions(positions, parts, listed, student, question.most)
    whole = np.full((n, question.most), -1)
    dense = np.zeros((3, n, question.most))
    whole[at, place], dense[:, at, place] = ids, masses

    totals = parts.share * listed.totals(parts, arrays)
    total = added(parts.at, totals, n)
    skip = np.array([one.skip for one in positions], dtype=int)
    first = np.array([one.before is None for one in positions], dtype=bool)
    ends = ((skip <= 0) | first) & ~parts.lacks
    end = np.where(ends, arrays["candidate_end"][own_row].astype(np.float64), 0.0)
    # Of the own row alone: what straddles the position is mass of another one.
    whole_rows = np.array([part.tokens is None for part in parts.parts], dtype=bool)
    ordinary = added(parts.at[whole_rows], totals[whole_rows], n)
    nobody = np.where((skip <= 0) & ~parts.lacks, (1 - ordinary - end).clip(min=0.0), 0.0)
    rows = listed_rows(read, question.plan)
    bounds = off_path(positions, own_row, rows, log_path)
    unlisted = np.where(parts.lacks, np.inf, 0.0)
    closed, open_, begun = torch.from_numpy(dense)
    candidates = Candidates(
        ids=torch.from_numpy(whole),
        closed=closed,
        open=open_,
        total=torch.from_numpy(total),
        end=torch.from_numpy(end),
        nobody=torch.from_numpy(nobody),
        off_path=torch.from_numpy(bounds),
        unlisted=torch.from_numpy(unlisted),
        begun=begun,
    )
    return candidates, rows


@dataclass(frozen=True, eq=False)
class Flat:
    """The parts of all positions, one after the other; none of a position that lacks one."""

    parts: list[Part]  # the parts, [p]
    at: NDArray[np.int64]  # the position of each
    row: NDArray[np.int64]  # of each
    offset: NDArray[np.int64]  # of each
    columns: NDArray[np.int64]  # of each
    share: NDArray[np.float64]  # the teacher's path from its row to the position's, as a factor
    is_own: NDArray[np.bool_]  # it is that of its position's own row, and begins no lead
    lacks: NDArray[np.bool_]  # whether the row of one of a position's parts has no room for it, [n]

    @classmethod
    def of(
        cls,
        asked: Sequence[Sequence[Part]],
        positions: Sequence[Position],
        log_path: NDArray[np.float64],
    ) -> "Flat":
        """Return the parts that were asked of positions."""
        lacks = np.array([0 in [one.columns for one in parts] for parts in asked], dtype=bool)
        kept = [(at, parts) for at, parts in enumerate(asked) if not lacks[at]]
        flat = [part for _, parts in kept for part in parts]
        at = np.array([at for at, parts in kept for _ in parts], dtype=int)
        is_own = [
            index == 0 and part.row == positions[at].row and part.skip >= 0
            for at, parts in kept
            for index, part in enumerate(parts)
        ]
        row, offset, columns = (
            np.array([getattr(part, name) for part in flat], dtype=int)
            for name in ("row", "offset", "columns")
        )
        own_row = np.array([one.row for one in positions], dtype=int)[at]
        share = np.exp(log_path[row] - log_path[own_row])
        return cls(flat, at, row, offset, columns, share, np.array(is_own, dtype=bool), lacks)


@dataclass(frozen=True, eq=False)
class Listed:
    """What an answer lists of parts, part after part."""

    part: NDArray[np.int64]  # index of each entry's part, in order, [e]
    ids: NDArray[np.int64]  # the student's tokens
    closed: NDArray[np.float64]  # masses
    open: NDArray[np.float64]  # masses
    begun: NDArray[np.float64]  # share of what may begin them

    @classmethod
    def of(cls, parts: Flat, arrays: Arrays) -> "Listed":
        """Return the entries of an answer's arrays."""
        counts = parts.columns - 1
        part = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(part)) + np.repeat(
            parts.offset + 1 - (counts.cumsum() - counts), counts
        )
        row = parts.row[part]
        ids = arrays["candidate_ids"][row, column].astype(np.int64)
        kept = ids >= 0
        place = row[kept], column[kept]
        masses = (
            arrays[f"candidate_{name}"][place].astype(np.float64)
            for name in ("closed", "open", "begun")
        )
        return cls(part[kept], ids[kept], *masses)

    def totals(self, parts: Flat, arrays: Arrays) -> NDArray[np.float64]:
        """Return the mass of each part: what is listed, and what is not.

        Where nearly all tokens of a position are dropped later, a total that was rounded by itself
        would leave a difference in the place of the others.
        """
        total = arrays["candidate_closed"][parts.row, parts.offset].astype(np.float64)
        sums = added(self.part, self.closed + self.open, len(total))
        return np.where(total - sums > ROUNDING * total, total, sums)


def of_positions(
    positions: Sequence[Position], parts: Flat, listed: Listed, student: int, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids with most mass at each position, the sampled one first, and their masses."""
    share, of_part = parts.share[listed.part], parts.at[listed.part]
    keys, of_key = np.unique(of_part * student + listed.ids, return_inverse=True)
    closed, open_ = (
        added(of_key, share * mass, len(keys)) for mass in (listed.closed, listed.open)
    )
    begun = np.full(len(keys), np.nan)
    own = parts.is_own[listed.part]
    both = (listed.closed + listed.open)[own]
    begun[of_key[own]] = both * listed.begun[own] / np.maximum(1 - listed.begun[own], 1e-9)
    both = closed + open_
    at, ids = keys // student, keys % student
    sampled = np.array([one.token for one in positions], dtype=int)
    is_sampled = ids == sampled[at]
    kept = is_sampled | (missing_of(parts, listed, keys, student) <= MISSING * both)
    order = np.lexsort((-both, ~is_sampled, at))
    order = order[kept[order]]
    counts = np.bincount(at[order], minlength=len(positions))
    place = np.arange(len(order)) - (counts.cumsum() - counts)[at[order]]
    fits = place < most
    order = order[fits]
    masses = np.stack([closed[order], open_[order], begun[order]])
    return at[order], place[fits], ids[order], masses


def missing_of(
    parts: Flat, listed: Listed, keys: NDArray[np.int64], student: int
) -> NDArray[np.float64]:
    """Return the mass that each id may have more of, at most, in parts that do not list it."""
    missing = np.zeros(len(keys))
    forced = [at * student + i for at, part in enumerate(parts.parts) for i in part.forced]
    unforced = ~np.isin(listed.part * student + listed.ids, forced)
    begins = listed.part.searchsorted(np.arange(len(parts.parts) + 1)).tolist()
    several = np.bincount(parts.at, minlength=len(parts.lacks))[parts.at] > 1
    sizes = np.array([len(part.firsts) for part in parts.parts], dtype=int)
    mass = listed.closed + listed.open
    for index in np.flatnonzero(several & (np.diff(begins) < sizes)).tolist():
        here = slice(*begins[index : index + 2])
        smallest = mass[here][unforced[here]].min(initial=np.inf)
        first = int(parts.at[index]) * student
        place = slice(*keys.searchsorted([first, first + student]).tolist())
        ids, firsts = keys[place] - first, parts.parts[index].firsts
        unlisted = firsts[firsts.searchsorted(ids).clip(max=len(firsts) - 1)] == ids
        unlisted[ids.searchsorted(listed.ids[here])] = False
        missing[place][unlisted] += parts.share[index] * smallest
    return missing


def check_arrays(arrays: Arrays, student_size: int, origin: str) -> None:
    """Check what no teacher can have answered."""
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
    own = read.ref_logprobs[: len(plan.teacher_ids)].double().exp().numpy()
    probabilities = read.teacher_logprobs.double().exp().numpy()
    return ListedRows(read.token_ids.numpy(), probabilities, plan.teacher_ids, own)


def off_path(
    positions: Sequence[Position],
    own_row: NDArray[np.int64],
    rows: ListedRows,
    log_path: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return bounds of the teacher's mass on other tokenizations of the text before, [n]."""
    places = [
        (at, row, i)
        for at, position in enumerate(positions)
        for row, ids in position.off_path
        for i in ids
    ]
    at, row, id_ = np.array(places, dtype=int).reshape(-1, 3).T
    share = np.exp(log_path[row] - log_path[own_row[at]])
    return added(at, share * rows.at_most(row, id_), len(positions))
