"""Sums of forward and reverse KL whose weights depend on student and teacher."""

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import Normalization, kl_terms, outcomes


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


def adaptive_kl(
    student_logprobs: Float[Tensor, "*pos k"],
    teacher_logprobs: Float[Tensor, "*pos k"],
    *,
    head_mass: float,
    normalization: Normalization = "tail",
) -> Float[Tensor, "*pos"]:
    """Return AKL per position: forward KL as far as the gap is in the teacher's head.

        w KL(q || p) + (1 - w) KL(p || q),    w = sg (sum_head |q - p| / sum |q - p|)

    The head is the teacher's most probable outcomes, as long as their cumulated mass is at most
    ``head_mass``. The first one always belongs to it, and a tail bucket never does. The order of
    equally probable ones is that of the support. w = 1/2 at p = q, which is stationary.

    Source: "Rethinking Kullback-Leibler Divergence in Knowledge Distillation for Large Language
    Models" (2024), https://arxiv.org/abs/2404.02657, and wutaiqiang/LLM_KD_AKL ff278be, AKL.py,
    where ``head_mass`` is 0.5.
    """
    p, q = outcomes(student_logprobs, teacher_logprobs, normalization)
    weight = head_share(p.detach(), q, head_mass, normalization == "tail")
    forward, reverse = kl_terms(q, p).sum(-1), kl_terms(p, q).sum(-1)
    return weight * forward + (1 - weight) * reverse


MANY = 1024
"""Outcomes above which those that can be heads are sorted alone. A GPU has to wait to know them."""


def head_share(
    p: Float[Tensor, "*pos n"], q: Float[Tensor, "*pos n"], head_mass: float, has_tail: bool
) -> Float[Tensor, "*pos"]:
    """Return the share of sum |q - p| that is in the teacher's head, 1/2 where the sum is 0."""
    if not 0 < head_mass < 1:
        raise ValueError(
            f"head_mass = {head_mass} is the teacher's mass in the head: it has to be between 0 "
            "and 1."
        )
    masses = torch.exp(q)
    gaps = (masses - torch.exp(p)).abs()
    total = gaps.sum(-1)
    if has_tail:
        masses, gaps = masses[..., :-1], gaps[..., :-1]
    if masses.shape[-1] > MANY:
        # All masses below this sum to less than what lies outside of the head: they need no order.
        least = (masses.sum(-1, keepdim=True) - head_mass) / masses.shape[-1]
        candidates = (masses >= least).reshape(-1, masses.shape[-1]).any(0)
        masses, gaps = masses[..., candidates], gaps[..., candidates]
    masses, order = masses.sort(dim=-1, descending=True, stable=True)
    in_head = masses.cumsum(-1) <= head_mass
    in_head[..., :1] = True
    head = torch.where(in_head, gaps.gather(-1, order), 0.0).sum(-1)
    return torch.where(total == 0, 0.5, head / torch.where(total == 0, 1.0, total))
