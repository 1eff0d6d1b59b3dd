"""Checks of two heads, and their rows by the teachers that have a weight there."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from prime_composer.contract import TwoHeads


def by_teachers(heads: TwoHeads) -> Iterator[tuple[TwoHeads, Tensor | None]]:
    """Yield the rows of the mask for each set of teachers with a weight there, and their index.

    With one teacher and no mask the index is None.
    """
    weights, mask = heads.teacher_weights, heads.mask
    if weights is None:
        index = None if mask is None else mask.nonzero().squeeze(1)
        yield (heads if index is None else heads.at(index)), index
        return
    counted = weights > 0
    if mask is not None:
        counted = counted & mask.unsqueeze(1)
    patterns, place = counted.unique(dim=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        own = pattern.nonzero().squeeze(1)
        if len(own):
            index = (place == i).nonzero().squeeze(1)
            group = heads.at(index)
            yield (
                replace(
                    group,
                    teachers=tuple(group.teachers[j] for j in own.tolist()),
                    teacher_weights=weights[index][:, own] if len(own) > 1 else None,
                ),
                index,
            )


def check(heads: TwoHeads) -> None:
    """Refuse shapes, dtypes and weights that do not fit."""
    student, teachers, weights = heads.student, heads.teachers, heads.teacher_weights
    size = student.row_count
    names = ["teacher"] if len(teachers) == 1 else [f"teacher {i}" for i in range(len(teachers))]
    for name, logits in zip(["student", *names], heads.sides, strict=True):
        if logits.row_count != size:
            raise ValueError(
                f"The {name} has {logits.row_count} rows and the student {size}; "
                "row t of both belongs to the same token."
            )
        if logits.hidden.dtype != logits.weight.dtype:
            raise ValueError(
                f"The {name}'s hidden states are {logits.hidden.dtype} and its head is "
                f"{logits.weight.dtype}; cast one to the other's dtype."
            )
        if logits.bias is not None and logits.bias.shape[0] != logits.weight.shape[0]:
            raise ValueError(
                f"The {name}'s head has {logits.weight.shape[0]} rows and a bias of "
                f"{logits.bias.shape[0]}; pass the bias of the same head."
            )
    if (weights is None) != (len(teachers) == 1) or (
        weights is not None and weights.shape != (size, len(teachers))
    ):
        given = "no weights" if weights is None else f"weights of shape {tuple(weights.shape)}"
        raise ValueError(
            f"{len(teachers)} teacher(s) with {given}: a mixture needs one weight per row and "
            f"teacher, ({size}, {len(teachers)}), and one teacher needs none."
        )
    if not heads.temperature > 0:
        raise ValueError(f"temperature is {heads.temperature}; it has to be above 0.")
