"""Contract between a trainer and a loss: prime-rl's, as in its newest version, plus the support.

``Scores`` are a teacher's numbers of one sequence, from whoever computed them to a trainer. There
they become a ``Support``, beside the student's.

Index t of every tensor refers to token t, conditioned on the tokens before it (prime-rl's
convention after its shift to the right): ``trainer_logprobs[t] = log p(token_ids[t] |
token_ids[:t])``.

Source: ``LossInputs`` and ``LossOutputs`` of prime_rl/trainer/rl/loss.py,
https://github.com/PrimeIntellect-ai/prime-rl (read at 559b4477). ``support``,
``hidden_states``, ``token_ids``, ``segment_ids``, ``balance``, ``untempered_logprobs`` and
``Mean`` are additions.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

T = TypeVar("T")

IN_TAIL = -9999.0
"""Log-prob of both sides at an id that the teacher could not answer for.

Its exponential is 0 in every dtype, so that a tail bucket, 1 minus the support's mass, has the mass
of the id. Unlike -inf it can be subtracted from itself: each divergence and each gradient has the
term 0.
"""

SIGN_BIT = -(2**31)  # Of an id in int32


class InvalidAnswer(ValueError):
    """An answer that no model can have given. The message names origin, place and value."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits of a model that are never computed at once: hidden states, and the head over them.

        z = scale * cap(hidden weight^T + bias),    cap(x) = softcap * tanh(x / softcap)

    The order is that of vLLM's LogitsProcessor. A teacher's weight may be on another device, from
    which each pass copies it chunk by chunk. The gradient passes the rounding unchanged.
    """

    hidden: Float[Tensor, "n d"]  # final hidden states (after the last norm), [n, d]
    weight: Float[Tensor, "v d"]  # the head's weight, [V, d], of the same dtype
    bias: Float[Tensor, " v"] | None = None  # the head's bias, [V]
    softcap: float | None = None  # bound of the logits (Gemma 2)
    scale: float = 1.0  # Cohere's ``logit_scale``, one over Granite's ``logits_scaling``
    rounded_to: torch.dtype | None = None  # of the products, before all else; None: float32 sums

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

    The mixture is q = sum_i w_i q_i, with ``teacher_weights`` w, [n, teachers]. A teacher of weight
    0 may hold anything there, and costs nothing. Rows outside the mask may hold anything, NaN
    included: their results are 0, and so are their gradients. Only the mask's rows are computed,
    which needs their number on the host.
    """

    student: Logits  # with the gradient
    teachers: tuple[Logits, ...]  # one or more
    teacher_weights: Float[Tensor, "n k"] | None = None  # rows add up to 1; None: one teacher
    temperature: float = 1.0  # divides the logits of both sides. No factor T^2 compensates it.
    mask: Bool[Tensor, " n"] | None = None  # True at the rows that count, [n]; None: all rows
    merged: tuple[int, ...] = ()  # ids that are one outcome, at the place of the first of them

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


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A teacher's output head.

    Log q of a sampled token, computed from hidden state and head, may be ``tolerance`` nats from
    the teacher's own number. None: they are not compared, since one model in this process gave
    both.
    """

    weight: Float[Tensor, "v d"]  # [V, d]
    bias: Float[Tensor, " v"] | None = None  # [V], of finite numbers
    scale: float = 1.0  # factor of the logits
    softcap: float | None = None  # bound of the logits
    tolerance: float | None = None
    origin: str = "The teacher"  # in words, for messages
    rounded_to: torch.dtype | None = None  # as in ``Logits``, by the teacher itself

    def __post_init__(self) -> None:
        """Refuse a bias that is not finite, which every road to a teacher's head passes.

        With -inf an id has no probability, and a KL is NaN or infinite.
        """
        if self.bias is not None:
            self.refuse_non_finite("bias", self.bias)

    def refuse_non_finite(self, name: str, rows: Float[Tensor, "v ..."]) -> None:
        """Raise ``InvalidAnswer`` where rows of the head's part ``name`` are NaN or infinite."""
        if torch.stack(rows.aminmax()).isfinite().all():
            return
        wrong = ~rows.isfinite().reshape(len(rows), -1).all(1)
        row = int(wrong.nonzero()[0])
        raise InvalidAnswer(
            f"{self.origin} has an output head whose {name} is NaN or infinite for id {row} (and "
            f"{int(wrong.sum()) - 1} other ids), so that no divergence is defined there. Use a "
            "checkpoint whose head is finite."
        )

    def over(self, hidden: Float[Tensor, "n d"]) -> Logits:
        """Return the teacher's logits over hidden states, as the teacher rounds them."""
        states, rounded = hidden.to(self.weight.dtype), self.rounded_to
        return Logits(states, self.weight, self.bias, self.softcap, self.scale, rounded)


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The last hidden states of one teacher for one sequence, after the final norm.

    ``ref_logprobs`` are compared with states and head. None where one model in this process gave
    these.
    """

    states: Float[Tensor, "n d"]  # row i predicts the token of row i of the scores; on the CPU
    head: TeacherHead  # turns them into logits; one object for all answers of a teacher
    weight: float = 1.0  # the teacher's share in a mixture
    ref_logprobs: Float[Tensor, " n"] | None = None  # its own log q of the sampled tokens, [n]


@dataclass(frozen=True, eq=False)
class Scores:
    """A teacher's scores of the tokens of one sequence from ``start`` on. All are on the CPU.

    Row i refers to token ``start + i``, conditioned on the tokens before it. Log-probs are in nats,
    of the full-vocabulary distribution at temperature 1. Whoever makes scores of a model's answer
    checks them, once (``backends.answers.checked``).

    Attributes:
        ref_logprobs: log q of the sampled token, [n].
        token_ids: ids of the support, distinct within a row, [n, k]; k may be 0. A teacher's own
            top K has the most probable one first.
        teacher_logprobs: log q of these ids, [n, k].
        hidden: the hidden states of each teacher, where they were asked for.
        known: which ids the teacher could answer for, [n, k]. None: all. The numbers of another id
            may be anything.
        start: position of the first row's token in the sequence.
        scored: which tokens the teacher has a score of, [n]. None: all. Another token does not
            train, and the numbers of its row may be anything.
    """

    ref_logprobs: Float[Tensor, " n"]
    token_ids: Int[Tensor, "n k"]
    teacher_logprobs: Float[Tensor, "n k"]
    hidden: tuple[HiddenStates, ...] = ()
    known: Bool[Tensor, "n k"] | None = None
    start: int = 0
    scored: Bool[Tensor, " n"] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.ref_logprobs.shape[0]

    @property
    def k(self) -> int:
        """Ids of the support per row."""
        return self.token_ids.shape[1]

    @property
    def all_known(self) -> Bool[Tensor, "n k"]:
        """``known`` as a tensor, also where the teacher could answer for all ids."""
        if self.known is not None:
            return self.known
        return torch.ones(self.token_ids.shape, dtype=torch.bool)

    @property
    def all_scored(self) -> Bool[Tensor, " n"]:
        """``scored`` as a tensor, also where the teacher has a score of all tokens."""
        if self.scored is not None:
            return self.scored
        return torch.ones(len(self), dtype=torch.bool)

    def rows(self, part: slice | Bool[Tensor, " n"]) -> "Scores":
        """Return some rows, by a slice with step 1 or a mask. ``start`` is that of the first one.

        A mask need not be of adjacent rows: the rows then have positions of their own.
        """
        if isinstance(part, slice):
            first, _, step = part.indices(len(self))
            assert step == 1, "adjacent rows, in order"
        elif part.all():
            return self
        else:
            first = int(part.int().argmax()) if part.any() else 0

        def cut(rows: Any) -> Any:
            return None if rows is None else rows[part]

        return replace(
            self,
            ref_logprobs=self.ref_logprobs[part],
            token_ids=self.token_ids[part],
            teacher_logprobs=self.teacher_logprobs[part],
            hidden=tuple(
                replace(share, states=share.states[part], ref_logprobs=cut(share.ref_logprobs))
                for share in self.hidden
            ),
            known=cut(self.known),
            start=self.start + first,
            scored=cut(self.scored),
        )

    def top(self, k: int) -> "Scores":
        """Return the scores with the first k ids of the support."""
        return replace(
            self,
            token_ids=self.token_ids[:, :k],
            teacher_logprobs=self.teacher_logprobs[:, :k],
            known=None if self.known is None else self.known[:, :k],
        )

    def to_bytes(self) -> bytes:
        """Return the support as bytes, row after row: rows can be cut and joined as bytes.

        A row has its K ids in int32, then its K log-probs in float32. The sign bit of an id says
        that it is not known.
        """
        ids = self.token_ids.int()
        if self.known is not None:
            ids = torch.where(self.known, ids, ids | SIGN_BIT)
        bits = self.teacher_logprobs.float().contiguous().view(torch.int32)
        return torch.stack([ids, bits], dim=1).numpy().tobytes()

    @classmethod
    def of_bytes(
        cls, content: bytes | Int[Tensor, "..."], ref_logprobs: Float[Tensor, " n"], start: int = 0
    ) -> "Scores":
        """Return the scores of ``to_bytes``, or of these bytes as int32, without hidden states."""
        if isinstance(content, bytes):
            content = torch.frombuffer(bytearray(content), dtype=torch.int32)
        n = len(ref_logprobs)
        packed = content.reshape(n, 2, content.numel() // max(1, 2 * n))
        known = packed[:, 0] >= 0
        return cls(
            ref_logprobs,
            (packed[:, 0] & ~SIGN_BIT).long(),
            packed[:, 1].contiguous().view(torch.float32),
            known=None if known.all() else known,
            start=start,
        )


@dataclass(frozen=True, eq=False)
class Support:
    """Log-probs of teacher and student at the same K token ids per position.

    Full vocabulary is K = V, and the sampled token alone is K = 1. Both sets of log-probs are
    normalized over the *full vocabulary*, never over the support, so that ``exp`` sums to at most
    1 along the last axis.

    Attributes:
        token_ids: ids of the support, distinct within a position, [seq, k].
        teacher_logprobs: log q at these ids, [seq, k], without a gradient.
        student_logprobs: log p at these ids, [seq, k], with the gradient.
        known: which ids the teacher could answer for, [seq, k]. None: all. Another id is in the
            tail on both sides: value and gradient of every loss are those without its entry, whose
            numbers may be anything.
    """

    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]
    student_logprobs: Float[Tensor, "seq k"]
    known: Bool[Tensor, "seq k"] | None = None

    def masked(self, mask: Bool[Tensor, " seq"]) -> "Support":
        """Replace what no loss may read: rows where ``mask`` is False, and ids that are not known.

        A masked row is p = q = 1/(K+1) on every id, where each divergence is 0. An id that is not
        known has p = q = 0, and is no token's. Called before any exp or log, it keeps NaN and -inf
        there out of the loss and of the gradient.
        """
        fill = -math.log(self.token_ids.shape[-1] + 1)
        ids, student = self.token_ids, self.student_logprobs
        teacher = self.teacher_logprobs.detach()
        if self.known is not None:
            ids = torch.where(self.known, ids, -1)
            teacher, student = (torch.where(self.known, x, IN_TAIL) for x in (teacher, student))
        rows = mask.unsqueeze(-1)
        return Support(
            token_ids=ids,
            teacher_logprobs=torch.where(rows, teacher, fill),
            student_logprobs=torch.where(rows, student, fill),
        )

    def of_ids(self, index: Int[Tensor, "seq m"]) -> "Support":
        """Return the entries at these places of each row."""
        return Support(
            self.token_ids.gather(-1, index),
            self.teacher_logprobs.gather(-1, index),
            self.student_logprobs.gather(-1, index),
            None if self.known is None else self.known.gather(-1, index),
        )

    def tempered(self, temperature: float) -> "Support":
        """Return both distributions within the support, with the logits divided by a temperature.

        Temperature 1 changes nothing, and keeps the masses outside.
        """
        if temperature == 1:
            return self
        log_q, log_p = (
            (x.to(torch.promote_types(x.dtype, torch.float32)) / temperature).log_softmax(-1)
            for x in (self.teacher_logprobs, self.student_logprobs)
        )
        return Support(self.token_ids, log_q, log_p)


class StopLogprobs(NamedTuple):
    """Log p at ids that end an answer, [seq, m] each, with the gradient."""

    token_ids: tuple[int, ...]
    logprobs: Float[Tensor, "seq m"]  # at temperature 1, wherever that is known
    tempered: Float[Tensor, "seq m"] | None = None  # at the sampling temperature, if another


@dataclass(eq=False)
class LossInputs:
    """Inputs of a loss, for one sequence or for several that are packed one after the other.

    Attributes:
        trainer_logprobs: log p of each token under the policy in training, [seq], with the
            gradient. It has the sampling temperature, as in prime-rl, so that p/mu compares like
            with like.
        inference_logprobs: log mu of each token under the student's policy that sampled it, [seq].
            NaN where something else wrote the token: the data, or the teacher.
        ref_logprobs: log q of each token under the teacher, [seq]. None without a teacher.
        advantages: RL advantage of each token, [seq]. None without a reward.
        loss_mask: True at the tokens that train, [seq]. Other positions of every tensor may
            contain anything, NaN included.
        loss_weights: factor of each token's loss, [seq]. None means 1.
        support: log-probs of teacher and student at the support. None without a support. A loss
            with k = "full" finds all ids here, from ``hidden_states``.
        hidden_states: hidden states and output heads of student and teachers, from which a loss
            compares whole vocabularies. Row t belongs to token t: it is the state after the tokens
            before t. None without them.
        token_ids: the tokens themselves, [seq]. Token-wise modifiers read them.
        segment_ids: index of each token's sequence, [seq], non-decreasing. None means one sequence.
        balance: weight of each token by the loss's ``Balance``, [seq]. None without one.
        untempered_logprobs: log p at temperature 1, [seq], with the gradient. None where that is
            ``trainer_logprobs``, and inside prime-rl, whose trainer has the other alone.
        stops: log p at the ids of the loss's ``Stops``. None without them.
    """

    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    ref_logprobs: Float[Tensor, " seq"] | None
    advantages: Float[Tensor, " seq"] | None
    loss_mask: Bool[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None = None
    support: Support | None = None
    hidden_states: TwoHeads | None = None
    token_ids: Int[Tensor, " seq"] | None = None
    segment_ids: Int[Tensor, " seq"] | None = None
    balance: Float[Tensor, " seq"] | None = None
    untempered_logprobs: Float[Tensor, " seq"] | None = None
    stops: StopLogprobs | None = None

    @property
    def own_logprobs(self) -> Float[Tensor, " seq"]:
        """Log p to compare with ``ref_logprobs``, [seq]: at temperature 1 wherever it is known."""
        untempered = self.untempered_logprobs
        return self.trainer_logprobs if untempered is None else untempered


@dataclass(eq=False)
class LossOutputs:
    """Result of a loss.

    Attributes:
        loss: SUM over the tokens of the mask, 0-dim, in the graph. The trainer divides by the
            global token count.
        metrics: 0-dim detached tensors, the same keys on every call. A loss function returns bare
            names, and a bound loss puts ``<loss>/`` in front. A trainer joins micro-batches by what
            a metric is a mean over: all tokens if it is a plain tensor, else see ``Mean``.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


def given(value: T | None) -> T:
    """Return an input whose presence the loss's ``needs`` guarantee."""
    assert value is not None, "the loss reads an input that its needs do not name"
    return value


class Mean(Tensor):
    """Metric that is a mean over some things, such as the tokens that a modifier has left.

    The mean is 0 where there are none. It is detached, and operations on it return plain tensors.
    """

    # torch annotates the stub of this attribute as a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    count: Tensor  # their number, 0-dim

    def __new__(cls, value: Tensor, count: Tensor) -> "Mean":
        metric = Tensor._make_subclass(cls, value.detach())
        metric.count = count.detach()
        return metric
