"""The passes over the vocabulary, forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_composer.divergences import MAX_LOG_MASS
from prime_composer.lm_head import columns_in_chunk
from prime_composer.two_heads.blocks import (
    Buffer,
    GradientSums,
    Plan,
    Running,
    Side,
    Teachers,
    centered_in_place,
)
from prime_composer.two_heads.divergence import Divergence, ForwardKL, ReverseKL, term_gradients
from prime_composer.two_heads.top_mass import LogProbs, top_gap

LOG_BUCKET_FLOOR = math.log(-MAX_LOG_MASS)
"""Least log-mass of the bucket of padding ids, that of the tail bucket in ``divergences``."""


class _Rows(NamedTuple):
    """What the backward needs per row, [n] each, in float64. The logsumexp of z is highest + log.

    ``slope`` is a sum of slopes over all outcomes, ``bucket_slope`` the bucket's own.
    """

    p_highest: Tensor
    p_log: Tensor
    q_highest: Tensor
    q_log: Tensor
    target_highest: Tensor
    target_log: Tensor
    log_p_bucket: Tensor
    log_q_bucket: Tensor
    reverse_slope: Tensor
    reverse_bucket_slope: Tensor
    forward_slope: Tensor
    forward_bucket_slope: Tensor
    slope: Tensor
    bucket_slope: Tensor


class _Sums:
    """Terms and slopes of a divergence, [n] each in float64, of the ids and of the bucket."""

    def __init__(self, value: Tensor, slope: Tensor):
        self.value, self.slope, self.bucket_slope = value, slope, torch.zeros_like(slope)

    def add_bucket(
        self,
        divergence: Divergence,
        log_p: Tensor,
        log_q: Tensor,
        floored: Tensor,
        parameters: Sequence[Tensor] = (),
    ) -> None:
        """Add the bucket, as one more id. A log-mass at the floor has no slope."""
        columns = [x.double().unsqueeze(1).clone() for x in (log_p, log_q, *parameters)]
        value, slope = divergence.sums(*columns)
        self.bucket_slope = torch.where(floored, 0.0, slope)
        self.value, self.slope = self.value + value, self.slope + self.bucket_slope


class CompareHeads(torch.autograd.Function):
    """``compare.compare`` without mask: its results, then the gradients of the student."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of ``Comparison``, with log-probs of no id where none was asked for."""
        student = Side(replace(plan.heads.student, hidden=hidden, weight=weight, bias=bias), plan)
        with torch.autocast(hidden.device.type, enabled=False):
            results, rows = _forward(plan, student, Teachers(plan), parameters)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *parameters, *rows)
        ctx.mark_non_differentiable(*(results[i] for i in (2, 5, 6) if results[i] is not None))
        return results

    # The decorator's stub makes ``ctx`` positional.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight, bias and parameters."""
        plan = ctx.plan
        hidden, weight, bias, *rest = ctx.saved_tensors
        parameters, rows = rest[: -len(_Rows._fields)], _Rows(*rest[-len(_Rows._fields) :])
        student = Side(replace(plan.heads.student, hidden=hidden, weight=weight, bias=bias), plan)
        reverse, forward, _, value, selected, _, _ = grads
        with torch.autocast(hidden.device.type, enabled=False):
            return None, *_backward(
                plan,
                student,
                Teachers(plan),
                parameters,
                rows,
                (reverse, forward, value, selected),
                ctx.needs_input_grad[1:],
            )


