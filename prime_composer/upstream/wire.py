"""What a teacher's scores look like between prime-rl's orchestrator and its trainer.

prime-rl sends one list of floats per sample, a log-prob for each token, and has no field for
anything else that a teacher says. So three things travel where they have no field of their own:

    the support        in ``routed_experts`` (``pack``, ``unpack``)
    who asked          ``MARK`` in the first place of the list, which no teacher scores
    no teacher's score NaN in the list. prime-rl's own filling, 0.0, would be a probability of 1

``routed_experts`` is meant for router replay: a per-token integer array [seq, a, b]. Every version
of prime-rl slices, packs, pads, checks and sends it, and its trainer drops it where router replay
is off. Ours is int32 [seq, 2, K], ``Scores.to_bytes``: 8 K bytes per token. Its price: no router
replay in the same run; a bin never mixes samples with and without a support; K is one number for
the run.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from prime_composer.contract import Scores

# Value of a sequence's first log-prob in a run whose teachers are mixed or routed by the adapter.
# Nothing scores the first token, and prime-rl fills its log-prob with 0.0. A log-prob is never 1.0,
# so the trainer recognizes by it that the orchestrator runs with the adapter too. The trainer masks
# the first token, so that no loss reads the mark.
MARK = 1.0

# An advantage of 0 of a token that a teacher scores too. The trainer makes it 0 again. A power of
# two is itself in float32 and in bfloat16.
NO_ADVANTAGE = 2.0**-100

ROUTER_REPLAY = (
    "Router replay and the teacher's top-K support share the field routed_experts: start the "
    "student's server with enable_return_routed_experts = false, set trainer.enable_router_replay "
    '= false, or let the trainer ask the teacher (asked_by = "trainer").'
)
"""Why a sample or a batch is refused."""


class Sent(list[float]):
    """The list of log-probs that prime-rl's own request returns, and the scores behind it.

    prime-rl passes the list on between two hooks, and its self-distillation cuts the hint off. A
    slice keeps its part of the scores.
    """

    def __init__(self, values: Iterable[float], scores: Scores):
        super().__init__(values)
        self.scores = scores

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return Sent(super().__getitem__(index), self.scores.rows(index))


def sent(scores: Scores) -> Sent:
    """Return what prime-rl gets for a sequence: 0.0 before the first score, with no support."""
    n, k = scores.start, scores.k
    whole = Scores(
        torch.cat([torch.zeros(n), scores.ref_logprobs]),
        torch.cat([torch.zeros(n, k, dtype=scores.token_ids.dtype), scores.token_ids]),
        torch.cat([torch.zeros(n, k), scores.teacher_logprobs]),
        known=torch.cat(
            [torch.zeros(n, k, dtype=torch.bool), scores.all_known & scores.all_scored[:, None]]
        ),
    )
    return Sent(whole.ref_logprobs.tolist(), whole)


def unscored(length: int) -> list[float]:
    """Return what is sent for a sequence that no teacher has scored."""
    return [math.nan] * length


def pack(scores: Scores) -> Any:
    """Return the support as int32 [n, 2, K] in NumPy."""
    packed = np.frombuffer(scores.to_bytes(), np.int32)
    return packed.reshape(len(scores), 2, scores.k)


def unpack(array: Int[Tensor, "seq a k"], k: int) -> Scores:
    """Return what ``pack`` packed, after prime-rl's packing and padding.

    Padding reads id 0 and log-prob 0; it is masked. The tokens' own log q are NaN: prime-rl gives
    its own list of them to the loss.
    """
    if array.dtype != torch.int32 or array.shape[1] != 2 or array.shape[2] != k:
        raise ValueError(
            f"routed_experts holds {array.dtype} {tuple(array.shape)} where the teacher's top-{k} "
            f"support, int32 (seq, 2, {k}), was expected. {ROUTER_REPLAY}"
        )
    return Scores.of_bytes(array, torch.full((len(array),), torch.nan))
