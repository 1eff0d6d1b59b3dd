"""The protocol of what scores rollouts with the teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.rollout import Rollout


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher's view of one rollout's own tokens. CPU tensors, aligned with ``Rollout.token_ids``.

    Position t is conditioned on the tokens before t. Where ``loss_mask`` is False nothing is promised: NaN, id -1.

    Attributes:
        ref_logprobs: log q of the sampled token, [seq].
        token_ids: the teacher's top-K ids, most probable first, distinct, [seq, k]; k may be 0.
        teacher_logprobs: log q at these ids, normalised over the full vocabulary, T = 1, [seq, k].
    """

    ref_logprobs: Float[Tensor, "seq"]
    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]


@runtime_checkable
class Scorer(Protocol):
    """What scores rollouts with the teacher."""

    def score(self, rollouts: Sequence[Rollout], support_size: int | Literal["full"]) -> list[TeacherScores]:
        """One ``TeacherScores`` per rollout, in order; ``support_size`` is K, 0 for the sampled token alone."""
        ...

    def close(self) -> None: ...
