"""Contract between a trainer and a loss: prime-rl's, as in its newest version, plus the support.

Index t of every tensor refers to token t, conditioned on the tokens before it (prime-rl's
convention after its shift to the right): ``trainer_logprobs[t] = log p(token_ids[t] |
token_ids[:t])``.

Source: ``LossInputs`` and ``LossOutputs`` of prime_rl/trainer/rl/loss.py,
https://github.com/PrimeIntellect-ai/prime-rl (read at 559b4477). ``support``,
``hidden_states``, ``credit``, ``contrast_logprobs``, ``token_ids``, ``segment_ids``,
``by_teacher``, ``replay`` and the metric types are additions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_composer.two_heads.heads import TwoHeads

T = TypeVar("T")


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
    """

    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]
    student_logprobs: Float[Tensor, "seq k"]

    def masked(self, mask: Bool[Tensor, " seq"]) -> "Support":
        """Replace both distributions by the same one where ``mask`` is False.

        It is p = q = 1/(K+1) on every id, where each divergence is 0. Called before any exp or
        log, it keeps NaN and -inf at masked positions out of the loss and of the gradient.
        """
        fill = -math.log(self.token_ids.shape[-1] + 1)
        rows = mask.unsqueeze(-1)
        return Support(
            token_ids=self.token_ids,
            teacher_logprobs=torch.where(rows, self.teacher_logprobs.detach(), fill),
            student_logprobs=torch.where(rows, self.student_logprobs, fill),
        )


@dataclass(eq=False)
class LossInputs:
    """Inputs of a loss, for one sequence or for several that are packed one after the other.

    Attributes:
        trainer_logprobs: log p of each token under the policy in training, [seq], with the
            gradient.
        inference_logprobs: log mu of each token under the student's policy that sampled it, [seq].
            NaN where something else wrote the token: the data, or the teacher.
        ref_logprobs: log q of each token under the teacher, [seq]. None without a teacher.
        advantages: RL advantage of each token, [seq]. None without a reward.
        credit: credit of each token that depends on the other rollouts of its group, [seq]
            (``LossConfig.credit``). None where nobody computes it.
        contrast_logprobs: log of the mean probability of each token under the teacher with wrong
            hints, [seq]. None without wrong hints.
        loss_mask: True at the tokens that train, [seq]. Other positions of every tensor may
            contain anything, NaN included.
        loss_weights: factor of each token's loss, [seq]. None means 1.
        support: log-probs of teacher and student at the support. None without a support.
        hidden_states: hidden states and output heads of student and teachers, from which a loss
            compares whole vocabularies. Row t belongs to token t: it is the state after the tokens
            before t. None without them.
        token_ids: the tokens themselves, [seq]. Token-wise modifiers read them.
        segment_ids: index of each token's sequence, [seq], non-decreasing. None means one sequence.
        by_teacher: True at the tokens of sequences that the teacher sampled, [seq]. None where the
            trainer does not say.
        replay: inputs of the replay channel, a pack of preference pairs. Segment 2i is the chosen
            and 2i + 1 the rejected response of pair i. None without pairs.
    """

    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    ref_logprobs: Float[Tensor, " seq"] | None
    advantages: Float[Tensor, " seq"] | None
    loss_mask: Bool[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None = None
    support: Support | None = None
    hidden_states: TwoHeads | None = None
    credit: Float[Tensor, " seq"] | None = None
    contrast_logprobs: Float[Tensor, " seq"] | None = None
    token_ids: Int[Tensor, " seq"] | None = None
    segment_ids: Int[Tensor, " seq"] | None = None
    by_teacher: Bool[Tensor, " seq"] | None = None
    replay: "LossInputs | None" = None


@dataclass(eq=False)
class LossOutputs:
    """Result of a loss.

    Attributes:
        loss: SUM over the tokens of the mask, 0-dim, in the graph. The trainer divides by the
            global token count.
        metrics: 0-dim detached tensors, the same keys on every call. A loss function returns bare
            names, and a bound loss puts ``<loss>/`` in front. The type says how a trainer averages
            the metric over micro-batches: a plain tensor is a mean over tokens, see ``PairMean``
            and ``Count``.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


LossFn = Callable[[LossInputs], LossOutputs]


class _Metric(Tensor):
    """A detached tensor with a type of its own. Operations on it return plain tensors."""

    # torch annotates the stub of this attribute as a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, value: Tensor) -> Any:
        return Tensor._make_subclass(cls, value.detach())


class PairMean(_Metric):
    """Metric that is a mean over preference pairs."""


class Count(_Metric):
    """Metric that is a number of things: micro-batches add up."""


def given(value: T | None) -> T:
    """Return an input whose presence the loss's ``needs`` guarantee."""
    assert value is not None, "the loss reads an input that its needs do not name"
    return value
