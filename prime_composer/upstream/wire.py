"""The teacher's support on prime-rl's wire: it rides where router replay would.

``routed_experts`` is a per-token integer array [seq, a, b] that prime-rl already slices, packs, pads, checks and sends
in every version, and that its trainer drops when router replay is off. Ours is int32 [seq, 2, K]: the K ids, and the
bits of the K float32 log-probs. 8 K bytes per token.

What it costs: no router replay in the same run; a bin never mixes samples with and without a support; K is one number.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

MARK = 1.0
"""Stands in the place of a sequence's first log-prob, which nothing scores and prime-rl fills with 0.0, where this run's
teachers are mixed or routed by the adapter: the trainer sees by it that the adapter is on in the orchestrator too."""


class Payload(NamedTuple):
    """The teacher's top-K of every token.

    Attributes:
        token_ids: [seq, k].
        teacher_logprobs: log q at these ids, full-vocabulary normalised, [seq, k]; NaN where nothing was scored.
    """

    token_ids: Int[Tensor, "seq k"]
    teacher_logprobs: Float[Tensor, "seq k"]


def pack(token_ids: Any, logprobs: Any) -> Any:
    """[n, 2, K] int32 of numpy ids [n, K] and float32 log-probs [n, K]."""
    import numpy as np

    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    bits = np.ascontiguousarray(logprobs, dtype=np.float32).view(np.int32)
    return np.stack([ids, bits], axis=1)


def unpack(array: Int[Tensor, "seq a k"], k: int) -> Payload:
    """Take apart what ``pack`` made, after prime-rl's packing and padding (padding reads id 0, log-prob 0; masked).

    Raises:
        ValueError: it is not one of ours: router replay filled the field.
    """
    if array.dtype != torch.int32 or array.shape[1] != 2 or array.shape[2] != k:
        raise ValueError(
            f"routed_experts holds {array.dtype} {tuple(array.shape)} where the teacher's top-{k} support, int32 "
            f"(seq, 2, {k}), was expected. Router replay and a top-K support share this field: set "
            "trainer.enable_router_replay = false and inference enable_return_routed_experts = false."
        )
    return Payload(array[:, 0].long(), array[:, 1].contiguous().view(torch.float32))
