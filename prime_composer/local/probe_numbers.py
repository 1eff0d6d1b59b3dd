"""Read from scores what a top K hides, and whether the head's logits were rounded to bfloat16."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from prime_composer.divergences import entropy, reverse_kl

LARGEST_HIDDEN_SHARE = 0.05
"""Share of the KL at the largest K that the recommended K may hide."""

GRID = 2.0**-9
"""Spacing of the bfloat16 numbers in [0.25, 0.5). Those of 0.25 and more are multiples of it."""

ROUNDING = 2.0**-18
"""Largest distance from the grid, in nats: the rounding of a float32 log-softmax above -32."""

RANKS = 4
"""Ids per position whose differences are read. The largest logits have the coarsest spacing."""

FEWEST_DIFFERENCES = 20
"""With less of them nothing is said about the head."""

SHARE_ON_GRID = 0.9
"""Of the differences of a bfloat16 head; 0.004 of those of a float32 head are there by chance."""


@dataclass(frozen=True)
class HiddenByK:
    """What a support of the teacher's K most probable ids hides.

    Attributes:
        k: the support's size.
        mass_outside: the teacher's mean probability outside the support.
        reverse_kl: L(K) of ``mean_reverse_kl``, in nats per token.
        hidden: 1 - L(K) / L(largest K).
    """

    k: int
    mass_outside: float
    reverse_kl: float
    hidden: float


def mean_reverse_kl(
    student: Float[Tensor, "n k_max"], teacher: Float[Tensor, "n k_max"], k: int
) -> float:
    """Return the mean reverse KL on the teacher's top K and a tail, in nats per token.

        L(K) = (1/N) sum_t [ sum_{v in S_t(K)} p_t(v) log p_t(v)/q_t(v) + P'_t log P'_t/Q'_t ]

    S_t(K) are the teacher's K most probable ids at position t. P'_t and Q'_t are the masses that
    student and teacher have outside them. L never falls with K (log-sum inequality), and L(V) is
    the full reverse KL, up to the 1e-7 of mass that ``with_tail`` keeps.

    Args:
        student: log p of the teacher's ids, most probable for the teacher first.
        teacher: log q of the same ids.
        k: K, at most the number of columns.
    """
    p, q = student[:, :k].double(), teacher[:, :k].double()
    return float(reverse_kl(p, q, normalization="tail").mean())


def hidden_by_k(
    student: Float[Tensor, "n k_max"], teacher: Float[Tensor, "n k_max"], k: int
) -> HiddenByK:
    """Return what a top K hides; arguments are those of ``mean_reverse_kl``."""
    measured = mean_reverse_kl(student, teacher, k)
    largest = mean_reverse_kl(student, teacher, teacher.shape[1])
    outside = 1 - teacher[:, :k].double().exp().sum(dim=-1)
    return HiddenByK(
        k=k,
        mass_outside=float(outside.clamp(min=0).mean()),
        reverse_kl=measured,
        hidden=max(0.0, 1 - measured / largest) if largest > 0 else 0.0,
    )


def recommended_k(student: Float[Tensor, "n k_max"], teacher: Float[Tensor, "n k_max"]) -> int:
    """Return the smallest K with L(K) >= (1 - LARGEST_HIDDEN_SHARE) L(largest K).

    L is that of ``mean_reverse_kl``. It never falls with K, so bisection finds the smallest one.
    """
    low, high = 1, teacher.shape[1]
    while low < high:
        middle = (low + high) // 2
        if hidden_by_k(student, teacher, middle).hidden <= LARGEST_HIDDEN_SHARE:
            high = middle
        else:
            low = middle + 1
    return low


def mean_entropy(teacher: Float[Tensor, "n k_max"]) -> float:
    """Return the teacher's mean entropy in nats; below K = V a lower bound (one tail outcome)."""
    return float(entropy(teacher.double(), normalization="tail").mean())


def share_on_bfloat16_grid(teacher: Float[Tensor, "n k"]) -> tuple[float, int]:
    """Return which share of the differences between top log-probs are multiples of ``GRID``.

    Log-probs of one position are logits minus one number, so that their differences are those of
    the logits. Equal log-probs and those below -30 are left out.

    Args:
        teacher: log q of the teacher's ids, most probable first.

    Returns:
        The share (0 without a difference), and the number of differences.
    """
    top = teacher[:, :RANKS].double()
    differences = top[:, :1] - top[:, 1:]
    counted = differences[(top[:, 1:] > -30) & (differences > ROUNDING)]
    if not len(counted):
        return 0.0, 0
    distance = (counted / GRID - (counted / GRID).round()).abs() * GRID
    return float((distance <= ROUNDING).double().mean()), len(counted)


def is_bfloat16_like(teacher: Float[Tensor, "n k"]) -> bool:
    """Return whether scores show logits that were rounded to bfloat16.

    A float16 head shows the same where its top logits are 2 and more: they are on the grid too.
    """
    share, count = share_on_bfloat16_grid(teacher)
    return count >= FEWEST_DIFFERENCES and share >= SHARE_ON_GRID
