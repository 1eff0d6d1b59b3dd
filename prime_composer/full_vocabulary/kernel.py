"""Both KLs and TAID's target in one pass over the vocabulary, and their gradient in a second one.

With A and B the logsumexp of a student's logits a and a teacher's b, and the target r over c = b
for a KL, c = (1 - t) a + t b for TAID (where r has no gradient),

    KL(p || q) = E_p[a - b] - (A - B)    gradient p_v (log p_v - log q_v - KL(p || q))
    KL(r || p) = E_r[c - a] - (C - A)    gradient p_v - r_v

``_Sums`` has these expectations and logsumexps over the ids that every head has, with a gradient.
What follows from them, the bucket of all other ids included, is arithmetic on tensors [n].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_composer.contract import TwoHeads
from prime_composer.full_vocabulary.blocks import (
    BLOCKS,
    LOG_BUCKET_FLOOR,
    Buffer,
    GradientSums,
    Plan,
    Running,
    Side,
    centered_in_place,
)
from prime_composer.lm_head import of_device


class KLs(NamedTuple):
    """Both KLs per row, in nats. What was not asked for is None."""

    reverse: Tensor | None  # KL(p || q), [n]
    forward: Tensor | None  # KL(r || p), [n], where r is the teacher q, or TAID's target
    target_entropy: Tensor | None  # entropy of r, [n], without a gradient. Comes with ``forward``.


def kls(
    heads: TwoHeads, reverse: bool = False, forward: bool = False, interpolation: float = 1.0
) -> KLs:
    """Return KLs of a student and one teacher, all of whose rows count."""
    student = heads.student
    plan = Plan(heads, *of_device(BLOCKS, student.hidden.device))
    asked = _Asked(reverse, forward, None if interpolation == 1 else interpolation)
    sums = _Sums(*_SumsOfHeads.apply(plan, asked, student.hidden, student.weight, student.bias))
    p = _Outcomes(sums.log_p, sums.log_p_beyond)
    q = _Outcomes(sums.log_q, sums.log_q_beyond)
    reverse_kl = None if sums.p_ratio is None else _kl(p, q, sums.p_ratio)
    if sums.r_ratio is None or sums.log_r is None or sums.r_mean is None:
        return KLs(_cast(reverse_kl, plan), None, None)
    r = q
    if asked.t is not None:
        beyond = None
        if p.log_bucket is not None and q.log_bucket is not None:
            # In the scale of c, which is that of a and b mixed.
            beyond = torch.lerp(
                (p.log_bucket + p.log_all).detach(), q.log_bucket + q.log_all, asked.t
            )
        r = _Outcomes(sums.log_r, beyond, floored=False)
    # The value of E_r[c - a] is -t E_r[a - b], and its gradient that of -E_r[a].
    ratio = sums.r_ratio.detach() * (1 - interpolation) - sums.r_ratio
    forward_kl = _kl(r, p, ratio)
    entropy = r.mass * (r.log_all - sums.r_mean)
    if r.log_bucket is not None:
        entropy = entropy - r.log_bucket.exp() * r.log_bucket
    return KLs(*(_cast(x, plan) for x in (reverse_kl, forward_kl, entropy)))


def _cast(values: Tensor | None, plan: Plan) -> Tensor | None:
    return None if values is None else values.to(plan.dtype)


class _Outcomes:
    """What a distribution is normalized over: the common ids, and the bucket of all others.

    All are [n]: ``log_all`` the logsumexp of the logits over the whole head, ``mass`` on the common
    ids, ``log_bucket`` the bucket's log-mass, None where all heads have one size.
    """

    def __init__(self, log_ids: Tensor, log_beyond: Tensor | None, floored: bool = True):
        self.log_all, self.mass = log_ids, torch.ones_like(log_ids)
        self.log_bucket: Tensor | None = None
        if log_beyond is not None:
            self.log_all = torch.logaddexp(log_ids, log_beyond)
            self.mass = (log_ids - self.log_all).exp()
            log_bucket = log_beyond - self.log_all
            # A log-mass at the floor has no gradient.
            self.log_bucket = log_bucket.clamp(min=LOG_BUCKET_FLOOR) if floored else log_bucket


def _kl(a: _Outcomes, b: _Outcomes, mean_ratio: Tensor) -> Tensor:
    """Return KL(a || b) as sum a log a/b - a + b, which forgives rounding at a = b."""
    value = a.mass * (mean_ratio - (a.log_all - b.log_all)) - a.mass + b.mass
    if a.log_bucket is not None and b.log_bucket is not None:
        log_a, log_b = a.log_bucket, b.log_bucket
        value = value + log_a.exp() * (log_a - log_b) - log_a.exp() + log_b.exp()
    return value


class _Asked(NamedTuple):
    """What ``_SumsOfHeads`` computes. ``t`` is None where the target is the teacher."""

    reverse: bool
    forward: bool
    t: float | None


class _Sums(NamedTuple):
    """Sums over the ids that every head has, [n] in float64. The first four have a gradient."""

    log_p: Tensor  # logsumexp of a
    log_p_beyond: Tensor | None  # that over the student's other ids. None without a bucket.
    p_ratio: Tensor | None  # E_p[a - b]. None without the reverse KL.
    # E_r[a - b], whose gradient is that of E_r[a]. None without the forward KL.
    r_ratio: Tensor | None
    log_q: Tensor  # logsumexp of b
    log_q_beyond: Tensor | None  # that over the teacher's other ids. None without a bucket.
    log_r: Tensor | None  # logsumexp of c. None without the forward KL, and so is the next.
    r_mean: Tensor | None  # E_r[c]


class _SumsOfHeads(torch.autograd.Function):
    """``_Sums`` of two heads, then the gradients of the student."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, asked: _Asked, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            student, teacher = (
                plan.student(hidden, weight, bias),
                Side(plan.heads.teachers[0], plan),
            )
            p, q, r = _first_pass(plan, asked, student, teacher)
            bucket: Sequence[Tensor | None] = (None, None)
            if plan.has_bucket:
                bucket = tuple(side.log_sum(plan.common) for side in (student, teacher))
        sums = _Sums(
            log_p=p.log_sum(),
            log_p_beyond=bucket[0],
            p_ratio=p.mean(1) if asked.reverse else None,
            r_ratio=r.mean(1) if asked.forward else None,
            log_q=q.log_sum(),
            log_q_beyond=bucket[1],
            log_r=r.log_sum() if asked.forward else None,
            r_mean=r.mean(2) if asked.forward else None,
        )
        ctx.plan, ctx.asked = plan, asked
        ctx.set_materialize_grads(False)
        highest = p.highest, q.highest, r.highest
        ctx.save_for_backward(hidden, weight, bias, *highest, *sums)
        ctx.mark_non_differentiable(*(x for x in sums[4:] if x is not None))
        return sums

    # The decorator's stub makes ``ctx`` positional.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, *rows = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            plan, student = ctx.plan, ctx.plan.student(hidden, weight, bias)
            total = GradientSums(plan, student, ctx.needs_input_grad[2:], weight.dtype)
            _second_pass(plan, ctx.asked, student, rows[:3], _Sums(*rows[3:]), grads, total)
            return None, None, *total.results()


