"""Any divergence over the whole vocabulary: token block by token block, with recomputation.

Forward and backward both make the distributions of a block of tokens, [block, V]: six matrix
products. The head's gradient is added up in place.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_composer.contract import IN_TAIL, TwoHeads
from prime_composer.full_vocabulary.blocks import LOG_BUCKET_FLOOR, GradientSums, Plan, Side
from prime_composer.fused import fused
from prime_composer.lm_head import of_device

LOGITS = {"cpu": 10 * 2**20, "cuda": 2**27}  # Most of one side in a block, per device type

TOKENS = {"cpu": 256, "cuda": 1024}  # Most tokens of a block, per device type

CHUNK = {"cpu": 1024, "cuda": 2**18}  # Vocabulary entries of a matrix product, likewise

CACHED = {"cpu": 2**18, "cuda": 2**27}  # Log-probs at a time. On a CPU they fit the cache

Divergence = Callable[[slice, Tensor, Tensor], Tensor]  # Of rows, log p and log q [rows, outcomes]


def by_token_blocks(heads: TwoHeads, divergence: Divergence) -> Tensor:
    """Return a divergence of two heads per row, [n, ...]. All rows of the heads count."""
    student = heads.student
    if heads.merged:
        divergence = _of_merged(divergence, heads.merged)
    plan = blocks_of(heads)
    values: Tensor = _ByTokenBlocks.apply(
        plan, divergence, student.hidden, student.weight, student.bias
    )
    return values


def _of_merged(divergence: Divergence, ids: Sequence[int]) -> Divergence:
    """Return a divergence to which some ids are one outcome, at the place of the first."""

    def merged(log_probs: Tensor) -> Tensor:
        index = torch.tensor(ids, device=log_probs.device)
        whole = log_probs[:, index].logsumexp(1, keepdim=True)
        rest = torch.full_like(log_probs[:, : len(ids) - 1], IN_TAIL)
        return log_probs.index_copy(1, index, torch.cat([whole, rest], 1))

    return lambda rows, log_p, log_q: divergence(rows, merged(log_p), merged(log_q))


def blocks_of(heads: TwoHeads) -> Plan:
    """Return blocks of whole rows. A matrix product takes 16 tokens at once, if as many fit."""
    device = heads.student.hidden.device
    fit = max(1, of_device(LOGITS, device) // max(side.size for side in heads.sides))
    tokens = min(of_device(TOKENS, device), fit // 16 * 16 or fit)
    return Plan(heads, tokens, of_device(CHUNK, device))


class _ByTokenBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        divergence: Divergence,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        values = []
        with torch.autocast(hidden.device.type, enabled=False):
            student, teachers = plan.student(hidden, weight, bias), _TeacherRows(plan)
            # Without a row, the divergence of none has the shape of the result.
            for block in list(plan.row_blocks()) or [slice(0, 0)]:
                logits, _ = student.whole_rows(block)
                log_q = teachers.log_probs(block)
                for rows, own in parts(block, logits):
                    log_p = logits[own]
                    normalize_in_place(log_p)
                    value = divergence(rows, _floored(plan, _outcomes(plan, log_p)), log_q[own])
                    # A view of the block would be overwritten.
                    values.append(value.clone())
        ctx.plan, ctx.divergence = plan, divergence
        ctx.save_for_backward(hidden, weight, bias)
        return torch.cat(values)

    # The decorator's stub makes ``ctx`` positional.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        hidden, weight, bias = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            student, teachers = plan.student(hidden, weight, bias), _TeacherRows(plan)
            total = GradientSums(plan, student, ctx.needs_input_grad[2:], plan.dtype)
            for block in plan.row_blocks():
                logits, cap_slope = student.whole_rows(block)
                log_q = teachers.log_probs(block)
                for rows, own in parts(block, logits):
                    log_p = logits[own]
                    normalize_in_place(log_p)
                    _, of_log_p = value_and_gradient(
                        plan, ctx.divergence, rows, log_p, log_q[own], grad[rows]
                    )
                    _of_logits_in_place(log_p, of_log_p)
                for start, stop, chunk in total.chunks(0, student.size):
                    slope = None if cap_slope is None else cap_slope[:, start:stop]
                    total.add(block, logits[:, start:stop], chunk, slope)
            return None, None, *total.results()


class _TeacherRows:
    """Log q of one teacher, or of a mixture of several, over the outcomes that are compared."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.sides = [Side(teacher, plan) for teacher in plan.heads.teachers]

    def log_probs(self, rows: slice) -> Tensor:
        """Return log q, [rows, V]. The next rows overwrite it."""
        log_qs = []
        for side in self.sides:
            logits, _ = side.whole_rows(rows)
            for _, own in parts(rows, logits):
                normalize_in_place(logits[own])
            log_qs.append(_outcomes(self.plan, logits))
        weights = self.plan.heads.teacher_weights
        if weights is not None:
            for i, log_q in enumerate(log_qs):
                log_q += self.plan.column(weights[rows, i].log())
                if i:
                    torch.logaddexp(log_qs[0], log_q, out=log_qs[0])
        return _floored(self.plan, log_qs[0])


def parts(block: slice, logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each part of a block that fits the cache, and its place in the block."""
    count = max(1, of_device(CACHED, logits.device) // logits.shape[1])
    for first in range(block.start, max(block.stop, block.start + 1), count):
        last = min(first + count, block.stop)
        yield slice(first, last), slice(first - block.start, last - block.start)


@fused
def normalize_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract a maximum and a logarithm per row, and return them: their sum would round."""
    highest = logits.amax(1, keepdim=True)
    logits -= highest
    log_sum = logits.exp().sum(1, keepdim=True).log()
    logits -= log_sum
    return highest, log_sum


@fused
def _of_logits_in_place(log_p: Tensor, of_log_p: Tensor) -> None:
    """Write the gradient of the logits over log p, whose gradient is given."""
    log_p.exp_().mul_(-of_log_p.sum(1, keepdim=True)).add_(of_log_p)


def _outcomes(plan: Plan, log_probs: Tensor) -> Tensor:
    """Return the log-probs of the common ids, and of the bucket of all others if there is one."""
    if not plan.has_bucket:
        return log_probs
    ids, beyond = log_probs[:, : plan.common], log_probs[:, plan.common :]
    return torch.cat([ids, beyond.logsumexp(1, keepdim=True)], 1)


def _floored(plan: Plan, outcomes: Tensor) -> Tensor:
    """Bound the bucket's log-mass from below, where it has no gradient."""
    if not plan.has_bucket:
        return outcomes
    return torch.cat([outcomes[:, :-1], outcomes[:, -1:].clamp(min=LOG_BUCKET_FLOOR)], 1)


def value_and_gradient(
    plan: Plan,
    divergence: Divergence,
    rows: slice,
    log_p: Tensor,
    log_q: Tensor,
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a divergence, and the gradient of sum(grad * divergence) for log p, by autograd."""
    leaf = log_p.detach().requires_grad_()
    with torch.enable_grad():
        values = divergence(rows, _floored(plan, _outcomes(plan, leaf)), log_q)
    if not values.requires_grad:
        return values, torch.zeros_like(log_p)
    weights = torch.ones_like(values) if grad is None else grad
    return values.detach(), torch.autograd.grad(values, leaf, weights)[0]
