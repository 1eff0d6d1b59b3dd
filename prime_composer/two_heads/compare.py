"""Divergences over two heads, per row: the functions that a loss calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.divergences import refuse_head_mass
from prime_composer.lm_head import accumulation_dtype
from prime_composer.two_heads.blocks import BLOCKS, Plan
from prime_composer.two_heads.divergence import Divergence, GeneralizedJSD
from prime_composer.two_heads.heads import TwoHeads, check
from prime_composer.two_heads.kernel import CompareHeads


class Comparison(NamedTuple):
    """Result of ``compare``, per row and in nats. What was not asked for is None.

    Attributes:
        reverse_kl: KL(p || q), [n].
        forward_kl: KL(r || p), [n], where r is the teacher q, or TAID's target.
        target_entropy: entropy of r, [n], without a gradient. Comes with ``forward_kl``.
        divergence: the sum of the divergence's terms, [n].
        student_logprobs: log p at ``token_ids``, [n, m], with the gradient.
        teacher_logprobs: log q at ``token_ids``, [n, m].
        top_gap: share of sum |q - p| on the teacher's top ids, [n], without a gradient.
    """

    reverse_kl: Float[Tensor, " n"] | None
    forward_kl: Float[Tensor, " n"] | None
    target_entropy: Float[Tensor, " n"] | None
    divergence: Float[Tensor, " n"] | None
    student_logprobs: Float[Tensor, "n m"] | None
    teacher_logprobs: Float[Tensor, "n m"] | None
    top_gap: Float[Tensor, " n"] | None


def compare(
    heads: TwoHeads,
    *,
    reverse: bool = False,
    forward: bool = False,
    interpolation: float | Float[Tensor, " n"] = 1.0,
    divergence: Divergence | None = None,
    parameters: Sequence[float | Float[Tensor, " n"]] = (),
    top_mass: float | None = None,
    token_ids: Int[Tensor, "n m"] | None = None,
    chunk: int | None = None,
    token_block: int | None = None,
) -> Comparison:
    """Return divergences and log-probs of chosen ids, all from the same passes.

    Matrix products: two in the first pass, two for ``divergence``, six for ``top_mass`` (ten in
    float64), four in the backward. Each of a mixture's teachers counts like one teacher, and takes
    one more before them to be normalized.

    Args:
        heads: student and teachers.
        reverse: return KL(p || q).
        forward: return KL(r || p), and the entropy of r.
        interpolation: t of TAID's target r = softmax((1 - t) sg a + t b). 1 is the teacher.
        divergence: any other sum over the vocabulary.
        parameters: its parameters, numbers or one per row. A gradient goes to those that need one.
        top_mass: return ``top_gap``, where the top has the teacher's most probable ids up to this
            mass (see ``adaptive_kl``).
        token_ids: ids whose log-probs are returned, [n, m].
        chunk: vocabulary entries per chunk. Like ``token_block``, it changes speed and memory only.
        token_block: rows per block. Both default to what fits the device's caches.

    Raises:
        ValueError: shapes, dtypes, sizes or ids that do not fit.
    """
    check(heads, token_ids, chunk, token_block)
    groups = _rows_by_teachers(heads)
    if any(len(teachers) < len(heads.teachers) for teachers, _ in groups):
        return _group_by_group(
            heads,
            groups,
            lambda group, index: compare(
                group,
                reverse=reverse,
                forward=forward,
                interpolation=_at(interpolation, index),
                divergence=divergence,
                parameters=[_at(value, index) for value in parameters],
                top_mass=top_mass,
                token_ids=None if token_ids is None else token_ids[index],
                chunk=chunk,
                token_block=token_block,
            ),
        )
    student = heads.student
    dtype, device = accumulation_dtype(student.hidden), student.hidden.device
    size = student.row_count

    def per_row(value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(dtype)
        return torch.full((size,), value, dtype=dtype, device=device)

    t = None
    if forward and not (isinstance(interpolation, float) and interpolation == 1):
        t = per_row(interpolation)
    rows = [per_row(value) for value in parameters]
    selected = student.hidden.new_zeros((size, 0), dtype=torch.long)
    if token_ids is not None:
        selected = token_ids.long()
    index = None
    if heads.mask is not None:
        index = heads.mask.nonzero().squeeze(1)
        heads = heads.at(index)
        t = None if t is None else t[index]
        rows, selected = [value[index] for value in rows], selected[index]
    default_block, default_chunk = BLOCKS.get(device.type, BLOCKS["cuda"])
    plan = Plan(
        heads=heads,
        dtype=dtype,
        reverse=reverse,
        forward=forward,
        interpolation=t,
        divergence=divergence,
        top_mass=top_mass,
        token_ids=selected,
        chunk=chunk or default_chunk,
        token_block=token_block or default_block,
    )
    results = CompareHeads.apply(plan, heads.student.hidden, student.weight, student.bias, *rows)
    if index is not None:
        results = [
            result
            if result is None
            else result.new_zeros((size, *result.shape[1:])).index_copy(0, index, result)
            for result in results
        ]
    comparison = Comparison(*results)
    if token_ids is None:
        return comparison._replace(student_logprobs=None, teacher_logprobs=None)
    return comparison


def _rows_by_teachers(heads: TwoHeads) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the rows of each set of teachers that have a weight there; [] with one teacher.

    Rows outside the mask are left out.
    """
    if heads.teacher_weights is None:
        return []
    counted = heads.teacher_weights > 0
    if heads.mask is not None:
        counted = counted & heads.mask.unsqueeze(1)
    patterns, place = counted.unique(dim=0, return_inverse=True)
    sets = [tuple(pattern.nonzero().squeeze(1).tolist()) for pattern in patterns]
    return [
        (teachers, (place == i).nonzero().squeeze(1)) for i, teachers in enumerate(sets) if teachers
    ]


