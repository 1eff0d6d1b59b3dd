"""Rollouts, and the protocol of what samples them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion of one prompt. CPU tensors.

    Attributes:
        token_ids: prompt and completion (with EOS, where it was sampled), [seq].
        loss_mask: True at the completion's tokens, [seq].
        inference_logprobs: log mu of each completion token under the distribution it was truly sampled from (after
            temperature and top-p), [seq], NaN at the prompt.
        finish_reason: "stop" at EOS or a stop token, "length" where the token budget ran out (a truncated rollout).
        prompt_index: which of the prompts of this ``generate`` call it answers; rollouts of one group share it.
    """

    token_ids: Int[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    finish_reason: Literal["stop", "length"]
    prompt_index: int

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.loss_mask].tolist()


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``temperature`` 0 is greedy. ``n`` completions per prompt (the group)."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@runtime_checkable
class Sampler(Protocol):
    """What samples rollouts of the student."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """``params.n`` rollouts per prompt of token ids, in prompt order; the same seed gives the same rollouts."""
        ...

    def update_weights(self, model: nn.Module) -> None:
        """Take over the weights of the trained model, and forget every cached prefix of the old ones."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher's view of one rollout's own tokens. CPU tensors, aligned with ``Rollout.token_ids``.

    Position t is conditioned on the tokens before t. Where ``loss_mask`` is False nothing is promised: NaN, id -1.

    Attributes:
        ref_logprobs: log q of the sampled token, [seq].
        token_ids: the teacher's top-K ids, most probable first, distinct, [seq, k]; k may be 0.
        teacher_logprobs: log q at these ids, normalised over the full vocabulary, T = 1, [seq, k].
    """

    ref_logprobs: Float[Tensor, " seq"]
    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]


@runtime_checkable
class Scorer(Protocol):
    """What scores rollouts with the teacher."""

    def score(
        self, rollouts: Sequence[Rollout], support_size: int | Literal["full"]
    ) -> list[TeacherScores]:
        """One ``TeacherScores`` per rollout, in order; ``support_size`` is K, 0 for the sampled token alone."""
        ...

    def close(self) -> None: ...
