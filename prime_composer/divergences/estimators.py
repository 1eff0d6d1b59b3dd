"""Estimators on the sampled token: the gradient of an estimator is not that of its value."""

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences.base import upcast


def k1(
    student_logprobs: Float[Tensor, "..."], teacher_logprobs: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return log p(y) - log q(y) at sampled tokens y ~ p.

    It is an unbiased estimate of the reverse KL, as a *detached reward* only. Backpropagated, its
    expected gradient is 0 (E_p grad log p = 0), without the teacher. ``weighted_k1`` is the loss.
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
