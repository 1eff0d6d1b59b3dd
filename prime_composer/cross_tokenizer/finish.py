"""From masses to a teacher's scores: refinement, seams, and which ids are resolved."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.contract import Scores, given
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import Plan, Position
from prime_composer.cross_tokenizer.sums import Candidates

NEVER = math.log(1e-6)
"""Log-prob of a token that the teacher's text never leads to; a finite one, as losses need."""

IMPROBABLE = 1e-8
"""Probability up to which an id is left to the tail."""

UNRESOLVED = 0.05
"""Share of an id's mass up to which it may be uncertain in a resolved id."""

SMALLEST_BRANCH = 1e-4
"""Mass from which on a continuation of the rollout's own teacher token is followed."""

MOST_ROWS = 6
"""Rows that are followed at most."""

UNLISTED = 0.05
"""Share of a position's mass that the teacher's rows may leave out. Beyond it, it has no score."""

FULL = 1 - 1e-6
"""Mass of a support at most: the tail keeps a little, or a forward KL would be infinite."""


Totals = dict[str, float]
"""Sums over the tokens of completions, by name: "tokens" and "teacher_tokens" of both encodings,
"scored" tokens, and what is counted or added up over these. ``means`` divides them."""

Support = list[tuple[int, float]]
"""Ids with their Q, the most probable first, after the sampled token."""


class Rows:
    """A teacher's probabilities after each of its tokens, [rows, V_T]; 0 for ids not listed."""

    def __init__(self, probabilities: Float[Tensor, "rows vocab"]):
        self._probabilities = probabilities.cpu()

    def of(self, row: int, ids: Sequence[int]) -> list[float]:
        """Return the probabilities of some ids of a row."""
        found: list[float] = self._probabilities[row, list(ids)].tolist()
        return found

    def largest(self, row: int, least: float) -> list[tuple[int, float]]:
        """Return the ids of a row with at least a probability, and that."""
        probabilities = self._probabilities[row]
        ids = (probabilities >= least).nonzero()[:, 0]
        return list(zip(ids.tolist(), probabilities[ids].tolist(), strict=True))


class ListedRows(Rows):
    """The same of which some entries are known; 0 for all others.

    Args:
        ids: the listed ids, [rows, m], the most probable one first.
        probabilities: theirs.
        own: row -> the text's own token, and its probability.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        probabilities: NDArray[np.float64],
        own: Mapping[int, tuple[int, float]],
    ):
        self._ids, self._listed, self._own = ids, probabilities, own
        self._entries: dict[int, dict[int, float]] = {}

    def of(self, row: int, ids: Sequence[int]) -> list[float]:
        """Return the probabilities of some ids of a row."""
        entries = self._of_row(row)
        return [entries.get(i, 0.0) for i in ids]

    def at_most(self, row: int, ids: Sequence[int]) -> list[float]:
        """Return a bound of these: an id that is not listed has the last one's at most."""
        entries, last = self._of_row(row), float(self._listed[row, -1])
        return [entries.get(i, last) for i in ids]

    def largest(self, row: int, least: float) -> list[tuple[int, float]]:
        """Return the listed ids of a row with at least a probability, and that."""
        return [(i, p) for i, p in sorted(self._of_row(row).items()) if p >= least]

    def _of_row(self, row: int) -> dict[int, float]:
        entries = self._entries.get(row)
        if entries is None:
            pairs = zip(self._ids[row].tolist(), self._listed[row].tolist(), strict=True)
            entries = self._entries[row] = dict(pairs)
            if row in self._own:
                token, probability = self._own[row]
                entries[token] = probability
        return entries


@dataclass
class Masses:
    """Masses of student tokens at one position, changed step by step.

    Attributes:
        closed: mass of each token that is certain.
        open: mass that may turn out to be another token's.
        total: both, with the tokens that are not listed.
        doubtful: open mass of dropped tokens: it belongs to another token, or to another text.
    """

    closed: dict[int, float]
    open: dict[int, float]
    total: float
    doubtful: float = 0.0

    def move(self, token: int, mass: float, *, is_open: bool) -> None:
        """Add mass to a token."""
        target = self.open if is_open else self.closed
        target[token] = target.get(token, 0.0) + mass

    def take(self, token: int, mass: float, *, is_open: bool) -> None:
        """Remove mass from a token."""
        target = self.open if is_open else self.closed
        target[token] = max(target.get(token, 0.0) - mass, 0.0)

    def drop(self, token: int) -> None:
        """Remove a token that the student does not write here."""
        unsure = self.open.pop(token, 0.0)
        self.total -= self.closed.pop(token, 0.0) + unsure
        self.doubtful += unsure


