"""Divergences from a mixture of student and teacher: skewed KL, and AMiD's assistant."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import Normalization, kl_terms, outcomes, with_slope
from prime_composer.divergences.kl import forward_kl, reverse_kl

AMiDDivergence = Literal["q||r", "p||r", "r||q", "r||p"]

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


def unnormalized_assistant(
    student_logprobs: Float[Tensor, "*pos"],
    teacher_logprobs: Float[Tensor, "*pos"],
    alpha: float,
    skew: float,
) -> Float[Tensor, "*pos"]:
    """Return log r of AMiD's assistant up to its normalization, per outcome, with the gradient.

        r ∝ (skew q^g + (1 - skew) p^g)^(1/g),    g = (1 - alpha)/2,    alpha = 1: q^skew p^(1-skew)

    Its derivative for log p_j is the student's share of the sum.
    """
    if skew in (0, 1):  # log 0
        return teacher_logprobs if skew else student_logprobs
    p, q = student_logprobs.detach(), teacher_logprobs
    g = (1 - alpha) / 2
    gap = g * torch.where(p == q, 0.0, q - p)  # -inf - -inf is NaN
    close = gap.abs() < 1
    if g == 0:
        values = (1 - skew) * p + skew * q
    else:
        step = torch.log1p(skew * torch.expm1(torch.where(close, gap, 0.0)))
        values = torch.where(close, p + step / g, _mixture(g * p, g * q, skew) / g)
    slope = torch.sigmoid(math.log1p(-skew) - math.log(skew) - gap)
    return with_slope(student_logprobs, values, slope)


def amid(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    alpha: float,
    skew: float,
    divergence: AMiDDivergence,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return a KL divergence per position between one of the two and AMiD's assistant r.

    ``unnormalized_assistant`` has the formula of r. ``divergence`` is the order: "q||r", "p||r",
    "r||q" or "r||p". The gradient flows through r too. alpha = -1 mixes probabilities, as the
    skewed KLs do, and alpha = 1 mixes log-probs, as TAID does. p = q is stationary.

    Source: AMiD (2025), https://arxiv.org/abs/2510.15982. Its p is the teacher and its q the
    student, so that its "pr" is "q||r" here.
    """
    refuse_amid(alpha, skew, divergence)
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    r = torch.log_softmax(unnormalized_assistant(p, q, alpha, skew), dim=-1)
    pairs = {"q||r": (q, r), "p||r": (p, r), "r||q": (r, q), "r||p": (r, p)}
    return kl_terms(*pairs[divergence]).sum(-1)


def refuse_amid(alpha: float, skew: float, divergence: str) -> None:
    """Refuse knobs outside AMiD's domain, or with which nothing is learned."""
    if not -math.inf < alpha <= 1:
        raise ValueError(
            f"alpha = {alpha}: the assistant distribution is defined for a finite alpha of at most "
            "1. -1 mixes probabilities, 1 mixes log-probs."
        )
    if not 0 <= skew <= 1:
        raise ValueError(f"skew = {skew} is the teacher's share in r: it has to be in [0, 1].")
    if divergence not in get_args(AMiDDivergence):
        choices = ", ".join(get_args(AMiDDivergence))
        raise ValueError(f"divergence {divergence!r} is not defined here; choose one of {choices}.")
    if skew in (0, 1) and ("q" if skew else "p") in divergence:
        same = "q" if skew else "p"
        raise ValueError(
            f"skew = {skew} makes r = {same}, and {divergence} is identically 0. "
            "Choose a skew between 0 and 1."
        )
