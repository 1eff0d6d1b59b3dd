"""A divergence that is a sum over ids: values from whole rows, gradients from vocabulary blocks.

Each term depends on log p and log q of one id. Per row, with f' the sum's derivative for log p,

    dD / da_v = f'_v - p_v sum_u f'_u

The forward keeps the sum of f' and what normalizes student and teacher. The backward then needs no
whole row: its blocks are the kernel's, for four of the six matrix products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_composer.contract import TwoHeads
from prime_composer.full_vocabulary.blocks import BLOCKS, GradientSums, Plan, Side
from prime_composer.full_vocabulary.token_blocks import (
    Divergence,
    blocks_of,
    normalize_in_place,
    parts,
    value_and_gradient,
)
from prime_composer.fused import fused
from prime_composer.lm_head import of_device


def sum_over_ids(heads: TwoHeads, divergence: Divergence) -> Tensor:
    """Return a divergence per row, [n], of a student and one teacher with the same ids."""
    student = heads.student
    values: Tensor = _SumOverIds.apply(
        heads, divergence, student.hidden, student.weight, student.bias
    )
    return values


class _SumOverIds(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: TwoHeads,
        divergence: Divergence,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        plan = blocks_of(heads)
        rows_of = hidden.new_empty((6, plan.n, 1), dtype=plan.dtype)
        values, slopes, p_norms, q_norms = rows_of[0], rows_of[1], rows_of[2:4], rows_of[4:]
        with torch.autocast(hidden.device.type, enabled=False):
            student, teacher = plan.student(hidden, weight, bias), Side(heads.teachers[0], plan)
            for block in plan.row_blocks():
                a, b = student.whole_rows(block)[0], teacher.whole_rows(block)[0]
                for rows, own in parts(block, a):
                    p_norms[0, rows], p_norms[1, rows] = normalize_in_place(a[own])
                    q_norms[0, rows], q_norms[1, rows] = normalize_in_place(b[own])
                    value, slope = value_and_gradient(plan, divergence, rows, a[own], b[own])
                    values[rows, 0], slopes[rows] = value, slope.sum(1, keepdim=True)
        ctx.heads, ctx.divergence = heads, divergence
        ctx.save_for_backward(hidden, weight, bias, slopes, p_norms, q_norms)
        return values.squeeze(1)

    # The decorator's stub makes ``ctx`` positional.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, slopes, p_norms, q_norms = ctx.saved_tensors
        plan = Plan(ctx.heads, *of_device(BLOCKS, hidden.device))
        with torch.autocast(hidden.device.type, enabled=False):
            student, teacher = plan.student(hidden, weight, bias), Side(ctx.heads.teachers[0], plan)
            total = GradientSums(plan, student, ctx.needs_input_grad[2:], weight.dtype)
            slopes = slopes * grad.unsqueeze(1)
            for start, stop, chunk in total.chunks(0, plan.common):
                teacher_chunk = teacher.chunk(start, stop)
                for rows in plan.row_blocks():
                    log_p, cap_slope = student.logits(rows, chunk, start)
                    log_q, _ = teacher.logits(rows, teacher_chunk, start)
                    _normalized_in_place(log_p, *p_norms[:, rows])
                    _normalized_in_place(log_q, *q_norms[:, rows])
                    _, of_log_p = value_and_gradient(
                        plan, ctx.divergence, rows, log_p, log_q, grad[rows]
                    )
                    _of_logits_in_place(log_p, of_log_p, slopes[rows])
                    total.add(rows, log_p, chunk, cap_slope)
            return None, None, *total.results()


@fused
def _normalized_in_place(logits: Tensor, highest: Tensor, log_sum: Tensor) -> None:
    logits.sub_(highest).sub_(log_sum)


@fused
def _of_logits_in_place(log_p: Tensor, of_log_p: Tensor, total: Tensor) -> None:
    """Write the gradient of the logits over log p, whose gradient is given with its row's sum."""
    log_p.exp_().mul_(-total).add_(of_log_p)