def _group_by_group(
    heads: TwoHeads,
    groups: Sequence[tuple[tuple[int, ...], Tensor]],
    compared: Callable[[TwoHeads, Tensor], Comparison],
) -> Comparison:
    """Compare the rows of each set of teachers with that set alone, and put them in order."""
    parts: list[Comparison] = []
    rows: list[Tensor] = []
    weights = heads.teacher_weights
    assert weights is not None
    for teachers, index in groups:
        group = heads.at(index)
        group = replace(
            group,
            teachers=tuple(group.teachers[i] for i in teachers),
            teacher_weights=weights[index][:, list(teachers)] if len(teachers) > 1 else None,
        )
        parts.append(compared(group, index))
        rows.append(index)
    order, n = torch.cat(rows), heads.student.row_count

    def whole(values: tuple[Tensor | None, ...]) -> Tensor | None:
        given = [value for value in values if value is not None]
        if not given:
            return None
        joined = torch.cat(given)
        return joined.new_zeros((n, *joined.shape[1:])).index_copy(0, order, joined)

    return Comparison(*(whole(values) for values in zip(*parts, strict=True)))


def _at(value: float | Tensor, index: Tensor) -> float | Tensor:
    return value[index] if isinstance(value, Tensor) else value


def reverse_kl(heads: TwoHeads) -> Float[Tensor, " n"]:
    """Return KL(student || teacher) per row, as ``divergences.reverse_kl`` with all of V."""
    value = compare(heads, reverse=True).reverse_kl
    assert value is not None
    return value


def forward_kl(heads: TwoHeads) -> Float[Tensor, " n"]:
    """Return KL(teacher || student) per row, as ``divergences.forward_kl`` with all of V."""
    value = compare(heads, forward=True).forward_kl
    assert value is not None
    return value


def generalized_jsd(heads: TwoHeads, beta: float | Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return JSD_beta per row, as ``divergences.generalized_jsd`` with all of V.

    ``beta`` is the teacher's weight in the mixture. A number may be 0 (forward KL) or 1 (reverse
    KL). One per row has to be strictly between them.

    Raises:
        ValueError: a number outside [0, 1].
    """
    if isinstance(beta, (int, float)):
        if not 0 <= beta <= 1:
            raise ValueError(
                f"beta = {beta} is the teacher's weight in the mixture: it has to be in [0, 1]."
            )
        if beta in (0, 1):
            return reverse_kl(heads) if beta else forward_kl(heads)
    value = compare(heads, divergence=GeneralizedJSD(), parameters=(beta,)).divergence
    assert value is not None
    return value


def taid(
    heads: TwoHeads,
    t: float | Float[Tensor, " n"],
    form: Literal["cross_entropy", "kl"] = "cross_entropy",
) -> Float[Tensor, " n"]:
    """Return TAID per row, as ``divergences.taid`` with all of V: one target per ``t``."""
    result = compare(heads, forward=True, interpolation=t)
    assert result.forward_kl is not None and result.target_entropy is not None
    return result.forward_kl + (result.target_entropy if form == "cross_entropy" else 0)


def adaptive_kl(heads: TwoHeads, head_mass: float) -> Float[Tensor, " n"]:
    """Return AKL per row, as ``divergences.adaptive_kl`` with all of V.

    The bucket of padding ids never belongs to the teacher's head, like a tail bucket.

    Raises:
        ValueError: head_mass outside (0, 1).
    """
    refuse_head_mass(head_mass)
    result = compare(heads, reverse=True, forward=True, top_mass=head_mass)
    weight = result.top_gap
    assert result.reverse_kl is not None and result.forward_kl is not None and weight is not None
    return weight * result.forward_kl + (1 - weight) * result.reverse_kl
