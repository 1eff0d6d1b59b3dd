"""The two sides that are compared: hidden states and heads of a student and its teachers."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits of a model that are never computed at once: hidden states, and the head over them.

        z = scale * cap(hidden weight^T + bias),    cap(x) = softcap * tanh(x / softcap)

    The order is that of vLLM's LogitsProcessor.

    Attributes:
        hidden: final hidden states (after the last norm), [n, d].
        weight: the head's weight, [V, d], of the same dtype. A teacher's may be on another device,
            from which each pass copies it chunk by chunk.
        bias: the head's bias, [V]. None without one.
        softcap: bound of the logits (Gemma 2). None without one.
        scale: factor of the logits (Cohere's ``logit_scale``, one over Granite's
            ``logits_scaling``).
        rounded_to: dtype to which the head's products are rounded before all else. None keeps the
            float32 sums. The gradient passes the rounding unchanged.
    """

    hidden: Float[Tensor, "n d"]
    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, " v"] | None = None
    softcap: float | None = None
    scale: float = 1.0
    rounded_to: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.weight.shape[0]

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return self.hidden.shape[0]

    def at(self, index: Int[Tensor, " m"]) -> "Logits":
        """Return some of the rows."""
        return replace(self, hidden=self.hidden[index])


@dataclass(frozen=True, eq=False)
class TwoHeads:
    """Student and teachers over one vocabulary, row by row.

    Each side is normalized over the rows of its own head, as its server does. Where the heads have
    different sizes (padded vocabularies), the ids beyond the smallest are one outcome on each side,
    the bucket. The smallest is that of the student and of the row's own teachers. The bucket's mass
    is at least 1e-7: a side without such rows has mass 0 there, and a KL would be infinite. Whether
    two vocabularies are the same is for the caller to check.

    Attributes:
        student: the student's logits, with the gradient.
        teachers: one or more.
        teacher_weights: weight of each teacher in q = sum_i w_i q_i, [n, teachers]. Rows add up to
            1. A teacher of weight 0 may hold anything there, and costs nothing. None with one
            teacher.
        temperature: divides the logits of both sides. No factor T^2 compensates it.
        mask: True at the rows that count, [n]. Other rows may hold anything, NaN included. Their
            results are 0, and so are their gradients. Only the rows of the mask are computed, which
            needs their number on the host. None means all rows.
    """

    student: Logits
    teachers: tuple[Logits, ...]
    teacher_weights: Float[Tensor, "n k"] | None = None
    temperature: float = 1.0
    mask: Bool[Tensor, " n"] | None = None

    @property
    def sides(self) -> tuple[Logits, ...]:
        """The student, then the teachers."""
        return (self.student, *self.teachers)

    def at(self, index: Int[Tensor, " m"]) -> "TwoHeads":
        """Return some of the rows, all of which count."""
        weights = self.teacher_weights
        return replace(
            self,
            student=self.student.at(index),
            teachers=tuple(teacher.at(index) for teacher in self.teachers),
            teacher_weights=None if weights is None else weights[index],
            mask=None,
        )

    def masked(self, mask: Bool[Tensor, " n"]) -> "TwoHeads":
        """Return the same heads, with the rows of ``mask`` only."""
        return replace(self, mask=mask if self.mask is None else self.mask & mask)


def check(
    heads: TwoHeads, token_ids: Tensor | None, chunk: int | None, token_block: int | None
) -> None:
    student, teachers, weights = heads.student, heads.teachers, heads.teacher_weights
    size = student.row_count
    if not teachers:
        raise ValueError("there is no teacher to compare the student with.")
    names = ["teacher"] if len(teachers) == 1 else [f"teacher {i}" for i in range(len(teachers))]
    for name, logits in zip(["student", *names], heads.sides, strict=True):
        if logits.row_count != size:
            raise ValueError(
                f"The {name} has {logits.row_count} rows and the student {size}; "
                "row t of both belongs to the same token."
            )
        if logits.hidden.shape[1] != logits.weight.shape[1]:
            raise ValueError(
                f"The {name}'s hidden states have width {logits.hidden.shape[1]} and its head "
                f"{logits.weight.shape[1]}; pass the [V, d] weight of the same model."
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
    if (chunk is not None and chunk < 1) or (token_block is not None and token_block < 1):
        raise ValueError(
            f"chunk is {chunk} and token_block is {token_block}; both need at least 1."
        )
    vocab = min(logits.size for logits in heads.sides)
    if token_ids is not None and token_ids.numel():
        if token_ids.shape[0] != size:
            raise ValueError(f"token_ids has {token_ids.shape[0]} rows for {size} hidden states.")
        counted = token_ids if heads.mask is None else token_ids[heads.mask]
        low, high = (int(bound) for bound in counted.aminmax()) if counted.numel() else (0, 0)
        if low < 0 or high >= vocab:
            raise ValueError(
                f"token_ids reach from {low} to {high}, and the smallest head has a vocabulary of "
                f"{vocab}; mask padding ids out before."
            )
