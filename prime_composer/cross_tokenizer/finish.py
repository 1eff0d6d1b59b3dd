"""From masses to a teacher's scores: refinement, seams, and which ids are resolved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import Scores
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

FULL = 1 - 1e-6
"""Mass of a support at most: the tail keeps a little, or a forward KL would be infinite."""


@runtime_checkable
class Rows(Protocol):
    """A teacher's probabilities after each of its tokens."""

    def of(self, row: int, ids: Sequence[int]) -> list[float]:
        """Return the probabilities of some ids of a row."""
        ...

    def largest(self, row: int, least: float) -> list[tuple[int, float]]:
        """Return the ids of a row with at least a probability, and that."""
        ...


class FullRows:
    """Rows of the whole vocabulary, [rows, V_T]."""

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


@dataclass(frozen=True, eq=False)
class TokenScores:
    """A teacher's scores of the student's own tokens.

    Attributes:
        scores: of every token of the completion. The support is the sampled token, then the most
            probable ids that are resolved.
        scored: which tokens have a score, [n]. Those that have none are left out of the loss.
        metrics: means over the scored tokens.
    """

    scores: Scores
    scored: Bool[Tensor, " n"]
    metrics: dict[str, float]


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
) -> TokenScores:
    """Return the teacher's scores of a completion.

    Args:
        pair: the tokenizers.
        plan: of the completion.
        candidates: at its positions that have a score.
        rows: the teacher's.
        k: ids of the support; the sampled token is the first one.
        fixed: the support must not depend on the sampled token, as estimators with a fixed support
            need: it is not in it, and refinement changes the sampled token's own log-prob alone.
    """
    n = len(plan.positions)
    own = torch.full((n,), NEVER)
    ids = torch.arange(k).repeat(n, 1)
    logprobs = torch.full((n, k), NEVER)
    known = torch.zeros((n, k), dtype=torch.bool)
    scored = torch.tensor([position is not None for position in plan.positions], dtype=torch.bool)
    sizes, unresolved, bounds = [], [], []
    index = 0
    for at, position in enumerate(plan.positions):
        if position is None:
            continue
        row = Row(pair, plan, position, candidates, index, rows)
        index += 1
        own[at], support = row.result(k, fixed=fixed)
        bounds.append(row.off_path)
        sizes.append(len(support))
        unresolved.append(1 - sum(q for _, q in support))
        if not support:
            continue
        places = slice(0, len(support))
        chosen = [token for token, _ in support]
        ids[at] = torch.tensor(chosen + unused(chosen, k - len(chosen)))
        logprobs[at, places] = torch.tensor([q for _, q in support]).log()
        known[at, places] = True
    count = max(1, len(sizes))
    aligned = [not position.rest for position in plan.positions if position is not None]
    canonical = [position.canonical for position in plan.positions if position is not None]
    metrics = {
        "aligned": sum(aligned) / count,
        "noncanonical": 1 - sum(canonical) / count,
        "support_size": sum(sizes) / count,
        "unresolved_mass": sum(unresolved) / count,
        "off_path_bound": sum(bounds) / count,
        "unscored": 1 - float(scored.float().mean()) if n else 0.0,
        "teacher_tokens": len(plan.teacher_ids) / max(1, n),
    }
    return TokenScores(Scores(own, ids, logprobs, known=known), scored, metrics)


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
        ids = candidates.ids[index].tolist()
        self.masses = Masses(
            dict(zip(ids, candidates.closed[index].tolist(), strict=True)),
            dict(zip(ids, candidates.open[index].tolist(), strict=True)),
            float(candidates.total[index]),
        )
        self.end = float(candidates.end[index])
        self.nobody = float(candidates.nobody[index])
        bound = float(candidates.off_path[index])
        whole = self.masses.total + self.end + self.nobody
        self.off_path = min(1.0, bound / whole) if whole > 0 else 1.0

    def result(self, k: int, *, fixed: bool) -> tuple[float, list[tuple[int, float]]]:
        """Return log Q of the sampled token, and the support: ids with their Q."""
        if fixed:
            support = self.support(k, fixed=True)
            self.refine()
        else:
            self.refine()
            support = self.support(k)
        return self.own_and_norm()[0], support

    def own_and_norm(self) -> tuple[float, float]:
        """Return log Q of the sampled token, and the mass that Q is normalized by."""
        self.filter()
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
        entry = int(tables.start[token]) + len(position.rest)
        if not tables.asks[entry]:
            return
        content = (pair.teacher.of_id[token] or b"")[len(position.rest) :]
        (mass,) = self.rows.of(position.row, [token])
        first = int(tables.first[entry])
        if first >= 0:
            self.masses.take(first, mass, is_open=bool(tables.open[entry]))
        for row in range(position.row + 1, position.row + 1 + MOST_ROWS):
            on_path = ids[row] if row < len(ids) else None
            left, follows = mass, None
            for token, share in self.rows.largest(row, SMALLEST_BRANCH / max(mass, 1e-300)):
                longer = content + (pair.teacher.of_id[token] or b"")
                encoded = pair.student.encode_bytes(longer) if longer != content else None
                if encoded is None:  # a special token, or a part of a character
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
        self.masses.move(first, mass, is_open=True)

    def filter(self) -> None:
        """Drop tokens that the student does not write after the one before."""
        before = self.position.before
        if before is None or not self.position.filtered:
            return
        for token in {*self.masses.closed} | {*self.masses.open}:
            if not self.pair.canonical(before, token):
                self.masses.drop(token)

    def support(self, k: int, *, fixed: bool = False) -> list[tuple[int, float]]:
        """Return the sampled token, unless ``fixed``, and the most probable resolved ids."""
        own, norm = self.own_and_norm()
        if norm <= 0:
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
        if position.rest:
            content = position.rest + (pair.student.of_id[token] or b"")
            begun = (
                pair.id_of.get(content[:end]) for end in range(len(position.rest) + 1, len(content))
            )
            chosen = [i for i in begun if i is not None and i != own]
            return math.fsum(self.rows.of(position.row, chosen))
        path = pair.path(token)
        if len(path) < 2:
            return 0.0
        mass = 1.0
        for row, step in enumerate(path[:-1], position.row):
            mass *= self.rows.of(row, [step])[0]
            if row >= len(ids) or step != ids[row]:
                return mass
        return 0.0
