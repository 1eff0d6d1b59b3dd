"""Divergences between student p and teacher q on a support, and estimators on the sampled token.

Arguments are log-probs, student first and teacher second, normalized over the *full vocabulary*,
with the K ids of the support S along the last axis. Results are per position (that axis is
reduced), in nats, and in float32 for half precision. The teacher is detached: no function sends a
gradient into it. Either argument may contain ``log 0 = -inf`` (0 log 0 = 0).

Letters: P = sum_S p and Q = sum_S q are the masses on the support, p^ = p/P and q^ = q/Q the
renormalized distributions, p_tail = 1 - P and q_tail = 1 - Q the masses outside, sg the
stop-gradient, z the student's logits, and L the value.

Reverse KL is KL(student || teacher) and seeks modes. Forward KL is KL(teacher || student) and
covers them. A top-K support hides the rest of the vocabulary. The normalization decides what is
learned about it:

=============  ======================  ==============================================  ==========
normalization  reverse KL              its gradient for z_j                            p = q on S
                                                                                       stationary
=============  ======================  ==============================================  ==========
full (K = V)   sum p log p/q           p_j (log p_j/q_j - L)                           yes
tail           sum_S p log p/q         S: p_j (log p_j/q_j - L)                        iff P = Q
               + p_tail log            off S: p_j (log p_tail/q_tail - L)
               p_tail/q_tail
renorm         sum_S p^ log p^/q^      S: p^_j (log p^_j/q^_j - L), off S: exactly 0   any P
generalized    sum_S p log p/q         1_S p_j log p_j/q_j - p_j sum_S p log p/q       yes
               - p + q
stop_gradient  sum_S p sg(log p/q)     that of ``generalized``                         yes
raw            sum_S p log p/q         1_S p_j (log p_j/q_j + 1) - p_j (L + P)         no
=============  ======================  ==============================================  ==========

``tail`` treats everything outside S as one outcome. It is a lower bound of the full KL, equal to
P renorm + KL(Bernoulli P || Bernoulli Q). It is the only row on K < V in which the teacher's mass
outside S is a target. ``renorm`` (arXiv 2603.25562) leaves the mass outside S free.
``generalized`` is Eq. 5 of MOPD (arXiv 2606.30406). ``raw`` has the gradient of P itself at p = q.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Normalization = Literal["full", "tail", "renorm", "generalized", "stop_gradient", "raw"]

MAX_LOG_MASS = -1e-7
"""Largest log-mass of a support with a complement in float32: 1 - exp(-1e-7) is about 1 ulp."""


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
    """Return log p^, the distribution within the support.

    Raises:
        ValueError: K = 1, where p^ is 1 for any p and teaches nothing.
    """
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


def reverse_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
    allow_biased: bool = False,
) -> Float[Tensor, "*pos"]:
    """Return KL(student || teacher) per position, by a row of the module's table.

    Raises:
        ValueError: 'raw' without ``allow_biased``, or 'renorm' with K = 1.
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
    """Return KL(teacher || student) per position, the mirror image of ``reverse_kl``.

    Gradient for z_j:

        full           p_j - q_j
        tail           S: p_j - q_j, off S: p_j (1 - q_tail/p_tail)
        renorm         S: p^_j - q^_j, off S: 0
        generalized    1_S (p_j - q_j) + p_j (Q - P)
        raw            Q p_j - 1_S q_j, which is not 0 at p = q

    Raises:
        ValueError: 'stop_gradient' (the gradient would be 0), 'raw' without ``allow_biased``, or
            'renorm' with K = 1.
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
            "normalization 'raw' is biased: at p = q its gradient is not 0 but pushes the mass on "
            "the support, and its value can be negative. Use 'tail' or 'generalized', or set "
            "allow_biased = true to run it all the same."
        )


def _unknown(normalization: str, choices: str) -> str:
    return f"normalization {normalization!r} is not defined here; choose one of {choices}."


def generalized_jsd(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    beta: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return JSD_beta(p, q) per position.

        JSD_beta(p, q) = beta KL(q || m) + (1 - beta) KL(p || m),    m = beta q + (1 - beta) p

    ``beta`` is the teacher's weight in the mixture m. By convention beta = 0 is forward KL and
    beta = 1 is reverse KL. The *scale* jumps there: JSD_beta / beta -> forward KL as beta -> 0, and
    JSD_beta / (1 - beta) -> reverse KL as beta -> 1. A learning rate for 0.5 does not fit 0.01.
    Gradient for z_j on the full vocabulary: (1 - beta) p_j (log p_j/m_j - KL(p || m)).

    ``generalized`` is the sum over S of the raw terms. The corrections -a + b of its two KLs
    cancel, so that the raw sum is non-negative and stationary at p = q, unlike in a KL.

    Source: GKD, "On-Policy Distillation of Language Models" (2023),
    https://arxiv.org/abs/2306.13649, Eq. 1. The ends are those of trl's
    GKDTrainer.generalized_jsd_loss and lasgroup/SDPO.

    Raises:
        ValueError: beta outside [0, 1], a normalization other than full, tail, renorm and
            generalized, or 'renorm' with K = 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(
            f"beta = {beta} is the teacher's weight in the mixture: it has to be in [0, 1]."
        )
    choices = "full, tail, renorm, generalized"
    if normalization not in choices.split(", "):
        raise ValueError(_unknown(normalization, choices))
    if beta == 0:
        return forward_kl(student_logprobs, teacher_logprobs, normalization)
    if beta == 1:
        return reverse_kl(student_logprobs, teacher_logprobs, normalization)
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization, choices)
    # A token impossible for both has no mixture: logaddexp(-inf, -inf) has NaN in its backward.
    absent = (p == -math.inf) & (q == -math.inf)
    p, q = torch.where(absent, 0.0, p), torch.where(absent, 0.0, q)
    m = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    terms = beta * kl_terms(q, m) + (1 - beta) * kl_terms(p, m)
    return torch.where(absent, 0.0, terms).sum(-1)


def outcomes(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization,
    choices: str = "full, tail, renorm",
) -> tuple[Float[Tensor, "*pos n"], Float[Tensor, "*pos n"]]:
    """Return student and teacher over the outcomes that a normalization compares.

    These are K outcomes, or K + 1 with the tail. ``generalized`` returns both unchanged.

    Raises:
        ValueError: a normalization that is not among ``choices``, or 'renorm' with K = 1.
    """
    p, q = upcast(student_logprobs), upcast(teacher_logprobs).detach()
    if normalization not in choices.split(", "):
        raise ValueError(_unknown(normalization, choices))
    if normalization == "tail":
        return with_tail(p), with_tail(q)
    if normalization == "renorm":
        return renormalized(p), renormalized(q)
    return p, q


def taid_target(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    t: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos n"]:
    """Return log p_t of TAID's intermediate teacher, over K outcomes (``tail``: K + 1).

        p_t = softmax((1 - t) sg z_s + t z_t)

    It mixes *logits*, a geometric mean. Log-probs give the same, since they differ from logits by
    a constant per position. The anchor is the *current* student, detached. Mixing probabilities
    gives the same at t = 0 and t = 1, and another distribution in between. With ``tail`` the tails
    are mixed as one outcome, which is the target of that coarser problem.

    Source: "TAID" (2025), https://arxiv.org/abs/2501.16937, Eq. 3, and SakanaAI/TAID a062892,
    src/distil_losses/taid.py.

    Raises:
        ValueError: t outside [0, 1], or a normalization other than full, tail and renorm.
    """
    if not 0 <= t <= 1:
        raise ValueError(
            f"t = {t} is the teacher's share of the intermediate distribution: "
            "it has to be in [0, 1]."
        )
    p, q = outcomes(student_logprobs.detach(), teacher_logprobs, normalization)
    if t in (0, 1):  # 0 * -inf is NaN
        return torch.log_softmax(q if t == 1 else p, dim=-1)
    return torch.log_softmax((1 - t) * p + t * q, dim=-1)


def taid(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    t: float,
    normalization: Normalization = "tail",
    form: Literal["cross_entropy", "kl"] = "cross_entropy",
) -> Float[Tensor, "*pos"]:
    """Return TAID per position: -sum p_t log p (``cross_entropy``) or KL(p_t || p) (``kl``).

    Public code returns the first. Both have the same gradient, p_j - p_t,j for z_j on the full
    vocabulary. They differ by the entropy of p_t.
    """
    target = taid_target(student_logprobs, teacher_logprobs, t, normalization)
    log_p, _ = outcomes(student_logprobs, teacher_logprobs, normalization)
    if form == "kl":
        return kl_terms(target, log_p).sum(-1)
    impossible = target == -math.inf
    return -torch.where(
        impossible, 0.0, torch.exp(target) * torch.where(impossible, 0.0, log_p)
    ).sum(-1)


def entropy(
    logprobs: Float[Tensor, "*pos k"], normalization: Normalization = "tail"
) -> Float[Tensor, "*pos"]:
    """Return the entropy of the outcomes, in nats.

    On K < V with ``tail`` it is a lower bound of the full entropy, since the tail is one outcome.
    """
    x, _ = outcomes(logprobs, logprobs, normalization)
    return -kl_terms(x, torch.zeros_like(x)).sum(-1)


def k1(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return log p(y) - log q(y) at sampled tokens y ~ p.

    It is an unbiased estimate of the reverse KL, as a *detached reward* only. Backpropagated, its
    expected gradient is 0 (E_p grad log p = 0), without the teacher. ``weighted_k1`` is the loss.

    Raises:
        ValueError: the student's log-probs carry a gradient.
    """
    if student_logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "k1 backpropagated has expected gradient 0: the teacher drops out of it. Detach the "
            "student's log-probs to use it as a reward, or minimize weighted_k1 (reverse KL), k2 "
            "(reverse KL) or k3 (forward KL)."
        )
    return upcast(student_logprobs) - upcast(teacher_logprobs)


def k2(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return (log q - log p)^2 / 2 at sampled tokens.

    Its expected gradient is that of the *reverse* KL, for y ~ p. As a value it is biased.
    """
    return (upcast(teacher_logprobs).detach() - upcast(student_logprobs)).square() / 2


def k3(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return q/p - 1 - log q/p at sampled tokens.

    Its expected gradient is that of the *forward* KL, for y ~ p. Its value estimates the *reverse*
    KL without bias, so that the metric and the training signal differ. As a detached reward it
    follows neither.
    """
    d = upcast(teacher_logprobs).detach() - upcast(student_logprobs)
    return torch.expm1(d) - d


def weighted_k1(
    student_logprobs: Float[Tensor, "..."],
    teacher_logprobs: Float[Tensor, "..."],
    sampler_logprobs: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    """Return rho sg(log p - log q), rho = p/mu, at sampled tokens y ~ mu.

    Its expected gradient is that of the *reverse* KL, for any mu. The log-ratio is of the current
    student p. With log mu in its place, stale rollouts have the expectation of another objective.
    """
    p, q, mu = upcast(student_logprobs), upcast(teacher_logprobs), upcast(sampler_logprobs)
    return torch.exp(p - mu.detach()) * (p - q).detach()
