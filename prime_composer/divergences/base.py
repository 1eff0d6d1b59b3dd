"""What all divergences share: the outcomes that a normalization compares, and sums in log space."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Normalization = Literal["full", "tail", "renorm", "generalized"]

MAX_LOG_MASS = -1e-7  # With a complement in float32: 1 - exp(-1e-7) is about 1 ulp


def upcast(logprobs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return float32 for half precision, and wider dtypes unchanged."""
    return logprobs.float() if logprobs.dtype in (torch.float16, torch.bfloat16) else logprobs


def log1mexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return log(1 - exp(x)) for x <= 0, accurate at both ends.

    The gradient is finite wherever the value is.

    Source: Mächler, "Accurately Computing log(1 - exp(-|a|))", 2012,
    https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf, Eq. 7 (switch at
    log 2).
    """
    near_zero = x > -math.log(2)
    # Where the other branch is selected, each gets a constant: its backward has no 0 * inf then.
    small = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    large = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, small, large)


def log_tail_mass(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos"]:
    """Return log(1 - P), the log-mass outside the support.

    log P is clamped at -1e-7, the limit of float32, and has no gradient beyond it. The tail of a
    forward KL then no longer pulls a student with all its mass on S, for any mass of the teacher
    outside.
    """
    return log1mexp(torch.logsumexp(logprobs, dim=-1).clamp(max=MAX_LOG_MASS))


def with_tail(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos kplus1"]:
    """Return the distribution over K + 1 outcomes: the ids of the support, and all the rest."""
    return torch.cat([logprobs, log_tail_mass(logprobs).unsqueeze(-1)], dim=-1)


def renormalized(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos k"]:
    """Return log p^, the distribution within the support."""
    if logprobs.shape[-1] == 1:
        raise ValueError(
            "normalization 'renorm' with K = 1 is identically 0: one token renormalized has "
            "probability 1. Use normalization 'tail', or K of at least 2."
        )
    return torch.log_softmax(logprobs, dim=-1)


def kl_terms(a: Float[Tensor, "*pos k"], b: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos k"]:
    """Return exp(a) (a - b), the terms of KL(a || b). Value and gradient are 0 where a = -inf."""
    impossible = a == -math.inf
    a = torch.where(impossible, 0.0, a)
    return torch.where(impossible, 0.0, torch.exp(a) * (a - torch.where(impossible, 0.0, b)))


def outcomes(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization,
    choices: str = "full, tail, renorm",
) -> tuple[Float[Tensor, "*pos n"], Float[Tensor, "*pos n"]]:
    """Return student and teacher over the outcomes that a normalization compares.

    These are K outcomes, or K + 1 with the tail. ``generalized`` returns both unchanged.
    """
    p, q = upcast(student_logprobs), upcast(teacher_logprobs).detach()
    if normalization not in choices.split(", "):
        raise ValueError(
            f"normalization {normalization!r} is not defined here; choose one of {choices}."
        )
    if normalization == "tail":
        return with_tail(p), with_tail(q)
    if normalization == "renorm":
        return renormalized(p), renormalized(q)
    return p, q


def with_slope(
    logprobs: Float[Tensor, "..."], values: Float[Tensor, "..."], slope: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return ``values``, with ``slope`` as their elementwise derivative for ``logprobs``.

    Autograd would multiply the infinities of the branch that was not taken by 0. There is no second
    derivative.
    """
    result: Tensor = _WithSlope.apply(logprobs, values.detach(), slope.detach())
    return result


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, values: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None