def _forward(
    plan: Plan, student: Side, teachers: Teachers, parameters: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], _Rows]:
    """Return the results, and what the backward needs of each row."""
    sums = _FirstPass(plan, student, teachers)
    outcomes = _Outcomes(plan, student, teachers, sums)
    zeros = torch.zeros_like(outcomes.log_p_all)
    reverse = _reverse(sums, outcomes) if plan.reverse else _Sums(zeros, zeros)
    forward, entropy, log_target_all = _Sums(zeros, zeros), zeros, outcomes.log_q_all
    if plan.forward:
        forward, entropy, log_target_all = _forward_to_target(plan, sums, outcomes)
    p_log, q_log = outcomes.log_p_all - sums.p.highest, outcomes.log_q_all - sums.q.highest
    generic = _Sums(zeros, zeros)
    log_probs = LogProbs(plan, student, teachers, (sums.p.highest, p_log), (sums.q.highest, q_log))
    if plan.divergence is not None:
        generic = _Sums(torch.zeros_like(zeros), torch.zeros_like(zeros))
        columns = [plan.column(x) for x in parameters]
        for rows, log_p, log_q in log_probs.of_both():
            value, slope = plan.divergence.sums(log_p, log_q, *(x[rows] for x in columns))
            generic.value[rows] += value
            generic.slope[rows] += slope
        if outcomes.bucket is not None:
            generic.add_bucket(plan.divergence, *outcomes.bucket, parameters)
    share = None
    if plan.top_mass is not None:
        bucket = None if outcomes.bucket is None else outcomes.bucket[:2]
        share = top_gap(log_probs, plan.top_mass, bucket).to(plan.dtype)
    results = (
        reverse.value.to(plan.dtype) if plan.reverse else None,
        forward.value.to(plan.dtype) if plan.forward else None,
        entropy.to(plan.dtype) if plan.forward else None,
        generic.value.to(plan.dtype) if plan.divergence is not None else None,
        # One by one: at large logits the sum of maximum and log would round.
        sums.selected_p - plan.column(sums.p.highest) - plan.column(p_log),
        sums.selected_q - plan.column(sums.q.highest) - plan.column(q_log),
        share,
    )
    log_p_bucket, log_q_bucket, _ = outcomes.bucket or (zeros, zeros, zeros)
    return results, _Rows(
        sums.p.highest,
        p_log,
        sums.q.highest,
        q_log,
        sums.target.highest,
        log_target_all - sums.target.highest,
        log_p_bucket,
        log_q_bucket,
        reverse.slope,
        reverse.bucket_slope,
        forward.slope,
        forward.bucket_slope,
        generic.slope,
        generic.bucket_slope,
    )


class _FirstPass:
    """Sums over the ids that every head has.

    Attributes:
        p: of exp(a), and times a - b if the reverse KL is asked for.
        q: of exp(b), and times a - b and b if it is the target of the forward KL.
        target: of exp(c), and times a - b and c, for TAID. Otherwise this is q.
        selected_p: the student's logits at ``token_ids``, [n, m].
        selected_q: the teacher's.
    """

    def __init__(self, plan: Plan, student: Side, teachers: Teachers):
        t, own = plan.interpolation, plan.forward and plan.interpolation is None
        self.p, self.q = Running(plan, 1 + plan.reverse), Running(plan, 3 if own else 1)
        self.target = self.q if t is None else Running(plan, 3)
        self.selected_p, self.selected_q = (
            student.hidden.new_zeros(plan.token_ids.shape, dtype=plan.dtype) for _ in "pq"
        )
        differences, targets = Buffer(plan), Buffer(plan)
        for start, stop in plan.chunks(0, plan.common):
            chunk, teacher_chunks = student.chunk(start, stop), teachers.chunks(start, stop)
            for rows in plan.row_blocks():
                a = student.logits(rows, chunk, start)
                b = teachers.logits(rows, teacher_chunks, start)
                self.select(plan.token_ids, rows, start, a, b)
                # Differences of logits below their maxima: an offset between both would round.
                a_highest, b_highest = centered_in_place(a), centered_in_place(b)
                shift = a_highest - b_highest
                ratio = torch.sub(a, b, out=differences.like(a)), shift
                if t is not None:
                    share = plan.column(t[rows])
                    c = torch.addcmul(a, ratio[0], share, value=-1, out=targets.like(a))
                    c_highest = centered_in_place(c) + a_highest - t[rows].double() * shift
                    self.target.add(rows, c_highest, c, ratio, own=True)
                self.p.add(rows, a_highest, a, ratio if plan.reverse else None)
                self.q.add(rows, b_highest, b, ratio if own else None, own)

    def select(self, ids: Tensor, rows: slice, start: int, a: Tensor, b: Tensor) -> None:
        """Keep the logits of the chosen ids that are in a chunk."""
        if ids.shape[1]:
            inside, column = columns_in_chunk(ids[rows], start, a.shape[1])
            for selected, logits in ((self.selected_p, a), (self.selected_q, b)):
                selected[rows] = torch.where(inside, logits.gather(1, column), selected[rows])


class _Outcomes:
    """What p and q are normalized over: the common ids, and the bucket of all others.

    Attributes:
        log_p_all: logsumexp of the student's logits over its whole head, [n].
        log_q_all: the teacher's.
        p_mass: the student's mass on the common ids, [n].
        q_mass: the teacher's.
        bucket: log-masses of the student's and the teacher's bucket, and whether the student's is
            at the floor. None where all heads have one size.
    """

    def __init__(self, plan: Plan, student: Side, teachers: Teachers, sums: _FirstPass):
        log_p_ids, log_q_ids = sums.p.log_sum(), sums.q.log_sum()
        self.log_p_all, self.log_q_all = log_p_ids, log_q_ids
        self.p_mass = self.q_mass = torch.ones_like(log_p_ids)
        self.bucket: tuple[Tensor, Tensor, Tensor] | None = None
        if plan.has_bucket:
            log_p_beyond = student.sums(plan.common, student.size).log_sum()
            log_q_beyond = teachers.log_bucket()
            self.log_p_all = torch.logaddexp(log_p_ids, log_p_beyond)
            self.log_q_all = torch.logaddexp(log_q_ids, log_q_beyond)
            self.p_mass = (log_p_ids - self.log_p_all).exp()
            self.q_mass = (log_q_ids - self.log_q_all).exp()
            log_p, log_q = log_p_beyond - self.log_p_all, log_q_beyond - self.log_q_all
            self.bucket = (
                log_p.clamp(min=LOG_BUCKET_FLOOR),
                log_q.clamp(min=LOG_BUCKET_FLOOR),
                log_p < LOG_BUCKET_FLOOR,
            )


