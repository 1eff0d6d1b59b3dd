"""From masses to a teacher's scores: refinement, seams, and which ids are resolved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.masses import Masses, added
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan
from prime_composer.cross_tokenizer.sums import Candidates
from prime_composer.cross_tokenizer.teacher_rows import Floats, Ints, TeacherRows

NEVER = math.log(1e-6)  # For what the teacher's text never leads to; losses need a number

IMPROBABLE = 1e-8  # Probability up to which an id is left to the tail

UNRESOLVED = 0.05  # Share of an id's mass up to which it may be uncertain in a resolved id

SMALLEST_BRANCH = 1e-4  # Mass from which on the rollout's own teacher token is followed

MOST_ROWS = 6  # Rows that are followed at most

UNLISTED = 0.05  # Share of a position's mass that rows may leave out, or it has no score

UNREACHED = math.exp(NEVER)
"""Mass of a position up to which it has no score: the teacher's text does not lead there. By the
bound of ``off_path``, other tokenizations may have more mass in most such places."""

FULL = 1 - 1e-6  # Largest mass of a support: without a tail a forward KL is infinite


Totals = dict[str, float]
"""Sums over the tokens of completions, by name: "tokens" and "teacher_tokens" of both encodings,
"scored" tokens, and what is counted or added up over these. ``means`` divides them."""

Bools = NDArray[np.bool_]


def token_scores(
    pair: TokenizerPair,
    plan: ReadingPlan,
    candidates: Candidates,
    rows: TeacherRows,
    k: int,
    *,
    fixed: bool = False,
) -> tuple[Scores, Totals]:
    """Return the teacher's scores of a completion, and sums over its tokens.

    The support is the sampled token, then the most probable ids that are resolved, k in all. A
    ``fixed`` one must not depend on the sampled token, as estimators need: it has no column of its
    own, and what follows it changes its own log-prob alone.
    """
    positions = Positions(pair, plan, candidates, rows)
    plain = positions.masses
    masses = positions.filtered(positions.refined(plain))
    own = positions.own(masses)
    if fixed:
        # Before refinement: what is dropped here may be refined to another token.
        support = positions.support(positions.filtered(plain), k, None)
    else:
        support = positions.support(masses, k, own)
    has_score = positions.has_score
    at, n = positions.at[has_score], len(plan.positions)
    scores = Scores(
        torch.full((n,), NEVER),
        torch.arange(k).repeat(n, 1),
        torch.full((n, k), NEVER),
        known=torch.zeros((n, k), dtype=torch.bool),
        scored=torch.zeros(n, dtype=torch.bool),
    )
    assert scores.known is not None and scores.scored is not None
    scores.ref_logprobs[at] = torch.from_numpy(own[has_score]).float()
    scores.token_ids[at] = torch.from_numpy(support.ids[has_score])
    known = torch.from_numpy(support.known[has_score])
    logprobs = torch.from_numpy(support.q[has_score]).float().log()
    scores.teacher_logprobs[at] = torch.where(known, logprobs, NEVER)
    scores.known[at], scores.scored[at] = known, True
    return scores, positions.totals(support, masses)


def means(totals: Mapping[str, float]) -> dict[str, float]:
    """Return means: "unscored" and "teacher_tokens" per token, all others per scored token."""
    counts = dict(totals)
    tokens, scored = counts.pop("tokens", 0), counts.pop("scored", 0)
    if not tokens:
        return {}
    whole = {
        "unscored": 1 - scored / tokens,
        "teacher_tokens": counts.pop("teacher_tokens", 0) / tokens,
    }
    return whole | {name: value / scored for name, value in counts.items() if scored}


@dataclass(frozen=True)
class Supports:
    """The supports of n positions."""

    ids: Ints  # different ones in each row, the known ones first, [n, k]
    q: Floats  # Q of each, [n, k]; 1 where it is not known
    known: Bools  # whether a column is one of the support, [n, k]


@dataclass(frozen=True)
class Paths:
    """Where the rollout's own text is followed row by row, from some positions."""

    at: Ints  # the position of each
    row: Ints  # the teacher's next row
    contents: list[bytes]  # what the teacher wrote so far, from the position's begin on
    mass: Floats  # its probability
    first: Ints  # the student's first token of that; -1 where that is unknown


