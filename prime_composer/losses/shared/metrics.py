"""Metrics of a loss's signal, called under ``no_grad``: where it is, how few tokens carry it."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from prime_composer.contract import IN_TAIL, LossInputs, Mean, Support, given
from prime_composer.divergences import MAX_LOG_MASS, kl_terms, log1mexp, upcast
from prime_composer.losses.shared.reductions import masked_sum

DISTILLATION_KL = "distillation/kl"  # Of all that compare with a teacher; /NAME: an environment's


def token_mean(values: Shaped[Tensor, " seq"], mask: Bool[Tensor, " seq"]) -> Float[Tensor, ""]:
    """Return the mean over ``mask``, 0 for an empty mask, without a host synchronization.

    ``masked_mean`` synchronizes. It is for the metrics that are bit-equal to prime-rl's.
    """
    values = values if values.is_floating_point() else values.float()
    count = mask.sum()
    return Mean(masked_sum(values, mask) / count.clamp(min=1), count)


def top_share(
    values: Float[Tensor, " seq"], mask: Bool[Tensor, " seq"], share: float = 0.01
) -> Float[Tensor, ""]:
    """Return the part of sum |values| over ``mask`` that its largest tokens carry.

    0.01 is evenly spread over 100 tokens or more. Near 1, a handful of tokens trains the model: the
    first failure mode of "Revisiting On-Policy Distillation" (2026),
    https://arxiv.org/abs/2603.25562. The share of a small micro-batch is larger.
    """
    if values.numel() == 0:
        return Mean(values.new_zeros(()), mask.sum())
    size = torch.where(mask, upcast(values.detach()).abs(), 0.0)
    held = size.sort(descending=True).values.cumsum(0)
    count = mask.sum()
    last = (mask.sum() * share).ceil().long().clamp(min=1) - 1
    total = held[-1].clamp(min=torch.finfo(held.dtype).tiny)
    return Mean(held.gather(0, last.unsqueeze(0)).squeeze(0) / total, count)


def topk_overlap_min(student_logprobs: Float[Tensor, "*pos k"]) -> Float[Tensor, "*pos"]:
    """Return the least overlap of the support with the student's own top K that the masses allow.

    Of the tokens outside the support, at most p_tail/p_j can be more probable than token j. A token
    of rank r (from 0) within the support is certainly in the student's top K if r + p_tail/p_j < K.
    1 where the support is the whole vocabulary, as any of more than 1024 ids is taken for.
    """
    k = student_logprobs.shape[-1]
    if k > 1024:
        return torch.ones_like(student_logprobs[..., 0])
    ranked = student_logprobs.sort(dim=-1, descending=True).values
    log_tail = log1mexp(torch.logsumexp(ranked, dim=-1, keepdim=True).clamp(max=MAX_LOG_MASS))
    others = torch.exp((log_tail - ranked).clamp(max=80.0))
    rank = torch.arange(k, device=ranked.device, dtype=ranked.dtype)
    return (rank + others < k).to(ranked.dtype).mean(-1)


def in_top(logprobs: Float[Tensor, "*pos v"], k: int) -> Bool[Tensor, "*pos v"]:
    """Return which ids are among the K most probable ones."""
    chosen = logprobs.topk(min(k, logprobs.shape[-1])).indices
    return torch.zeros_like(logprobs, dtype=torch.bool).scatter_(-1, chosen, True)


def overlap(
    student_logprobs: Float[Tensor, "*pos m"],
    teacher_logprobs: Float[Tensor, "*pos m"],
    in_both: Bool[Tensor, "*pos m"],
    k: int,
) -> Float[Tensor, "*pos 2"]:
    """Return how far both agree on their K most probable ids: overlap, and advantage on it.

        |I| / K,    (1/|I|) sum_I p^(v) (log q^(v) - log p^(v)),    I = top K of p and top K of q

    ``in_both`` is I among m ids. p^ and q^ are renormalized within I, so that the advantage is
    -KL(p^ || q^) / |I| in nats: 0 where both agree on I, and for an empty I.

    Source: "Rethinking On-Policy Distillation" (2026), https://arxiv.org/abs/2604.13016, Eq. 6-7.
    The overlap is verl's ``overlap_ratio`` (verl-project/verl, pull request 6469). Its
    ``overlap_token_advantage`` is (1/|I|) sum_I q(v) (log p(v) - log q(v)), another number.
    """
    count = in_both.sum(-1)
    p, q = (torch.where(in_both, upcast(x), IN_TAIL) for x in (student_logprobs, teacher_logprobs))
    divergence = kl_terms(p.log_softmax(-1), q.log_softmax(-1)).sum(-1)
    return torch.stack([count / k, -divergence / count.clamp(min=1)], dim=-1)


def support_metrics(
    support: Support, mask: Bool[Tensor, " seq"], reverse: bool = True
) -> dict[str, Tensor]:
    """Return token means of the masses on the support, the parts of the tail KL, and the overlap.

    KL over the K + 1 outcomes is ``kl_in_support`` (mass on the support times the KL of the
    renormalized distributions) + ``kl_mass`` (KL of the Bernoulli distributions of being on the
    support). ``topk_overlap_min`` is the share of the K ids that are certainly among the student's
    own K most probable ones. The KL is KL(p || q) with ``reverse``, otherwise KL(q || p).
    """
    p, q = upcast(support.student_logprobs), upcast(support.teacher_logprobs)
    log_p_mass, log_q_mass = (torch.logsumexp(x, dim=-1).clamp(max=MAX_LOG_MASS) for x in (p, q))
    metrics = {
        "student_mass": token_mean(torch.exp(log_p_mass), mask),
        "teacher_mass": token_mean(torch.exp(log_q_mass), mask),
        "topk_overlap_min": token_mean(topk_overlap_min(p), mask),
    }
    if not reverse:
        p, q, log_p_mass, log_q_mass = q, p, log_q_mass, log_p_mass
    in_support = kl_terms(p, q).sum(-1) - torch.exp(log_p_mass) * (log_p_mass - log_q_mass)
    p_masses, q_masses = (torch.stack([x, log1mexp(x)], dim=-1) for x in (log_p_mass, log_q_mass))
    return metrics | {
        "kl_in_support": token_mean(in_support, mask),
        "kl_mass": token_mean(kl_terms(p_masses, q_masses).sum(-1), mask),
    }


@torch.no_grad()
def distillation_kl(
    inputs: LossInputs,
) -> tuple[Float[Tensor, " seq"], Bool[Tensor, " seq"]]:
    """Return an estimate of KL(p || q) per token in nats, and the tokens that have one.

        sum_{v in S} p(v) log(p(v)/q(v)) + [y not in S] log(p(y)/q(y))

    y is the sampled token, and S the ids of the support, none for a loss on the sampled token or on
    hidden states. Whatever S is, the expectation over y ~ p is the KL over the whole vocabulary, so
    that two losses compare. Both sides are at temperature 1; inside prime-rl the student is at the
    sampling temperature. A token that the data or the teacher wrote (log mu is NaN) has none, nor
    has one that the teacher rules out.
    """
    compared = inputs.loss_mask & ~inputs.inference_logprobs.isnan()
    kl = upcast(inputs.own_logprobs) - upcast(given(inputs.ref_logprobs))
    if inputs.support is not None:
        support = inputs.support.masked(compared)
        within = (support.token_ids == given(inputs.token_ids).unsqueeze(-1)).any(dim=-1)
        p, q = upcast(support.student_logprobs), upcast(support.teacher_logprobs)
        kl = kl_terms(p, q).sum(dim=-1) + torch.where(within, 0.0, kl)
    return kl, compared & kl.isfinite()
