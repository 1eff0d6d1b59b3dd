"""Divergences as sums over the vocabulary, each with its derivative."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor


class Divergence:
    """A divergence as a sum over the vocabulary: sum_v terms(log p_v, log q_v, parameters).

    A subclass defines ``terms``. Derivative and sums then come from autograd, chunk by chunk, and
    ``detach`` in ``terms`` is a stop-gradient. It may define ``slopes`` and ``sums`` to be faster.
    ``slopes`` and ``sums`` may overwrite log p and log q, ``terms`` may not.

    p and q sum to 1 in exact arithmetic only. Add c (q - p) so that the terms' first derivatives
    vanish at p = q: the value is the same, and the rounding of log p no longer matters.
    """

    def terms(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return the term of each id. ``log_q`` has no gradient."""
        raise NotImplementedError

    def slopes(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return the derivative of each term with respect to its own log p."""
        return term_gradients(self, log_p, log_q, parameters, torch.ones_like(log_p))[0]

    def sums(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the sums of terms and slopes over the ids."""
        values = self.terms(log_p, log_q, *parameters).sum(1)
        return values, self.slopes(log_p, log_q, *parameters).sum(1)


class Terms(Divergence):
    """A divergence that is a function's sum over the vocabulary.

    Args:
        function: of log p and log q [n, c], and of parameters [n, 1]; returns terms [n, c].
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function

    def terms(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return the function's terms."""
        return self.function(log_p, log_q, *parameters)


class ReverseKL(Divergence):
    """KL(p || q) = sum_v p log p/q - p + q. ``compare`` has the same in one pass."""

    def terms(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return p log p/q - p + q."""
        p, q = log_p.exp(), log_q.exp()
        return p * (log_p - log_q) - p + q

    def slopes(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return p log p/q."""
        return torch.sub(log_p, log_q, out=log_q).mul_(log_p.exp_())


class ForwardKL(Divergence):
    """KL(q || p) = sum_v q log q/p - q + p. ``compare`` has the same in one pass."""

    def terms(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return q log q/p - q + p."""
        p, q = log_p.exp(), log_q.exp()
        return q * (log_q - log_p) - q + p

    def slopes(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return p - q."""
        return log_p.exp_().sub_(log_q.exp_())


class GeneralizedJSD(Divergence):
    """JSD_beta = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    The parameter is beta, the teacher's weight in the mixture, strictly between 0 and 1.
    """

    def terms(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return beta q log q/m + (1 - beta) p log p/m."""
        (beta,) = parameters
        p, q = (x.exp().clamp(min=torch.finfo(x.dtype).tiny) for x in (log_p, log_q))
        m = torch.lerp(p, q, beta)
        return beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()

    def slopes(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n c"]:
        """Return (1 - beta) p log p/m."""
        (beta,) = parameters
        p, q = (x.exp_().clamp_(min=torch.finfo(x.dtype).tiny) for x in (log_p, log_q))
        m = torch.lerp(p, q, beta, out=q)
        return torch.div(p, m, out=m).log_().mul_(p).mul_(1 - beta)

    def sums(
        self,
        log_p: Float[Tensor, "n c"],
        log_q: Float[Tensor, "n c"],
        *parameters: Float[Tensor, "n 1"],
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the sums of terms and slopes. Each logarithm is computed once."""
        (beta,) = parameters
        p, q = (x.exp_().clamp_(min=torch.finfo(x.dtype).tiny) for x in (log_p, log_q))
        m = torch.lerp(p, q, beta)
        student = (p / m).log_().mul_(p).sum(1) * (1 - beta).squeeze(1)
        teacher = torch.div(q, m, out=m).log_().mul_(q).sum(1) * beta.squeeze(1)
        return student + teacher, student


def term_gradients(
    divergence: Divergence,
    log_p: Tensor,
    log_q: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of sum(grad * terms) for log p and for each parameter, by autograd."""
    leaves = [x.detach().requires_grad_() for x in (log_p, *parameters)]
    with torch.enable_grad():
        terms = divergence.terms(leaves[0], log_q, *leaves[1:])
    if not terms.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(terms, leaves, grad, allow_unused=True, materialize_grads=True)