class Positions:
    """The positions of a completion that have a score.

    ``at`` is the place of each in the completion, [n], and ``masses`` are before refinement.
    ``has_score``, [n]: the teacher's text leads there, and the rows list most of its mass.
    """

    def __init__(
        self, pair: TokenizerPair, plan: ReadingPlan, candidates: Candidates, rows: TeacherRows
    ):
        self.pair, self.rows = pair, rows
        self.at = np.array(
            [at for at, position in enumerate(plan.positions) if position is not None], dtype=int
        )
        self.positions = [position for position in plan.positions if position is not None]
        self.plan = plan
        self.masses = Masses.of(candidates, len(pair.student.of_id))
        self.token, self.before, self.row, self.skip = (
            np.array(numbers, dtype=np.int64)
            for numbers in (
                [one.token for one in self.positions],
                [-1 if one.before is None else one.before for one in self.positions],
                [one.row for one in self.positions],
                [one.skip for one in self.positions],
            )
        )
        self.canonical = np.array([one.canonical for one in self.positions], dtype=bool)
        self.filters = np.array([one.filtered for one in self.positions], dtype=bool)
        self.filters &= self.before >= 0
        self.teacher_ids = np.array([*plan.teacher_ids, -1])
        """The text's own tokens; -1 after the last row."""
        self.end, self.nobody, bound, unlisted = (
            part.cpu().numpy().astype(np.float64)
            for part in (
                candidates.end,
                candidates.nobody,
                candidates.off_path,
                candidates.unlisted,
            )
        )
        whole = self.masses.total + self.end + self.nobody
        self.has_score = (whole > UNREACHED) & (unlisted <= UNLISTED * whole)
        share = bound / np.where(whole > 0, whole, 1.0)
        self.off_path = np.where(whole > 0, share.clip(max=1.0), 1.0)

    def norm(self, masses: Masses) -> Floats:
        """Return the mass that Q is normalized by at each position."""
        return masses.total + self.end + self.nobody

    def own(self, masses: Masses) -> Floats:
        """Return log Q of each sampled token."""
        norm = self.norm(masses)
        place, has = masses.find(np.arange(len(self.at)), self.token)
        mass = np.zeros(len(self.at))
        mass[has] = (masses.closed + masses.open)[place[has]]
        mass = np.where(self.token == self.pair.student_end, self.end, mass)
        possible = (norm > 0) & self.canonical & (mass > norm * math.exp(NEVER))
        own = np.full(len(mass), NEVER)
        own[possible] = np.log(mass[possible] / norm[possible])
        return own

    def refined(self, masses: Masses) -> Masses:
        """Let the rows after it say what follows the rollout's own teacher token."""
        tables, own = self.pair.tables, self.teacher_ids[self.row]
        entry = tables.start[own] + self.skip
        at = np.flatnonzero((own >= 0) & tables.asks[np.where(own >= 0, entry, 0)])
        own, entry = own[at], entry[at]
        first, mass = tables.first[entry], self.rows.at(self.row[at], own)
        has = first >= 0
        masses = masses.less(at[has], first[has], mass[has], tables.open[entry[has]])
        written = zip(own.tolist(), self.skip[at].tolist(), strict=True)
        contents = [self.pair.written(*each) for each in written]
        paths = Paths(at, self.row[at] + 1, contents, mass, first)
        moved: list[tuple[Ints, Ints, Floats, Bools]] = []
        unlisted = np.zeros(len(self.at))
        for _ in range(MOST_ROWS):
            if not len(paths.at):
                break
            unlisted[paths.at] += paths.mass * self.rows.unlisted(paths.row)
            paths = self._followed(paths, moved)
        has = paths.first >= 0
        moved.append((paths.at[has], paths.first[has], paths.mass[has], np.ones(has.sum(), bool)))
        masses = masses.more(*map(np.concatenate, zip(*moved, strict=True)))
        return replace(masses, unlisted=unlisted)

    def _followed(self, paths: Paths, moved: list[tuple[Ints, Ints, Floats, Bools]]) -> Paths:
        """Read one row more of each path; return those that another one has to be read of."""
        least = SMALLEST_BRANCH / np.maximum(paths.mass, 1e-300)
        path, ids, shares = self.rows.largest(paths.row, least)
        next_id = self.teacher_ids[paths.row]
        is_missing = next_id >= 0
        is_missing[path[ids == next_id[path]]] = False
        missing = np.flatnonzero(is_missing)
        path, ids = np.append(path, missing), np.append(ids, next_id[missing])
        shares = np.append(shares, self.rows.at(paths.row[missing], next_id[missing]))

        asked = zip(path.tolist(), ids.tolist(), strict=True)
        codes = self.pair.continuations([(paths.contents[p], i) for p, i in asked])
        first, is_open, mass = codes // 2 - 1, codes % 2 == 1, shares * paths.mass[path]
        is_known = first >= 0  # no special token, and no part of a character
        goes_on = (ids == next_id[path]) & np.where(is_known, is_open, paths.first[path] < 0)
        used, here = is_known | goes_on, is_known & ~goes_on
        moved.append((paths.at[path[here]], first[here], mass[here], is_open[here]))
        left = paths.mass - added(path[used], mass[used], len(paths.at))
        has = paths.first >= 0
        none = np.zeros(has.sum(), dtype=bool)
        moved.append((paths.at[has], paths.first[has], left[has].clip(min=0.0), none))
        after = path[goes_on]
        of_id, on_path = self.pair.teacher.of_id, zip(after, ids[goes_on].tolist(), strict=True)
        contents = [paths.contents[p] + (of_id[i] or b"") for p, i in on_path]
        return Paths(paths.at[after], paths.row[after] + 1, contents, mass[goes_on], first[goes_on])

    def filtered(self, masses: Masses) -> Masses:
        """Drop tokens that the student does not write after the one before."""
        positions = masses.positions
        asked = np.flatnonzero(self.filters[positions] & (masses.closed + masses.open > 0))
        kept = np.ones(len(positions), dtype=bool)
        kept[asked] = self.pair.are_canonical(self.before[positions[asked]], masses.tokens[asked])
        return masses.only(kept)

    def support(self, masses: Masses, k: int, own: Floats | None) -> Supports:
        """Return each sampled token, and the most probable resolved ids."""
        n, end, norm = len(self.at), self.pair.student_end, self.norm(masses)
        every, positions, tokens = np.arange(n), masses.positions, masses.tokens
        sampled = np.zeros(n, bool) if own is None else (norm > 0) & (own > NEVER)
        probable = (masses.closed > IMPROBABLE * norm[positions]) & (norm > 0)[positions]
        if own is not None:
            probable &= tokens != self.token[positions]
        asked = np.flatnonzero(probable)
        unsure = masses.open[asked] + self.potential(masses, asked, fixed=own is None)
        asked = asked[unsure <= UNRESOLVED * (masses.closed[asked] + unsure)]
        ends = (norm > 0) & (self.end > IMPROBABLE * norm) & ~(sampled & (self.token == end))
        at = np.concatenate([every[sampled], positions[asked], every[ends]])
        ids = np.concatenate([self.token[sampled], tokens[asked], np.full(ends.sum(), end)])
        of_own = np.zeros(0) if own is None else np.exp(own[sampled])
        others = np.concatenate([masses.closed[asked], self.end[ends]])
        q = np.concatenate([of_own, others / norm[at[len(of_own) :]]])
        is_other = np.arange(len(at)) >= len(of_own)
        # A position, then its sampled token, then the others by their Q, which is 1 at most.
        order = (4 * at + 2 * is_other - q).argsort(kind="stable")
        at, ids, q = at[order], ids[order], q[order]
        counts = np.bincount(at, minlength=n)
        column = np.arange(len(at)) - (counts.cumsum() - counts)[at]
        kept = column < k
        return supports_of(at[kept], column[kept], ids[kept], q[kept], (n, k))

    def potential(self, masses: Masses, entries: Ints, *, fixed: bool) -> Floats:
        """Return the mass of teacher tokens that may begin a student token and not end it, [e]."""
        at, tokens = masses.positions[entries], masses.tokens[entries]
        row, skip, own = self.row[at], self.skip[at], self.teacher_ids[self.row[at]]
        first = np.where(skip == 0, self.pair.path_first[tokens], -1)
        found = np.zeros(len(entries))
        aligned = (skip == 0) & (first >= 0)
        ask = aligned & (first != own)
        found[ask] = self.rows.at(row[ask], first[ask])
        for e in np.flatnonzero((aligned & (first == own)) | (skip < 0)).tolist():
            found[e] = self._along_path(int(at[e]), int(tokens[e]), fixed=fixed)
        inside = np.flatnonzero(skip > 0)
        # The teacher's tokens that end inside a student token, from the row's begin on.
        rests = [self.positions[e].rest for e in at[inside].tolist()]
        ids = list(map(self.pair.within, rests, tokens[inside].tolist()))
        counts = [len(each) for each in ids]
        entry, id_ = np.repeat(inside, counts), np.array([*chain(*ids)], dtype=np.int64)
        use = fixed | (id_ != own[entry])
        mass = self.rows.at(row[entry[use]], id_[use])
        return found + added(entry[use], mass, len(entries))

    def _along_path(self, at: int, token: int, *, fixed: bool) -> float:
        """Return the mass of the teacher's path to a student token that leaves the text's own."""
        pair, row = self.pair, int(self.row[at])
        path = pair.path(token)
        if self.skip[at] < 0:
            whole = (pair.student.of_id[token] or b"").removeprefix(pair.before)
            path = [*(pair.teacher.encode_bytes(whole) or ())]
        mass = 1.0
        for later, step in enumerate(path[:-1]):
            mass *= float(self.rows.at(np.array([row + later]), np.array([step]))[0])
            if fixed or step != self.teacher_ids[row + later]:
                return mass
        return 0.0

    def totals(self, support: Supports, masses: Masses) -> Totals:
        here, norm = self.has_score, self.norm(masses)
        unlisted = np.minimum(masses.unlisted / np.where(norm > 0, norm, 1.0), 1.0)
        mass = np.where(support.known, support.q, 0.0).sum(-1)
        values: Mapping[str, float] = {
            "tokens": len(self.plan.positions),
            "teacher_tokens": len(self.plan.teacher_ids),
            "scored": here.sum(),
            "aligned": (self.skip == 0)[here].sum(),
            "noncanonical": (~self.canonical)[here].sum(),
            "support_size": support.known[here].sum(),
            "unresolved_mass": (1 - mass)[here].sum(),
            "off_path_bound": self.off_path[here].sum(),
            "unlisted": unlisted[here].sum(),
        }
        return {name: float(value) for name, value in values.items()}


def supports_of(at: Ints, column: Ints, ids: Ints, q: Floats, shape: tuple[int, int]) -> Supports:
    """Return supports from their entries; other columns have the smallest ids that are unused."""
    n, k = shape
    known = np.zeros(shape, dtype=bool)
    known[at, column] = True
    all_ids, all_q = np.zeros(shape, dtype=np.int64), np.ones(shape)
    all_ids[at, column], all_q[at, column] = ids, q
    total = added(at, q, n)[:, None]
    all_q = np.where(known & (total > FULL), all_q * FULL / np.maximum(total, FULL), all_q)
    # Of the first 2K ids, K at most are taken.
    free = np.ones((n, 2 * k), dtype=bool)
    small = ids < 2 * k
    free[at[small], ids[small]] = False
    row, unused = free.nonzero()
    column = (free.cumsum(1) - 1)[row, unused] + known.sum(1)[row]
    fits = column < k
    all_ids[row[fits], column[fits]] = unused[fits]
    return Supports(all_ids, all_q, known)
