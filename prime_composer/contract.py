"""The contract between a trainer and a loss: prime-rl's, in its newest spelling, plus the teacher's support.

Position t of every tensor speaks about token t of the sequence, given the tokens before it (prime-rl's convention after
its shift to the right): ``trainer_logprobs[t] = log p(token_ids[t] | token_ids[:t])``.

Source: ``LossInputs`` and ``LossOutputs`` of prime_rl/trainer/rl/loss.py, https://github.com/PrimeIntellect-ai/prime-rl
(read at 559b4477). ``support``, ``token_ids``, ``segment_ids`` and ``replay`` are ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Support:
    """Teacher and student on the same K token ids per position; the one abstraction behind every objective.

    Full vocabulary is K = V; the sampled token alone is K = 1. Both sets of log-probabilities are normalised over the
    *full vocabulary* (never over the support), so ``exp`` sums to at most 1 along the last axis.

    Attributes:
        token_ids: ids of the support, distinct within a position, [seq, k].
        teacher_logprobs: log q at these ids, [seq, k]; no gradient.
        student_logprobs: log p at these ids, [seq, k]; carries the gradient.
    """

    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]
    student_logprobs: Float[Tensor, "seq k"]

    def masked(self, mask: Bool[Tensor, " seq"]) -> "Support":
        """Both distributions replaced by the same harmless one where ``mask`` is False, before any exp or log.

        There p = q = 1/(K+1) on every id: each divergence is 0, and no NaN or -inf that stands there reaches the loss
        or, through ``torch.where``, a gradient.
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
    """What a loss may read, for one sequence or for several packed one after the other.

    Attributes:
        trainer_logprobs: log p of each token under the policy being trained, [seq]; carries the gradient.
        inference_logprobs: log mu of each token under the policy that sampled it, [seq].
        ref_logprobs: log q of each token under the teacher, [seq]; None where no teacher scored.
        advantages: RL advantage of each token, [seq]; None where there is no reward.
        loss_mask: True at the tokens that train, [seq]. Values elsewhere may be anything, NaN included.
        loss_weights: factor of each token's loss, [seq]; None means 1.
        support: teacher and student log-probabilities on the support; None where no support was scored.
        token_ids: the tokens themselves, [seq]; read by token-wise modifiers.
        segment_ids: which sequence a token belongs to, [seq], non-decreasing; None means one sequence.
        replay: inputs of the replay channel, a pack of preference pairs: segment 2i is the chosen and 2i + 1 the rejected
            response of pair i. None where the trainer carries no pairs.
    """

    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    ref_logprobs: Float[Tensor, " seq"] | None
    advantages: Float[Tensor, " seq"] | None
    loss_mask: Bool[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None = None
    support: Support | None = None
    token_ids: Int[Tensor, " seq"] | None = None
    segment_ids: Int[Tensor, " seq"] | None = None
    replay: "LossInputs | None" = None


@dataclass(eq=False)
class LossOutputs:
    """What a loss returns.

    Attributes:
        loss: the SUM over the tokens of the mask, 0-dim, in the graph; the trainer divides by the global token count.
        metrics: 0-dim detached tensors named ``<loss>/<what>``, the same keys on every call.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


LossFn = Callable[[LossInputs], LossOutputs]