def _first_pass(
    plan: Plan, asked: _Asked, student: Side, teacher: Side
) -> tuple[Running, Running, Running]:
    """Return the sums of exp(a), exp(b) and exp(c) over the common ids, and their factors'."""
    t, own = asked.t, asked.forward and asked.t is None
    p, q = Running(plan, 1 + asked.reverse), Running(plan, 3 if own else 1)
    r = q if t is None else Running(plan, 3)
    differences, targets = Buffer(plan), Buffer(plan)
    for start, stop in plan.chunks(0, plan.common):
        chunk, teacher_chunk = student.chunk(start, stop), teacher.chunk(start, stop)
        for rows in plan.row_blocks():
            a, _ = student.logits(rows, chunk, start)
            b, _ = teacher.logits(rows, teacher_chunk, start)
            # Differences of logits below their maxima: an offset between both would round.
            a_highest, b_highest = centered_in_place(a), centered_in_place(b)
            shift = a_highest - b_highest
            ratio = torch.sub(a, b, out=differences.block(*a.shape)), shift
            if t is not None:
                c = torch.add(a, ratio[0], alpha=-t, out=targets.block(*a.shape))
                c_highest = centered_in_place(c) + a_highest - t * shift
                r.add(rows, c_highest, c, ratio, own=True)
            p.add(rows, a_highest, a, ratio if asked.reverse else None)
            q.add(rows, b_highest, b, ratio if own else None, own)
    return p, q, r