def token_scores(
    pair: Pair,
    plan: Plan,
    candidates: Candidates,
    rows: Rows,
    k: int,
    *,
    fixed: bool = False,
) -> tuple[Scores, Totals]:
    """Return the teacher's scores of a completion, and sums over its tokens.

    The support is the sampled token, then the most probable ids that are resolved. Other columns
    are not known.

    Args:
        pair: the tokenizers.
        plan: of the completion.
        candidates: at its positions that have a score.
        rows: the teacher's.
        k: ids of the support.
        fixed: the support must not depend on the sampled token, as estimators with a fixed support
            need: it has no column of its own, and what follows it changes its own log-prob alone.
    """
    n = len(plan.positions)
    own = torch.full((n,), NEVER)
    ids = torch.arange(k).repeat(n, 1)
    logprobs = torch.full((n, k), NEVER)
    known = torch.zeros((n, k), dtype=torch.bool)
    scored = torch.zeros(n, dtype=torch.bool)
    found: list[tuple[Row, Support]] = []
    places = [at for at, position in enumerate(plan.positions) if position is not None]
    for index, at in enumerate(places):
        row = Row(pair, plan, given(plan.positions[at]), candidates, index, rows)
        if not row.is_listed:
            continue
        own[at], support = row.result(k, fixed=fixed)
        scored[at] = True
        found.append((row, support))
        if support:
            chosen, shares = zip(*support, strict=True)
            ids[at] = torch.tensor([*chosen, *unused(chosen, k - len(chosen))])
            logprobs[at, : len(chosen)] = torch.tensor(shares).log()
            known[at, : len(chosen)] = True
    return Scores(own, ids, logprobs, known=known, scored=scored), _totals(plan, found)


def _totals(plan: Plan, found: Sequence[tuple["Row", Support]]) -> Totals:
    totals: Mapping[str, float] = {
        "tokens": len(plan.positions),
        "teacher_tokens": len(plan.teacher_ids),
        "scored": len(found),
        "aligned": sum(row.position.aligned for row, _ in found),
        "noncanonical": sum(not row.position.canonical for row, _ in found),
        "support_size": sum(len(support) for _, support in found),
        "unresolved_mass": sum(1 - sum(q for _, q in support) for _, support in found),
        "off_path_bound": sum(row.off_path for row, _ in found),
    }
    return {name: float(value) for name, value in totals.items()}


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


def unused(ids: Sequence[int], count: int) -> list[int]:
    """Return the smallest ids that are not among some."""
    taken = {*ids}
    return [i for i in range(len(ids) + count) if i not in taken][:count]


