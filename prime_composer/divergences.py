"""Divergences between a student p and a teacher q on a support, and estimators on the sampled token. Pure maths.

Arguments are log-probabilities, student first and teacher second, normalised over the *full vocabulary*, with the K ids of
the support S along the last axis. Results are per position (that axis reduced), in float32 for half inputs. The teacher is
detached: no function here sends a gradient into it. ``log 0 = -inf`` is welcome on either side (0 log 0 = 0).

Letters: P = sum_S p and Q = sum_S q are the masses on the support, p^ = p/P and q^ = q/Q the renormalised distributions,
p_tail = 1 - P and q_tail = 1 - Q what stands outside, sg the stop-gradient, z the student's logits.

Reverse KL is KL(student || teacher) and seeks modes; forward KL is KL(teacher || student) and covers them. A top-K support
hides the rest of the vocabulary, and what is done about it decides what is learnt:

===============  ============================================  ================================================  ==========
normalization    reverse KL                                    its gradient for z_j                              p = q on S
                                                                                                                 stationary
===============  ============================================  ================================================  ==========
full (K = V)     sum p log p/q                                 p_j (log p_j/q_j - L)                             yes
tail             sum_S p log p/q + p_tail log p_tail/q_tail    S: p_j (log p_j/q_j - L);                         iff P = Q
                                                               off S: p_j (log p_tail/q_tail - L)
renorm           sum_S p^ log p^/q^                            S: p^_j (log p^_j/q^_j - L); off S: exactly 0     any P
generalized      sum_S p log p/q - p + q                       1_S p_j log p_j/q_j - p_j sum_S p log p/q         yes
stop_gradient    sum_S p sg(log p/q)                           that of ``generalized``                           yes
raw              sum_S p log p/q                               1_S p_j (log p_j/q_j + 1) - p_j (L + P)           no
===============  ============================================  ================================================  ==========

``tail`` treats everything outside S as one outcome: a lower bound of the full KL, equal to P renorm + KL(Bernoulli P ||
Bernoulli Q), and the only row in which the teacher's mass outside S is a target. ``renorm`` (arXiv 2603.25562) leaves the
mass outside S free. ``generalized`` is Eq. 5 of MOPD (arXiv 2606.30406). ``raw`` has the gradient of P itself at p = q.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Normalization = Literal["full", "tail", "renorm", "generalized", "stop_gradient", "raw"]

# The largest log-mass of a support whose complement is still a number in float32 (1 - exp(-1e-7) is about 1 ulp).
MAX_LOG_MASS = -1e-7


def upcast(logprobs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """float32 for half precision; wider dtypes unchanged."""
    return logprobs.float() if logprobs.dtype in (torch.float16, torch.bfloat16) else logprobs


def log1mexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(1 - exp(x)) for x <= 0, accurate at both ends, with a finite gradient wherever the value is finite.

    Source: Mächler, "Accurately Computing log(1 - exp(-|a|))", 2012,
    https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf, Eq. 7 (switch at log 2).
    """
    near_zero = x > -math.log(2)
    # Each branch sees a harmless input where the other one answers, else 0 * inf arises in its backward.
    small = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    large = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, small, large)


def log_tail_mass(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos"]:
    """log(1 - P), the mass outside the support; the log-mass is clamped at -1e-7, where float32 has nothing left."""
    return log1mexp(torch.logsumexp(logprobs, dim=-1).clamp(max=MAX_LOG_MASS))


def with_tail(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos kplus1"]:
    """The distribution over K + 1 outcomes: the ids of the support, and one outcome for all the rest."""
    return torch.cat([logprobs, log_tail_mass(logprobs).unsqueeze(-1)], dim=-1)


def renormalized(logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos k"]:
    """log p^: the distribution within the support. K = 1 is refused: it is 1 whatever p is, and teaches nothing."""
    if logprobs.shape[-1] == 1:
        raise ValueError(
            "normalization 'renorm' with K = 1 is identically 0: one token renormalised has probability 1. "
            "Use normalization 'tail', or K of at least 2."
        )
    return torch.log_softmax(logprobs, dim=-1)


def kl_terms(a: Float[Tensor, "*pos k"], b: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos k"]:
    """exp(a) (a - b), 0 where a = -inf: the terms of KL(a || b), in value and in gradient."""
    impossible = a == -math.inf
    a = torch.where(impossible, 0.0, a)
    return torch.where(impossible, 0.0, torch.exp(a) * (a - torch.where(impossible, 0.0, b)))


def reverse_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
    allow_biased: bool = False,
) -> Float[Tensor, "*pos"]:
    """KL(student || teacher) per position, by a row of the module's table.

    Raises:
        ValueError: 'raw' without ``allow_biased``; 'renorm' with K = 1.
    """
    p, q = upcast(student_logprobs), upcast(teacher_logprobs).detach()
    match normalization:
        case "full":
            return kl_terms(p, q).sum(-1)
        case "tail":
            p, q = with_tail(p), with_tail(q)
            return kl_terms(p, q).sum(-1)
        case "renorm":
            return kl_terms(renormalized(p), renormalized(q)).sum(-1)
        case "generalized":
            return (kl_terms(p, q) - torch.exp(p) + torch.exp(q)).sum(-1)
        case "stop_gradient":
            return (torch.exp(p) * torch.where(p == -math.inf, 0.0, p - q).detach()).sum(-1)
        case "raw":
            _refuse_biased(allow_biased)
            return kl_terms(p, q).sum(-1)
    raise ValueError(_unknown(normalization, "full, tail, renorm, generalized, stop_gradient, raw"))


def forward_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
    allow_biased: bool = False,
) -> Float[Tensor, "*pos"]:
    """KL(teacher || student) per position: the mirror image of ``reverse_kl``.

    Gradient for z_j: full p_j - q_j. tail: p_j - q_j on S, p_j (1 - q_tail/p_tail) off S. renorm: p^_j - q^_j on S, 0 off S.
    generalized: 1_S (p_j - q_j) + p_j (Q - P). raw: Q p_j - 1_S q_j, which is not 0 at p = q.

    Raises:
        ValueError: 'stop_gradient' (nothing would be left to differentiate); 'raw' without ``allow_biased``; 'renorm' with
            K = 1.
    """
    p, q = upcast(student_logprobs), upcast(teacher_logprobs).detach()
    match normalization:
        case "full":
            return kl_terms(q, p).sum(-1)
        case "tail":
            p, q = with_tail(p), with_tail(q)
            return kl_terms(q, p).sum(-1)
        case "renorm":
            return kl_terms(renormalized(q), renormalized(p)).sum(-1)
        case "generalized":
            return (kl_terms(q, p) - torch.exp(q) + torch.exp(p)).sum(-1)
        case "raw":
            _refuse_biased(allow_biased)
            return kl_terms(q, p).sum(-1)
    raise ValueError(_unknown(normalization, "full, tail, renorm, generalized, raw"))


def _refuse_biased(allow_biased: bool) -> None:
    if not allow_biased:
        raise ValueError(
            "normalization 'raw' is biased: at p = q its gradient is not 0 but pushes the mass on the support, and its value "
            "can be negative. Use 'tail' or 'generalized', or set allow_biased = true to run it all the same."
        )


def _unknown(normalization: str, choices: str) -> str:
    return f"normalization {normalization!r} is not defined here; choose one of {choices}."
