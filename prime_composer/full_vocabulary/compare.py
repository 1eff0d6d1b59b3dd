"""A divergence of ``prime_composer.divergences``, or any like them, over two heads, per row."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_composer.contract import Support, TwoHeads, given
from prime_composer.divergences import (
    Normalization,
    alpha_beta_divergence,
    forward_kl,
    generalized_jsd,
    kls_and_entropy,
    reverse_kl,
    skewed_forward_kl,
    skewed_reverse_kl,
    taid,
    todi,
    total_variation,
)
from prime_composer.full_vocabulary.heads import by_teachers, check
from prime_composer.full_vocabulary.kernel import kls
from prime_composer.full_vocabulary.sums import sum_over_ids
from prime_composer.full_vocabulary.token_blocks import by_token_blocks
from prime_composer.fused import fused


def compare(
    heads: TwoHeads, divergence: Callable[..., Tensor], /, **knobs: Any
) -> Float[Tensor, "n ..."]:
    """Return a divergence of student and teachers over the whole vocabulary, per row.

    One teacher has ``KERNELS`` for the KLs and TAID, in blocks of the vocabulary, and for ``SUMS``
    the backward in such blocks. All else, and ``TwoHeads.merged``, takes blocks of tokens. Each is
    six matrix products, and two more for each further teacher.

    ``divergence`` takes log p and log q, [block, V] each, and ``normalization``. It returns one
    number per row, or one row of numbers. The ids are those that every head has, and where some
    head has more, the last column is the bucket of all others. A tensor in ``knobs`` has one entry
    per row, [n, ...], and no gradient.
    """
    check(heads)
    n, device = heads.student.row_count, heads.student.hidden.device
    values, rows = [], []
    groups = list(by_teachers(heads))
    if not groups:  # no row counts
        none = torch.zeros(0, dtype=torch.long, device=device)
        groups = [(heads.at(none), none)]
    for group, index in groups:
        own = knobs
        if index is not None:
            own = {k: v[index] if isinstance(v, Tensor) else v for k, v in knobs.items()}
            rows.append(index)
        values.append(_of_group(group, divergence, own))
    if not rows:
        return values[0]
    joined = torch.cat(values)
    return joined.new_zeros((n, *joined.shape[1:])).index_copy(0, torch.cat(rows), joined)


def _of_group(heads: TwoHeads, divergence: Callable[..., Tensor], knobs: dict[str, Any]) -> Tensor:
    """Return a divergence of two heads all of whose rows count, for the same teachers."""
    sizes = {side.size for side in heads.sides}
    if heads.teacher_weights is None and not heads.merged:
        if divergence in KERNELS:
            return KERNELS[divergence](heads, **knobs)
        if divergence in SUMS and len(sizes) == 1 and torch.is_grad_enabled():
            return sum_over_ids(heads, _called(divergence, knobs))
    return by_token_blocks(heads, _called(divergence, knobs))


def _called(
    divergence: Callable[..., Tensor], knobs: dict[str, Any]
) -> Callable[[slice, Tensor, Tensor], Tensor]:
    compiled = fused(divergence)

    def call(rows: slice, log_p: Tensor, log_q: Tensor) -> Tensor:
        own = {k: v[rows] if isinstance(v, Tensor) else v for k, v in knobs.items()}
        return compiled(log_p, log_q, normalization="full", **own)

    return call


def _taid(
    heads: TwoHeads, t: float, form: Literal["cross_entropy", "kl"] = "cross_entropy"
) -> Tensor:
    result = kls(heads, forward=True, interpolation=t)
    value = given(result.forward)
    return value if form == "kl" else value + given(result.target_entropy)


def _kls_and_entropy(heads: TwoHeads, with_reverse: bool = True) -> Tensor:
    result = kls(heads, reverse=with_reverse, forward=True)
    values = result.forward, result.target_entropy, result.reverse
    return torch.stack([x for x in values if x is not None], dim=-1)


KERNELS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    reverse_kl: lambda heads, **_: given(kls(heads, reverse=True).reverse),
    forward_kl: lambda heads, **_: given(kls(heads, forward=True).forward),
    taid: _taid,
    kls_and_entropy: _kls_and_entropy,
}
"""What is faster than token blocks, by the function of ``divergences`` that it computes."""

SUMS: set[Callable[..., Tensor]] = {
    alpha_beta_divergence,
    generalized_jsd,
    skewed_forward_kl,
    skewed_reverse_kl,
    todi,
    total_variation,
}
"""Sums over ids of terms that depend on one id each, which ``sum_over_ids`` computes."""


@torch.no_grad()
def teacher_logprobs(heads: TwoHeads, token_ids: Int[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """Return log q at ``token_ids``, without a gradient."""
    size = min(side.size for side in heads.sides)
    if token_ids.shape[0] != heads.student.row_count:
        raise ValueError(
            f"token_ids has {token_ids.shape[0]} rows for {heads.student.row_count} hidden states."
        )
    low, high = (int(x) for x in token_ids.aminmax()) if token_ids.numel() else (0, 0)
    if low < 0 or high >= size:
        raise ValueError(
            f"token_ids reach from {low} to {high}, and the smallest head has a vocabulary of "
            f"{size}; mask padding ids out before."
        )
    return compare(heads, lambda _, log_q, ids, **__: log_q.gather(1, ids), ids=token_ids.long())


class WholeVocabulary(Support):
    """A support of all ids that every head has, of hidden states and heads.

    ``compare`` reads ``heads``, block by block. Whoever reads a tensor of the support gets all of
    it, [seq, V], in the memory that this takes.
    """

    heads: TwoHeads

    def __init__(self, heads: TwoHeads):
        # The class above is frozen.
        object.__setattr__(self, "heads", heads)

    def masked(self, mask: Bool[Tensor, " seq"]) -> "WholeVocabulary":
        """Return the support with the rows of ``mask`` only."""
        return WholeVocabulary(self.heads.masked(mask))

    def tempered(self, temperature: float) -> "WholeVocabulary":
        """Return the support with the logits of both sides divided by a temperature."""
        whole = self.heads.temperature * temperature
        return WholeVocabulary(dataclasses.replace(self.heads, temperature=whole))

    @cached_property
    def _tensors(self) -> Support:
        heads = self.heads
        size = min(side.size for side in heads.sides)
        ids = torch.arange(size, device=heads.student.hidden.device)
        with torch.no_grad():
            log_q = compare(heads, lambda _, log_q, **__: log_q[:, :size])
        support = Support(
            token_ids=ids.expand(heads.student.row_count, size),
            teacher_logprobs=log_q,
            student_logprobs=compare(heads, lambda log_p, _, **__: log_p[:, :size]),
        )
        return support if heads.mask is None else support.masked(heads.mask)

    @property
    def token_ids(self) -> Int[Tensor, "seq k"]:
        return self._tensors.token_ids

    @property
    def teacher_logprobs(self) -> Float[Tensor, "seq k"]:
        """Log q, [seq, V], without a gradient."""
        return self._tensors.teacher_logprobs

    @property
    def student_logprobs(self) -> Float[Tensor, "seq k"]:
        """Log p, [seq, V], with the gradient."""
        return self._tensors.student_logprobs


def on_support(
    support: Support,
    divergence: Callable[..., Tensor],
    normalization: Normalization = "tail",
    /,
    **knobs: Any,
) -> Float[Tensor, "seq ..."]:
    """Return D(p, q) per position. Over whole vocabularies it is computed a few tokens at a time.

    ``divergence`` is of masked log-probs [rows, k] at the temperature of the comparison, and sees
    each position alone. Over whole vocabularies with padding, the last column is all ids that only
    one side has. A tensor in ``knobs`` has one entry per position, [seq, ...], and no gradient.
    """
    if isinstance(support, WholeVocabulary):
        return compare(support.heads, divergence, **knobs)
    return divergence(
        support.student_logprobs, support.teacher_logprobs, normalization=normalization, **knobs
    )
