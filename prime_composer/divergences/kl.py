"""KL divergences in both directions, their sums and Jensen-Shannon mixture, and TAID."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import (
    Normalization,
    kl_terms,
    outcomes,
    with_slope,
)

CORRECTED = "full, tail, renorm, generalized"  # Normalizations of the KLs and their mixture

LEAST = -1e30  # Stands for -inf where a probability of 0 is multiplied by its logarithm


def reverse_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return KL(student || teacher) per position, by a row of the module's table.

    Raises:
        ValueError: 'renorm' with K = 1.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization, CORRECTED)
    if normalization == "generalized":
        return (kl_terms(p, q) - torch.exp(p) + torch.exp(q)).sum(-1)
    return kl_terms(p, q).sum(-1)


def forward_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return KL(teacher || student) per position, the mirror image of ``reverse_kl``.

    Gradient for z_j:

        full           p_j - q_j
        tail           S: p_j - q_j, off S: p_j (1 - q_tail/p_tail)
        renorm         S: p^_j - q^_j, off S: 0
        generalized    1_S (p_j - q_j) + p_j (Q - P)

    Raises:
        ValueError: 'renorm' with K = 1.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization, CORRECTED)
    if normalization == "generalized":
        return (kl_terms(q, p) - torch.exp(q) + torch.exp(p)).sum(-1)
    return kl_terms(q, p).sum(-1)


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

    ``generalized`` is the sum over S of the terms alone. The corrections -a + b of its two KLs
    cancel, so that this sum is non-negative and stationary at p = q, unlike in a KL.

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
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization, CORRECTED)
    if beta == 0:
        return forward_kl(student_logprobs, teacher_logprobs, normalization)
    if beta == 1:
        return reverse_kl(student_logprobs, teacher_logprobs, normalization)
    # -inf is bounded, because 0 * -inf is NaN. In place: over whole vocabularies each pass costs.
    log_p, log_q = p.detach().clamp(min=LEAST), q.clamp(min=LEAST)
    p_share, q_share = torch.exp(log_p).mul_(1 - beta), torch.exp(log_q).mul_(beta)
    log_m = (p_share + q_share).log_().clamp_(min=LEAST)
    slope = log_p.sub_(log_m).mul_(p_share)  # the derivatives by way of m cancel
    return with_slope(p, log_q.sub_(log_m).mul_(q_share).add_(slope), slope).sum(-1)


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


def kls_and_entropy(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    normalization: Normalization = "tail",
    with_reverse: bool = True,
) -> Float[Tensor, "*pos m"]:
    """Return the forward KL, the teacher's entropy, and the reverse KL if wanted, per position."""
    p, q = student_logprobs, teacher_logprobs.detach()
    values = [forward_kl(p, q, normalization), entropy(q, normalization)]
    if with_reverse:
        values.append(reverse_kl(p, q, normalization))
    return torch.stack(values, dim=-1)


def todi(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return ToDi per position: forward KL where the student is too low, reverse KL elsewhere.

        sum_v a_v q_v log q_v/p_v + (1 - a_v) p_v log p_v/q_v,    a_v = sg sigmoid(log q_v/p_v)

    The value is forward KL plus reverse KL, because a = q/(p + q). The gradient is not theirs: for
    log p_j it is -a_j q_j + (1 - a_j) p_j (log p_j/q_j + 1), the weights held fixed. p = q is
    stationary.

    Source: ToDi (2025), https://arxiv.org/abs/2505.16297.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    gap = torch.where(p == q, 0.0, q - p).detach()  # -inf - -inf is NaN
    forward, reverse = torch.sigmoid(gap), torch.sigmoid(-gap)
    return (forward * kl_terms(q, p) + reverse * kl_terms(p, q)).sum(-1)