class Row:
    """One position: its masses as they are refined, filtered, normalized and resolved."""

    def __init__(
        self,
        pair: Pair,
        plan: Plan,
        position: Position,
        candidates: Candidates,
        index: int,
        rows: Rows,
    ):
        self.pair, self.plan, self.position, self.rows = pair, plan, position, rows
        ids = [i for i in candidates.ids[index].tolist() if i >= 0]
        self.masses = Masses(
            dict(zip(ids, candidates.closed[index].tolist(), strict=False)),
            dict(zip(ids, candidates.open[index].tolist(), strict=False)),
            float(candidates.total[index]),
        )
        begun = () if candidates.begun is None else candidates.begun[index].tolist()
        known = (entry for entry in zip(ids, begun, strict=False) if not math.isnan(entry[1]))
        self.begun = dict(known)
        self.end = float(candidates.end[index])
        self.nobody = float(candidates.nobody[index])
        bound = float(candidates.off_path[index])
        whole = self.masses.total + self.end + self.nobody
        self.is_listed = float(candidates.unlisted[index]) <= UNLISTED * whole
        self.off_path = min(1.0, bound / whole) if whole > 0 else 1.0

    def result(self, k: int, *, fixed: bool) -> tuple[float, Support]:
        """Return log Q of the sampled token, and the support: ids with their Q."""
        support: Support = []
        if fixed:
            before = copy.deepcopy(self.masses)
            self.filter()
            support = self.support(k, *self.own_and_norm(), fixed=True)
            self.masses = before  # what is dropped here may be refined to another token
        self.refine()
        self.filter()
        own, norm = self.own_and_norm()
        return own, support if fixed else self.support(k, own, norm)

    def own_and_norm(self) -> tuple[float, float]:
        """Return log Q of the sampled token, and the mass that Q is normalized by."""
        norm = self.masses.total + self.end + self.nobody
        token = self.position.token
        if token == self.pair.student_end:
            mass = self.end
        else:
            mass = self.masses.closed.get(token, 0.0) + self.masses.open.get(token, 0.0)
        if norm <= 0 or not self.position.canonical or mass <= norm * math.exp(NEVER):
            return NEVER, norm
        return math.log(mass / norm), norm

    def refine(self) -> None:
        """Let the rows after it say what follows the rollout's own teacher token.

        Its mass goes from the first student token of its own bytes to those of each continuation.
        """
        pair, position, ids = self.pair, self.position, self.plan.teacher_ids
        if position.row >= len(ids):
            return
        tables, token = pair.tables, ids[position.row]
        entry = pair.entry(token, position.skip)
        if not tables.asks[entry]:
            return
        content = pair.written(token, position.skip)
        (mass,) = self.rows.of(position.row, [token])
        first = int(tables.first[entry])
        if first >= 0:
            self.masses.take(first, mass, is_open=bool(tables.open[entry]))
        for row in range(position.row + 1, position.row + 1 + MOST_ROWS):
            on_path = ids[row] if row < len(ids) else None
            left, follows = mass, None
            branches = dict(self.rows.largest(row, SMALLEST_BRANCH / max(mass, 1e-300)))
            if on_path is not None and on_path not in branches:
                (branches[on_path],) = self.rows.of(row, [on_path])
            for token, share in branches.items():
                longer = content + (pair.teacher.of_id[token] or b"")
                encoded = pair.student.encode_bytes(longer) if longer != content else None
                if encoded is None:  # a special token, or a part of a character
                    if token == on_path and longer != content and first < 0:
                        left -= share * mass
                        follows = longer, share * mass, -1
                    continue
                left -= share * mass
                is_open = pair.is_open(longer, encoded[0])
                if is_open and token == on_path:
                    follows = longer, share * mass, encoded[0]
                else:
                    self.masses.move(encoded[0], share * mass, is_open=is_open)
            if first >= 0:
                self.masses.move(first, max(left, 0.0), is_open=False)
            if follows is None:
                return
            content, mass, first = follows
        if first >= 0:
            self.masses.move(first, mass, is_open=True)

    def filter(self) -> None:
        """Drop tokens that the student does not write after the one before."""
        before = self.position.before
        if before is None or not self.position.filtered:
            return
        for token in {*self.masses.closed} | {*self.masses.open}:
            if not self.pair.canonical(before, token):
                self.masses.drop(token)

    def support(self, k: int, own: float, norm: float, *, fixed: bool = False) -> Support:
        """Return the sampled token, unless ``fixed``, and the most probable resolved ids."""
        if norm <= 0 or k == 0:
            return []
        chosen: list[tuple[int, float]] = []
        if not fixed and own > NEVER:
            chosen.append((self.position.token, math.exp(own)))
        others = [
            (token, mass / norm)
            for token, mass in self.masses.closed.items()
            if fixed or token != self.position.token
            if mass > IMPROBABLE * norm and self.is_resolved(token, mass, fixed=fixed)
        ]
        if self.end > IMPROBABLE * norm and self.pair.student_end not in dict(chosen):
            others.append((self.pair.student_end, self.end / norm))
        others.sort(key=lambda entry: (-entry[1], entry[0]))
        chosen += others[: k - len(chosen)]
        total = sum(q for _, q in chosen)
        if total > FULL:
            chosen = [(token, q * FULL / total) for token, q in chosen]
        return chosen

    def is_resolved(self, token: int, closed: float, *, fixed: bool) -> bool:
        """Return whether little of a token's mass is uncertain."""
        unsure = self.masses.open.get(token, 0.0) + self.potential(token, fixed=fixed)
        return unsure <= UNRESOLVED * (closed + unsure)

    def potential(self, token: int, *, fixed: bool = False) -> float:
        """Return the mass of teacher tokens that may begin a student token and not end it.

        The rollout's own teacher token has been refined, unless the support is ``fixed``.
        """
        pair, position = self.pair, self.position
        ids = () if fixed else self.plan.teacher_ids
        own = ids[position.row] if position.row < len(ids) else None
        begun = self.begun.get(token)
        if position.rest:
            content = position.rest + (pair.student.of_id[token] or b"")
            if begun is not None:
                return begun + self._own_begins(content) * fixed
            shorter = (
                pair.id_of.get(content[:end]) for end in range(len(position.rest) + 1, len(content))
            )
            chosen = [i for i in shorter if i is not None and i != own]
            return math.fsum(self.rows.of(position.row, chosen))
        path = pair.path(token)
        if position.skip < 0:
            whole = (pair.student.of_id[token] or b"").removeprefix(pair.before)
            path = [*(pair.teacher.encode_bytes(whole) or ())]
        if len(path) < 2:
            return 0.0
        if position.row < len(self.plan.teacher_ids) and begun is not None:
            if path[0] != self.plan.teacher_ids[position.row]:
                return begun
        mass = 1.0
        for row, step in enumerate(path[:-1], position.row):
            mass *= self.rows.of(row, [step])[0]
            if row >= len(ids) or step != ids[row]:
                return mass
        return 0.0

    def _own_begins(self, content: bytes) -> float:
        """Return the mass of the text's own teacher token where it may begin some bytes."""
        row, ids = self.position.row, self.plan.teacher_ids
        if row >= len(ids):
            return 0.0
        own = self.pair.teacher.of_id[ids[row]] or b""
        begins = len(self.position.rest) < len(own) < len(content) and content.startswith(own)
        return self.rows.of(row, [ids[row]])[0] if begins else 0.0
