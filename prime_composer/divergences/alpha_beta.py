"""Divergences of probabilities raised to a power: alpha-beta, and total variation."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import Normalization, outcomes, with_slope

SERIES_TERMS = 18  # At close arguments. The first one that is left out is below 1e-18


def alpha_beta_divergence(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    alpha: float,
    beta: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return the alpha-beta divergence per position, with alpha as the teacher's exponent.

        D = -1/(alpha beta) sum q^alpha p^beta - alpha/s q^s - beta/s p^s,    s = alpha + beta

    with its continuous limits where alpha, beta or s is 0. (1, 0) is forward KL, (0, 1) is reverse
    KL, (1, 1) is half the squared distance, and (0, 0) is half the squared distance of the
    log-probs. Each term is (log q/p)^2 times the second divided difference of exp at s log p,
    beta log p + alpha log q and s log q. It is therefore never negative.

    The derivative for log p_j is -p_j^beta (q_j^alpha - p_j^alpha)/alpha, so that p = q is
    stationary. A small beta makes it larger at improbable tokens of the student. Negative
    exponents divide by probabilities, and overflow in float32 below about e^-88.

    Source: ABKD (2025), https://arxiv.org/abs/2505.04560. The authors' code (ghwang-s/abkd
    df81318) returns alpha times this divergence where beta or s is 0, and beta times it where
    alpha is 0, the sign included.
    """
    if not (math.isfinite(alpha) and math.isfinite(beta)):
        raise ValueError(
            f"alpha = {alpha} and beta = {beta} are exponents: both have to be finite."
        )
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    values, slope = _alpha_beta_terms(p.detach(), q, alpha, beta)
    return with_slope(p, values, slope).sum(-1)


def _alpha_beta_terms(
    p: Float[Tensor, "*pos n"], q: Float[Tensor, "*pos n"], alpha: float, beta: float
) -> tuple[Float[Tensor, "*pos n"], Float[Tensor, "*pos n"]]:
    """Return the terms and their derivatives for log p."""
    total = alpha + beta
    no_p, no_q = p == -math.inf, q == -math.inf
    impossible = no_p | no_q
    log_p, log_q = torch.where(impossible, 0.0, p), torch.where(impossible, 0.0, q)
    gap = log_q - log_p

    # The three exponents are total log p + k gap, for k = 0, alpha and total.
    points = sorted(
        [
            (0.0, total * log_p),
            (alpha, beta * log_p + alpha * log_q),
            (total, total * log_q),
        ],
        key=lambda point: point[0],
    )
    (low, at_low), (middle, at_middle), (high, at_high) = points
    width = high - low
    center = (low + middle + high) / 3
    series = _close_terms(gap, low - center, middle - center, high - center)
    values = torch.exp((at_low + at_middle + at_high) / 3) * gap.square() * series
    if width > 0:
        upper = _difference(at_middle, at_high, high - middle, gap)
        lower = _difference(at_low, at_middle, middle - low, gap)
        values = torch.where(gap.abs() * width < 1, values, (upper - lower) / width)
    slope = -_difference(total * log_p, beta * log_p + alpha * log_q, alpha, gap)

    # Where one of the two is impossible: q^s/(beta s) or p^s/(alpha s), where these limits exist.
    without_p = torch.exp(total * q) / (beta * total) if beta > 0 and total > 0 else torch.inf
    without_q = torch.exp(total * p) / (alpha * total) if alpha > 0 and total > 0 else torch.inf
    values = torch.where(no_p, without_p, torch.where(no_q, without_q, values))
    slope_without_q = torch.exp(total * p) / alpha if alpha > 0 and total > 0 else torch.inf
    slope = torch.where(no_p, 0.0, torch.where(no_q, slope_without_q, slope))
    both = no_p & no_q
    return torch.where(both, 0.0, values), torch.where(both, 0.0, slope)


def _difference(
    a: Float[Tensor, "..."], b: Float[Tensor, "..."], k: float, gap: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return (exp(b) - exp(a)) / k where b - a = k gap, and the limit exp(a) gap at k = 0."""
    if k == 0:
        return torch.exp(a) * gap
    size = -torch.expm1(-(k * gap).abs()) / abs(k)
    return torch.exp(torch.maximum(a, b)) * size * gap.sign()


def _close_terms(
    gap: Float[Tensor, "..."], low: float, middle: float, high: float
) -> Float[Tensor, "..."]:
    """Return sum_n h_n gap^n / (n + 2)!, for the second divided difference of exp at close points.

    h_n is the complete homogeneous symmetric polynomial of the three points, whose sum is 0.
    """
    pairs = low * middle + low * high + middle * high
    product = low * middle * high
    h = [1.0, 0.0, -pairs]
    while len(h) < SERIES_TERMS:
        h.append(-pairs * h[-2] + product * h[-3])
    result = torch.zeros_like(gap)
    for n in reversed(range(SERIES_TERMS)):
        result = result * gap + h[n] / math.factorial(n + 2)
    return result


def total_variation(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return the total variation distance, 1/2 sum |p - q|, per position.

    It is between 0 and 1, and its derivative for log p_j is p_j sign(p_j - q_j) / 2. p = q is a
    kink: the gradient is 0 there by convention, and does not shrink on the way.

    Source: "f-Divergence Minimization for Sequence-Level Knowledge Distillation" (2023),
    https://arxiv.org/abs/2307.15190.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    return (torch.exp(p) - torch.exp(q)).abs().sum(-1) / 2
