"""Skewed KL divergences: from a mixture of student and teacher."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import Normalization, kl_terms, outcomes, with_slope
from prime_composer.divergences.kl import forward_kl, reverse_kl

CLOSE = 0.3  # Ratio minus 1 below which the series of ``excess`` is used

SERIES_TERMS = 12  # Terms of that series. The first one that is left out is below 1e-18.


def excess(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x - log(1 + x) for |x| < ``CLOSE``, without the cancellation of the two.

    With r = x/(2 + x) it is r x - 2 r^3 (1/3 + r^2/5 + r^4/7 + ...), from log(1 + x) = 2 atanh r.
    """
    r = x / (2 + x)
    square = r.square()
    result = torch.zeros_like(x)
    for n in reversed(range(SERIES_TERMS)):
        result = result * square + 1 / (2 * n + 3)
    return r * x - 2 * r * square * result


def skewed_forward_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    skew: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return KL(q || m) per position, m = skew q + (1 - skew) p.

    skew = 0 is forward KL. The divergence is at most -log skew, and falls as (1 - skew)^2 near 1.
    Each term includes -q + m, whose sum is 0. It is then never negative, and accurate where m is
    close to q. Its derivative for log p_j is (1 - skew)^2 p_j (p_j - q_j)/m_j, so that p = q is
    stationary.

    Source: DistiLLM (2024), https://arxiv.org/abs/2402.03898. The authors' code
    (jongwooko/distillm d47e77f) returns the cross-entropy, without the teacher's entropy.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    refuse_skew(skew)
    if skew == 0:
        return forward_kl(student_logprobs, teacher_logprobs, normalization)
    log_p, absent = p.detach(), (p == -math.inf) & (q == -math.inf)
    m = _mixture(log_p, q, skew)
    difference = torch.exp(log_p) - torch.exp(q)
    x = (1 - skew) * torch.expm1((log_p - q).clamp(max=80.0))  # m/q - 1
    close = x.abs() < CLOSE
    values = torch.where(
        close,
        torch.exp(q) * excess(torch.where(close, x, 0.0)),
        kl_terms(q, m) + (1 - skew) * difference,
    )
    slope = (1 - skew) ** 2 * torch.exp(log_p - m) * difference
    values, slope = (torch.where(absent, 0.0, y) for y in (values, slope))
    return with_slope(p, values, slope).sum(-1)


def skewed_reverse_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    skew: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return KL(p || m) per position, m = skew p + (1 - skew) q.

    skew = 0 is reverse KL. Bounds, terms and accuracy are those of ``skewed_forward_kl``. With
    u = p_j/m_j - 1, the derivative for log p_j is p_j (log(1 + u) - skew u), so that p = q is
    stationary.

    Source: DistiLLM (2024), https://arxiv.org/abs/2402.03898.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    refuse_skew(skew)
    if skew == 0:
        return reverse_kl(student_logprobs, teacher_logprobs, normalization)
    log_p, impossible = p.detach(), p == -math.inf
    m = _mixture(q, log_p, skew)
    probs = torch.exp(log_p)
    difference = torch.exp(q) - probs
    x = (1 - skew) * torch.expm1((q - log_p).clamp(max=80.0))  # m/p - 1
    u = -x / (1 + x)  # p/m - 1
    close = (x.abs() < CLOSE) & (u.abs() < CLOSE)
    x, u = (torch.where(close, y, 0.0) for y in (x, u))
    values = torch.where(close, probs * excess(x), kl_terms(log_p, m) + (1 - skew) * difference)
    log_ratio = torch.where(impossible, 0.0, log_p - m)
    slope = torch.where(
        close,
        probs * ((1 - skew) * u - excess(u)),
        probs * (log_ratio + skew - torch.exp(log_ratio + math.log(skew))),
    )
    return with_slope(p, values, slope).sum(-1)


def refuse_skew(skew: float) -> None:
    """Refuse a share at which nothing is compared."""
    if not 0 <= skew < 1:
        raise ValueError(
            f"skew = {skew} is the share of the left distribution in the mixture: it has to be in "
            "[0, 1). At 1 the divergence is identically 0."
        )


def _mixture(
    a: Float[Tensor, "*pos n"], b: Float[Tensor, "*pos n"], share: float
) -> Float[Tensor, "*pos n"]:
    """Return log(share exp(b) + (1 - share) exp(a))."""
    return torch.logaddexp(a + math.log1p(-share), b + math.log(share))