def _second_pass(
    plan: Plan,
    asked: _Asked,
    student: Side,
    highest: Sequence[Tensor],
    sums: _Sums,
    grads: Sequence[Tensor | None],
    total: GradientSums,
) -> None:
    """Add up the gradients of hidden states, weight and bias.

    Per row, with g the gradient of a sum, that of logit a_v is

        p_v (g_p_ratio (a_v - b_v - E_p[a - b]) + g_p_ratio + g_log_p) + g_r_ratio r_v

    and for an id beyond the smallest head g_log_p_beyond times its share there. The second and
    third term cancel in a KL, exactly. ``highest`` are the highest logits of student, teacher and
    target, [n] each.
    """
    zeros = torch.zeros_like(sums.log_p)
    of_log_p, of_beyond, of_p, of_r = (zeros if g is None else g.double() for g in grads[:4])
    p_highest, q_highest, r_highest = highest
    # exp(a - highest) is p times a total per row, which the factors of p take in.
    p_total = (sums.log_p - p_highest).exp()
    # What the differences of centered logits lack.
    p_ratio = zeros if sums.p_ratio is None else sums.p_ratio
    offset = p_ratio - (p_highest - q_highest)
    t = 1.0 if asked.t is None else asked.t
    r_offset = r_highest - p_highest + t * (p_highest - q_highest)
    log_r = zeros if sums.log_r is None else sums.log_r
    beyond = zeros if sums.log_p_beyond is None else sums.log_p_beyond
    columns = (
        p_highest,
        q_highest,
        offset,
        r_offset,
        of_p / p_total,
        (of_p + of_log_p) / p_total,
        of_r / (log_r - r_highest).exp(),
    )
    p_highest, q_highest, offset, r_offset, p_factor, level, r_factor = map(plan.column, columns)
    differences, targets = Buffer(plan), Buffer(plan)
    teacher = Side(plan.heads.teachers[0], plan)
    for start, stop, chunk in total.chunks(0, plan.common):
        teacher_chunk = teacher.chunk(start, stop)
        for rows in plan.row_blocks():
            a, cap_slope = student.logits(rows, chunk, start)
            b, _ = teacher.logits(rows, teacher_chunk, start)
            a -= p_highest[rows]
            b -= q_highest[rows]
            difference = torch.sub(a, b, out=differences.block(*a.shape))
            target = b
            if asked.t is not None:
                target = torch.add(a, difference, alpha=-t, out=targets.block(*a.shape))
                target -= r_offset[rows]
            a.exp_()
            if asked.reverse:
                difference.sub_(offset[rows]).mul_(p_factor[rows])
                if asked.forward or plan.has_bucket:
                    difference.add_(level[rows])
                grad = difference.mul_(a)
            else:
                grad = a.mul_(level[rows])
            if asked.forward:
                grad.addcmul_(target.exp_(), r_factor[rows])
            total.add(rows, grad, chunk, cap_slope)
    for start, _, chunk in total.chunks(plan.common, student.size):
        for rows in plan.row_blocks():
            a, cap_slope = student.logits(rows, chunk, start)
            a.sub_(plan.column(beyond)[rows]).exp_().mul_(plan.column(of_beyond)[rows])
            total.add(rows, a, chunk, cap_slope)
