"""The teacher's most probable ids up to a mass, without the vocabulary in order.

Whether an id belongs to them depends on one number per row, the critical log q. Ids above it do,
ids below do not, and of ids with this very log q the first few do. -log q is not negative, and such
floats have the order of their bits. The critical one's bits are found from the top, eight per pass.
A pass adds up the mass of each value of the next eight, among the ids that share the bits before.
These are four products with the teacher's head in float32, eight in float64, and 2 KB per row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from prime_composer.two_heads.blocks import Plan, Side, Teachers

DIGIT = 8
"""Bits of a pass."""
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class LogProbs:
    """log p and log q, block by block, of the ids that every head has.

    Args:
        plan: of the comparison.
        student: the student's logits.
        teachers: the teacher's, or log q of a mixture.
        p: the student's highest logit and the log of the sum below it, [n] each.
        q: the teacher's.
    """

    def __init__(
        self,
        plan: Plan,
        student: Side,
        teachers: Teachers,
        p: tuple[Tensor, Tensor],
        q: tuple[Tensor, Tensor],
    ):
        self.plan, self.student, self.teachers = plan, student, teachers
        self.p, self.q = ([plan.column(x) for x in side] for side in (p, q))

    def of_teacher(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and log q of each block. The next block overwrites them."""
        for start, stop in self.plan.chunks(0, self.plan.common):
            chunks = self.teachers.chunks(start, stop)
            for rows in self.plan.row_blocks():
                yield rows, _minus(self.teachers.logits(rows, chunks, start), self.q, rows)

    def of_both(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, log p and log q of each block. The next block overwrites them."""
        for start, stop in self.plan.chunks(0, self.plan.common):
            chunk, chunks = self.student.chunk(start, stop), self.teachers.chunks(start, stop)
            for rows in self.plan.row_blocks():
                log_p = _minus(self.student.logits(rows, chunk, start), self.p, rows)
                log_q = _minus(self.teachers.logits(rows, chunks, start), self.q, rows)
                yield rows, log_p, log_q


def top_gap(log_probs: LogProbs, top_mass: float, bucket: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the share of sum |q - p| on the teacher's top ids, [n] in float64.

    1/2 where the sum is 0. As in ``divergences.adaptive_kl``: the top has the most probable ids, as
    long as their cumulated mass is at most ``top_mass``, and always the first one. Equally probable
    ids have the order of their numbers, and the bucket never belongs to the top.

    Args:
        log_probs: of student and teacher.
        top_mass: between 0 and 1.
        bucket: log-masses of the student's and the teacher's bucket, if there is one.
    """
    critical, count = _critical(log_probs, top_mass)
    in_top, total = (torch.zeros_like(count, dtype=torch.float64) for _ in range(2))
    if bucket is not None:
        total += (bucket[0].exp() - bucket[1].exp()).abs()
    seen = torch.zeros_like(count)
    for rows, log_p, log_q in log_probs.of_both():
        keys, limit = _keys(log_q), critical[rows].unsqueeze(1)
        at_limit = keys == limit
        place = at_limit.cumsum(1) + seen[rows].unsqueeze(1)
        seen[rows] = place[:, -1]
        top = (keys < limit) | (at_limit & (place <= count[rows].unsqueeze(1)))
        gaps = log_p.exp_().sub_(log_q.exp_()).abs_()
        total[rows] += gaps.sum(1).double()
        in_top[rows] += torch.where(top, gaps, 0.0).sum(1).double()
    return torch.where(total == 0, 0.5, in_top / torch.where(total == 0, 1.0, total))


def _critical(log_probs: LogProbs, top_mass: float) -> tuple[Tensor, Tensor]:
    """Return the key of the critical log q, and how many ids of this key are in the top, [n] each.

    Where all ids fit into the top, the key is above all of them.
    """
    plan = log_probs.plan
    integer = INTEGERS[plan.dtype]
    device = plan.heads.student.hidden.device
    key = torch.zeros(plan.n, dtype=integer, device=device)
    above = torch.zeros(plan.n, dtype=torch.float64, device=device)
    last = (1 << DIGIT) - 1
    for shift in range(torch.iinfo(integer).bits - DIGIT, -1, -DIGIT):
        masses = above.new_zeros(plan.n, 1 << DIGIT)
        for rows, log_q in log_probs.of_teacher():
            digits = _keys(log_q) >> shift
            # A shift by all bits of an integer is not defined.
            shared = (digits >> DIGIT) == (key[rows] >> shift >> DIGIT).unsqueeze(1)
            found = torch.where(shared, log_q.exp_(), 0.0).double()
            masses[rows].scatter_add_(1, (digits & last).long(), found)
        cumulated = masses.cumsum(1).add_(above.unsqueeze(1))
        # The first digit has no sign.
        digit = (
            (cumulated <= top_mass).sum(1).clamp(max=min(last, torch.iinfo(integer).max >> shift))
        )
        before = cumulated.gather(1, (digit - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        above = torch.where(digit > 0, before, above)
        key |= digit.to(integer) << shift
    mass = key.view(plan.dtype).neg().exp().double()
    count = torch.where(mass > 0, ((top_mass - above) / mass).floor(), 0.0).long()
    return key, torch.where(above == 0, count.clamp(min=1), count)


def _keys(log_q: Tensor) -> Tensor:
    """Return integers in the order of -log q. Rounding may put log q above 0, which is cut off."""
    depth = log_q.clamp(max=0).abs_()
    return depth.view(INTEGERS[depth.dtype])


def _minus(logits: Tensor, subtrahends: list[Tensor], rows: slice) -> Tensor:
    """Subtract one by one, in place: at large logits their sum would round."""
    for subtrahend in subtrahends:
        logits.sub_(subtrahend[rows])
    return logits