def _reverse(sums: _FirstPass, outcomes: _Outcomes) -> _Sums:
    """Return KL(p || q) as ``ReverseKL`` has it, from the first pass."""
    log_ratio = sums.p.mean(1) - (outcomes.log_p_all - outcomes.log_q_all)
    slope = outcomes.p_mass * log_ratio
    result = _Sums(slope - outcomes.p_mass + outcomes.q_mass, slope)
    if outcomes.bucket is not None:
        result.add_bucket(ReverseKL(), *outcomes.bucket)
    return result


def _forward_to_target(
    plan: Plan, sums: _FirstPass, outcomes: _Outcomes
) -> tuple[_Sums, Tensor, Tensor]:
    """Return KL(r || p) as ``ForwardKL`` has it, the entropy of r, and the logsumexp of c.

    c - a is -(a - b) for the teacher, and -t (a - b) for TAID's target.
    """
    t, share = plan.interpolation, torch.ones_like(outcomes.q_mass)
    log_target_all, target_mass = outcomes.log_q_all, outcomes.q_mass
    bucket = outcomes.bucket
    if t is not None:
        share = t.double()
        log_ids = log_target_all = sums.target.log_sum()
        if bucket is not None:
            log_p, log_q, floored = bucket
            # In the scale of c, which is that of a and b mixed.
            beyond = torch.lerp(log_p + outcomes.log_p_all, log_q + outcomes.log_q_all, share)
            log_target_all = torch.logaddexp(log_ids, beyond)
            bucket = log_p, beyond - log_target_all, floored
        target_mass = (log_ids - log_target_all).exp()
    log_ratio = -share * sums.target.mean(1) - (log_target_all - outcomes.log_p_all)
    slope = outcomes.p_mass - target_mass
    result = _Sums(target_mass * log_ratio + slope, slope)
    entropy = target_mass * (log_target_all - sums.target.mean(2))
    if bucket is not None:
        result.add_bucket(ForwardKL(), *bucket)
        entropy = entropy - bucket[1].exp() * bucket[1]
    return result, entropy, log_target_all


