"""The teacher's support on prime-rl's wire, in the field ``routed_experts``.

That field is meant for router replay: a per-token integer array [seq, a, b]. Every version of
prime-rl slices, packs, pads, checks and sends it, and its trainer drops it where router replay is
off. Ours is int32 [seq, 2, K]: the K ids, and the bits of the K float32 log-probs. That is 8 K
bytes per token.

Its price: no router replay in the same run; a bin never mixes samples with and without a support; K
is one number for the run.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

MARK = 1.0
"""Value of a sequence's first log-prob in a run whose teachers are mixed or routed by the adapter.

Nothing scores the first token, and prime-rl fills its log-prob with 0.0. A log-prob is never 1.0,
so the trainer recognizes by it that the orchestrator runs with the adapter too. The trainer masks
the first token, so that no loss reads the mark.
"""


NO_ADVANTAGE = 2.0**-100
"""An advantage of 0 of a token that a teacher scores too. The trainer makes it 0 again.

A power of two is itself in float32 and in bfloat16.
"""


class Payload(NamedTuple):
    """The teacher's top-K of every token.

    Attributes:
        token_ids: [seq, k].
        teacher_logprobs: log q at these ids, full-vocabulary normalized, [seq, k]; NaN where
            nothing was scored.
    """

    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]


def pack(token_ids: Any, logprobs: Any) -> Any:
    """Return int32 [n, 2, K] of NumPy ids [n, K] and float32 log-probs [n, K]."""
    import numpy as np  # the plain launcher's trainer packs nothing and may lack NumPy

    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    bits = np.ascontiguousarray(logprobs, dtype=np.float32).view(np.int32)
    return np.stack([ids, bits], axis=1)


def unpack(array: Int[Tensor, "seq a k"], k: int) -> Payload:
    """Return what ``pack`` packed, after prime-rl's packing and padding.

    Padding reads id 0 and log-prob 0; it is masked.

    Raises:
        ValueError: router replay filled the field, or K differs.
    """
    if array.dtype != torch.int32 or array.shape[1] != 2 or array.shape[2] != k:
        raise ValueError(
            f"routed_experts holds {array.dtype} {tuple(array.shape)} where the teacher's top-{k} "
            f"support, int32 (seq, 2, {k}), was expected. Router replay and a top-K support share "
            "this field: set trainer.enable_router_replay = false and inference "
            "enable_return_routed_experts = false."
        )
    return Payload(array[:, 0].long(), array[:, 1].contiguous().view(torch.float32))
