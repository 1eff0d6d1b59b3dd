"""The teacher's mass on the first student token of what follows each position: sums over rows.

No strings: tables, rows and plans are all numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import Position, ReadingPlan

BLOCK = 2**25  # Entries times positions that are summed at once: 256 MB a sum


@dataclass(frozen=True, eq=False)
class Candidates:
    """Masses of student tokens at n positions, as shares of the teacher's path to their row."""

    ids: Int[Tensor, "n m"]  # the sampled token, then those with most mass; -1: no more
    closed: Float[Tensor, "n m"]  # mass of tokens whose first student token is certain
    open: Float[Tensor, "n m"]  # mass of those of which it is not
    total: Float[Tensor, " n"]  # both over the whole vocabulary, and parts of a character
    end: Float[Tensor, " n"]  # mass on the end of the teacher's turn; 0 inside a token, but a lead
    nobody: Float[Tensor, " n"]  # mass on tokens that write nothing; 0 inside a token
    off_path: Float[Tensor, " n"]  # mass on other tokenizations of the text before: a bound
    unlisted: Float[Tensor, " n"]  # mass of any token here that the rows do not list


class Sums:
    """Sums with the tables of a pair on a device, that of the rows."""

    def __init__(self, pair: TokenizerPair, device: torch.device | str = "cpu"):
        tables = pair.tables
        self._pair = pair
        self._order = torch.from_numpy(tables.order).to(device)
        self._start = torch.from_numpy(tables.start).to(device)
        unknown = len(pair.student.of_id)
        first = torch.from_numpy(tables.first).to(device)
        self._first = torch.where(first < 0, unknown, first)
        self._open = torch.from_numpy(tables.open).to(device)
        self._ends = torch.tensor(pair.teacher_ends, device=device)

    def candidates(
        self, probabilities: Float[Tensor, "rows vocab"], plan: ReadingPlan, m: int
    ) -> Candidates:
        """Return the m tokens with most mass at each position that has a score.

        The sampled token is among them. ``probabilities`` are the teacher's rows of the plan's
        text, the first after its prompt.
        """
        positions = [position for position in plan.positions if position is not None]
        log_path = self._log_path(probabilities, plan)
        width = len(self._pair.student.of_id)
        rows = max(1, BLOCK // width)
        blocks = [
            self._block(probabilities, log_path, positions[begin : begin + rows], min(m, width))
            for begin in range(0, len(positions), rows)
        ]
        if not blocks:
            empty, none = probabilities.new_zeros((0, m)), probabilities.new_zeros(0)
            return Candidates(empty.long(), empty, empty, none, none, none, none, none)
        return Candidates(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))

    def _log_path(
        self, probabilities: Float[Tensor, "rows vocab"], plan: ReadingPlan
    ) -> Float[Tensor, " rows"]:
        """Return the log-prob of the teacher's tokens before each row, in float64.

        One over the probability of an improbable path is more than a float32 holds.
        """
        ids = torch.tensor(plan.teacher_ids, dtype=torch.long, device=probabilities.device)
        steps = probabilities[: len(ids)].gather(-1, ids[:, None])[:, 0].double().log()
        return torch.cat([steps.new_zeros(1), steps.cumsum(0)])

    def _block(
        self,
        probabilities: Float[Tensor, "rows vocab"],
        log_path: Float[Tensor, " rows"],
        positions: Sequence[Position],
        m: int,
    ) -> tuple[Tensor, ...]:
        n, width = len(positions), len(self._pair.student.of_id)
        # One column more than the vocabulary, for entries whose first student token is unknown.
        closed = probabilities.new_zeros((n, width + 1))
        open_ = torch.zeros_like(closed)
        end, nobody = probabilities.new_zeros(n), probabilities.new_zeros(n)
        for skip in (-1, 0):
            here = [at for at, position in enumerate(positions) if position.skip == skip]
            if not here:
                continue
            rows = probabilities[[positions[at].row for at in here]]
            mass = rows[:, self._order]
            entries = self._start[self._order] + skip
            first, is_open = self._first[entries], self._open[entries]
            for target, use in ((closed, ~is_open), (open_, is_open)):
                target[here] = target[here].index_add(1, first[use], mass[:, use])
            end[here] = rows[:, self._ends].sum(-1)
            nobody[here] = (1 - mass.sum(-1) - end[here]).clamp_min(0)
        for at, position in enumerate(positions):
            if position.before is None and position.skip > 0:  # behind the teacher's lead
                end[at] = probabilities[position.row, self._ends].sum()
        unlisted = self._straddle(probabilities, log_path, positions, closed, open_)
        both = closed + open_
        total = both.sum(-1)
        both = both[:, :-1]
        sampled = torch.tensor([position.token for position in positions], device=both.device)
        ranked = both.scatter(1, sampled[:, None], torch.inf)
        ids = ranked.topk(m, dim=-1).indices
        bound = self._off_path(probabilities, log_path, positions)
        listed = closed.gather(1, ids), open_.gather(1, ids)
        return ids, *listed, total, end, nobody, bound, unlisted

    def _straddle(
        self,
        probabilities: Float[Tensor, "rows vocab"],
        log_path: Float[Tensor, " rows"],
        positions: Sequence[Position],
        closed: Float[Tensor, "n width"],
        open_: Float[Tensor, "n width"],
    ) -> Float[Tensor, " n"]:
        """Add the mass of teacher tokens across each position; return what rows do not list."""
        missing = (1 - probabilities.sum(-1)).clamp_min(0)
        unlisted = probabilities.new_zeros(len(positions))
        for at, position in enumerate(positions):
            for part in position.straddling:
                ids = self._order[part.tokens]
                share = (log_path[part.row] - log_path[position.row]).exp()
                if part.row == position.row:
                    unlisted[at] += missing[part.row] * share
                mass = (probabilities[part.row, ids].double() * share).to(closed.dtype)
                entries = self._start[ids] + part.skip
                first, is_open = self._first[entries], self._open[entries]
                for target, use in ((closed, ~is_open), (open_, is_open)):
                    target[at].index_add_(0, first[use], mass[use])
        return unlisted

    def _off_path(
        self,
        probabilities: Float[Tensor, "rows vocab"],
        log_path: Float[Tensor, " rows"],
        positions: Sequence[Position],
    ) -> Float[Tensor, " n"]:
        bound = probabilities.new_zeros(len(positions))
        for at, position in enumerate(positions):
            for row, ids in position.off_path:
                share = (log_path[row] - log_path[position.row]).exp()
                bound[at] += share * probabilities[row, list(ids)].sum().double()
        return bound
