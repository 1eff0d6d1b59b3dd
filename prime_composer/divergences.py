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
    """log(1 - P), the mass outside the support; the log-mass is clamped at -1e-7, where float32 has nothing left.

    Beyond it there is no gradient either: a student that has put all its mass on S is not pulled out again by the tail of a
    forward KL, however much the teacher keeps outside.
    """
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


def generalized_jsd(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    beta: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """JSD_beta(p, q) = beta KL(q || m) + (1 - beta) KL(p || m) per position, with m = beta q + (1 - beta) p.

    ``beta`` is the teacher's weight in the mixture m. By convention beta = 0 is forward KL and beta = 1 is reverse KL; the
    *scale* jumps there, since JSD_beta / beta -> forward KL as beta -> 0 (and JSD_beta / (1 - beta) -> reverse KL as
    beta -> 1): a learning rate that suits .5 does not suit .01. Gradient for z_j on the full vocabulary:
    (1 - beta) p_j (log p_j/m_j - KL(p || m)).

    ``generalized`` is the sum over S of the raw terms: the corrections -a + b of its two KLs cancel, so that here, unlike in
    a KL, the raw sum is non-negative and stationary at p = q.

    Source: GKD, "On-Policy Distillation of Language Models" (2023), https://arxiv.org/abs/2306.13649, Eq. 1; the ends as in
    trl's GKDTrainer.generalized_jsd_loss and lasgroup/SDPO.

    Raises:
        ValueError: beta outside [0, 1]; a normalisation other than full, tail, renorm, generalized; 'renorm' with K = 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(
            f"beta = {beta} is the teacher's weight in the mixture: it lies in [0, 1]."
        )
    choices = "full, tail, renorm, generalized"
    if normalization not in choices.split(", "):
        raise ValueError(_unknown(normalization, choices))
    if beta == 0:
        return forward_kl(student_logprobs, teacher_logprobs, normalization)
    if beta == 1:
        return reverse_kl(student_logprobs, teacher_logprobs, normalization)
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization, choices)
    # A token that neither side can say has no mixture: logaddexp(-inf, -inf) has NaN in its backward.
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
    """Student and teacher over the outcomes that a normalisation compares: K of them, or K + 1 with the tail.

    ``generalized``, where ``choices`` allows it, leaves both as they are.
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
    """log p_t, p_t = softmax((1 - t) sg z_s + t z_t): TAID's intermediate teacher, over K outcomes (``tail``: K + 1).

    It mixes *logits* (a geometric mean; log-probs differ from logits by a constant per position, so they give the same), and
    its anchor is the *current* student, detached. Mixing probabilities gives the same at t = 0 and t = 1 and another
    distribution in between. With ``tail`` the tails are mixed as one outcome, which is the target of that coarser problem.

    Source: "TAID" (2025), https://arxiv.org/abs/2501.16937, Eq. 3; SakanaAI/TAID a062892, src/distil_losses/taid.py.
    """
    if not 0 <= t <= 1:
        raise ValueError(
            f"t = {t} is the teacher's share of the intermediate distribution: it lies in [0, 1]."
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
    """TAID per position: -sum p_t log p (``cross_entropy``, what public code returns), or KL(p_t || p) (``kl``).

    Both have the same gradient, p_j - p_t,j for z_j on the full vocabulary; they differ by the entropy of p_t.
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
    """H of the outcomes, in nats. On K < V with ``tail`` it is a lower bound of the full entropy: the tail is one outcome."""
    x, _ = outcomes(logprobs, logprobs, normalization)
    return -kl_terms(x, torch.zeros_like(x)).sum(-1)


def k1(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """log p(y) - log q(y) at sampled tokens y ~ p: an unbiased estimate of the reverse KL, as a *detached reward* only.

    Backpropagated, its expected gradient is 0 (E_p grad log p = 0): the teacher drops out. ``weighted_k1`` is the loss.

    Raises:
        ValueError: the student's log-probs carry a gradient.
    """
    if student_logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "k1 backpropagated has expected gradient 0: the teacher drops out of it. Detach the student's log-probs to use "
            "it as a reward, or minimise weighted_k1 (reverse KL), k2 (reverse KL) or k3 (forward KL)."
        )
    return upcast(student_logprobs) - upcast(teacher_logprobs)


def k2(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """(log q - log p)^2 / 2 at sampled tokens. Expected gradient: *reverse* KL, for y ~ p. Biased as a value."""
    return (upcast(teacher_logprobs).detach() - upcast(student_logprobs)).square() / 2


def k3(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """q/p - 1 - log q/p at sampled tokens. Expected gradient: *forward* KL, for y ~ p.

    Its value estimates the *reverse* KL without bias: watch it, or train on it knowing that the two are not the same. As a
    detached reward it follows neither.
    """
    d = upcast(teacher_logprobs).detach() - upcast(student_logprobs)
    return torch.expm1(d) - d


def weighted_k1(
    student_logprobs: Float[Tensor, "..."],
    teacher_logprobs: Float[Tensor, "..."],
    sampler_logprobs: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    """rho sg(log p - log q), rho = p/mu, at sampled tokens y ~ mu. Expected gradient: *reverse* KL, whatever mu is.

    The log-ratio is of the live student p; with log mu in its place the expectation is that of another objective as soon as
    rollouts are stale.
    """
    p, q, mu = upcast(student_logprobs), upcast(teacher_logprobs), upcast(sampler_logprobs)
    return torch.exp(p - mu.detach()) * (p - q).detach()