def _backward(
    plan: Plan,
    student: Side,
    teachers: Teachers,
    parameters: Sequence[Tensor],
    row: _Rows,
    grads: tuple[Tensor | None, ...],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight, bias and parameters.

    Per row, with g the gradient of a result and s the sum of its slopes, that of logit v is

        p_v (g_reverse (log p_v/q_v - s_reverse) + level) - g_forward r_v + g f'_v + g_selected,v
        level = g_forward (1 - s_forward) - g s - sum g_selected

    and for an id beyond the smallest head p_v (sum of the g of the bucket's slopes / p_bucket -
    sum of the g s - sum g_selected).
    """
    t = plan.interpolation
    reverse, forward, value, selected = (None if g is None else g.double() for g in grads)
    level, beyond = torch.zeros_like(row.p_log), torch.zeros_like(row.p_log)
    for g, slope, bucket_slope in (
        (reverse, row.reverse_slope, row.reverse_bucket_slope),
        (forward, row.forward_slope, row.forward_bucket_slope),
        (value, row.slope, row.bucket_slope),
    ):
        if g is not None:
            beyond += g * (bucket_slope / row.log_p_bucket.exp() - slope)
    if forward is not None:
        level += forward * (1 - row.forward_slope)
    if value is not None:
        level -= value * row.slope
    if selected is not None:
        level -= selected.sum(1)
        beyond -= selected.sum(1)
    # What the differences of centered logits lack.
    offset = row.p_log - row.q_log + row.reverse_slope
    target_offset = row.target_highest - row.p_highest
    if t is not None:
        target_offset = target_offset + t.double() * (row.p_highest - row.q_highest)
    # exp(a - highest) is p times a total per row, which the factors of p take in.
    total = row.p_log.exp()
    zeros = torch.zeros_like(total)
    columns = [
        row.p_highest,
        row.q_highest,
        offset,
        target_offset,
        (zeros if reverse is None else reverse) / total,
        (zeros if forward is None else forward) / row.target_log.exp(),
        level / total,
        zeros if t is None else t,
        row.p_log,
        beyond,
    ]
    (
        p_highest,
        q_highest,
        offset,
        target_offset,
        reverse_factor,
        forward_factor,
        level,
        share,
        p_log,
        beyond,
    ) = (plan.column(x) for x in columns)
    has_level = not (forward is None and value is None and selected is None)
    generic = None if value is None else _Slopes(plan, row, parameters, value, any(needs[3:]))
    differences, targets = Buffer(plan), Buffer(plan)
    sums = GradientSums(plan, student, needs)
    for start, stop in plan.chunks(0, plan.common):
        chunk, teacher_chunks = student.chunk(start, stop), teachers.chunks(start, stop)
        sums.begin(start, stop)
        for rows in plan.row_blocks():
            a, cap_slope = student.logits_and_slope(rows, chunk, start)
            b = teachers.logits(rows, teacher_chunks, start)
            a -= p_highest[rows]
            b -= q_highest[rows]
            difference = torch.sub(a, b, out=differences.like(a))
            terms = None if generic is None else generic(rows, a, b)
            target = b
            if forward is not None:
                if t is not None:
                    target = torch.addcmul(
                        a, difference, share[rows], value=-1, out=targets.like(a)
                    ).sub_(target_offset[rows])
                target.exp_()
            a.exp_()
            if reverse is None:
                grad = a.mul_(level[rows])
            else:
                grad = difference.sub_(offset[rows]).mul_(reverse_factor[rows])
                if has_level:
                    grad.add_(level[rows])
                grad.mul_(a)
            if forward is not None:
                grad.addcmul_(target, forward_factor[rows], value=-1)
            if terms is not None:
                grad.add_(terms)
            if selected is not None:
                inside, places = columns_in_chunk(plan.token_ids[rows], start, stop - start)
                grad.scatter_add_(1, places, torch.where(inside, selected[rows], 0.0).to(grad))
            sums.add(rows, grad, chunk, cap_slope)
        sums.end()
    for start, stop in plan.chunks(plan.common, student.size):
        chunk = student.chunk(start, stop)
        sums.begin(start, stop)
        for rows in plan.row_blocks():
            a, cap_slope = student.logits_and_slope(rows, chunk, start)
            # The maximum is that of the common ids, far above which exp would overflow.
            a.sub_(p_highest[rows]).sub_(p_log[rows]).exp_().mul_(beyond[rows])
            sums.add(rows, a, chunk, cap_slope)
        sums.end()
    grad_parameters = generic.parameter_grads() if generic is not None else []
    return *sums.results(), *(
        grad_parameters[i].to(x.dtype) if needs[3 + i] else None for i, x in enumerate(parameters)
    )


class _Slopes:
    """g f' of a divergence, block by block, and the gradients of its parameters."""

    def __init__(
        self,
        plan: Plan,
        row: _Rows,
        parameters: Sequence[Tensor],
        grad: Tensor,
        has_parameter_grads: bool,
    ):
        assert plan.divergence is not None
        self.plan, self.divergence, self.row = plan, plan.divergence, row
        self.grad, self.p_log, self.q_log, *self.parameters = (
            plan.column(x) for x in (grad, row.p_log, row.q_log, *parameters)
        )
        self.sums: list[Tensor] = []
        if has_parameter_grads:
            self.sums = [torch.zeros_like(x, dtype=torch.float64) for x in self.parameters]
        self.log_p, self.log_q = Buffer(plan), Buffer(plan)

    def __call__(self, rows: slice, a: Tensor, b: Tensor) -> Tensor:
        """Return g f' of a block of centered logits."""
        log_p = torch.sub(a, self.p_log[rows], out=self.log_p.like(a))
        log_q = torch.sub(b, self.q_log[rows], out=self.log_q.like(a))
        parameters, grad = [x[rows] for x in self.parameters], self.grad[rows]
        if not self.sums:
            return self.divergence.slopes(log_p, log_q, *parameters).mul_(grad)
        slopes, *parts = term_gradients(
            self.divergence, log_p, log_q, parameters, grad.expand_as(log_p)
        )
        for total, part in zip(self.sums, parts, strict=True):
            total[rows] += part
        return slopes

    def parameter_grads(self) -> list[Tensor]:
        """Return the gradients of the parameters, [n] each, with those of the bucket."""
        totals = self.sums
        if totals and self.plan.has_bucket:
            log_p, log_q = (x.unsqueeze(1) for x in (self.row.log_p_bucket, self.row.log_q_bucket))
            parameters = [x.double() for x in self.parameters]
            _, *parts = term_gradients(
                self.divergence, log_p, log_q, parameters, self.grad.double()
            )
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return [total.squeeze(1) for total in totals]
