"""What an answer can hold: a name, and a function of the rows that returns arrays.

A kind that a vocabulary of the client's needs, such as a sum of probabilities over a static map, is
one more function here. The wire, the worker and the endpoint do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class HeadFailed(Exception):
    """The model's own head raised an error."""


@dataclass
class Rows:
    """Rows of hidden states, each of which predicts the next token of its sequence.

    Attributes:
        hidden: last hidden states, after the final norm, [n, d].
        next_ids: the tokens that followed, [n].
        head: hidden states -> logits, in the model's dtype.
        k: the K of the question.
        given: ids of the caller's choice, [n, m]; None without any.
    """

    hidden: Float[Tensor, "n d"]
    next_ids: Int[Tensor, " n"]
    head: Callable[[Tensor], Tensor]
    k: int = 0
    given: Int[Tensor, "n m"] | None = None

    @cached_property
    def logits(self) -> Float[Tensor, "n v"]:
        """Logits in float32; the head runs once, and not at all where no kind reads them.

        Raises:
            HeadFailed: the head itself did.
        """
        try:
            logits = self.head(self.hidden)
        except Exception as error:
            raise HeadFailed from error
        return logits.float()

    @cached_property
    def log_normalizer(self) -> Float[Tensor, "n 1"]:
        """logsumexp of the logits."""
        return self.logits.logsumexp(-1, keepdim=True)


Kind = Callable[[Rows], dict[str, Tensor]]
"""Rows -> arrays of [n] or [n, columns] by name, in int32, float32 or the model's dtype."""


def sampled(rows: Rows) -> dict[str, Tensor]:
    """Return log q of the token that followed, float32 [n]."""
    own = rows.logits.gather(-1, rows.next_ids[:, None]) - rows.log_normalizer
    return {"sampled": own.squeeze(-1)}


def top_k(rows: Rows) -> dict[str, Tensor]:
    """Return the K most probable ids, int32 [n, K], and their log q, float32 [n, K], in order."""
    values, ids = largest(rows.logits, rows.k)
    return {"top_ids": ids.int(), "top_logprobs": values - rows.log_normalizer}


def given(rows: Rows) -> dict[str, Tensor]:
    """Return log q of the ids that the caller chose, float32 [n, m]."""
    assert rows.given is not None
    return {"given": rows.logits.gather(-1, rows.given) - rows.log_normalizer}


def hidden(rows: Rows) -> dict[str, Tensor]:
    """Return the last hidden states, [n, d] in the model's dtype. Needs no head."""
    return {"hidden": rows.hidden}


KINDS: dict[str, Kind] = {"sampled": sampled, "top_k": top_k, "given": given, "hidden": hidden}


def largest(
    logits: Float[Tensor, "n v"], k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Return the k largest entries of each row and their ids, largest first, like ``torch.topk``.

    On a CPU this is about twice as fast: NumPy partitions with vector instructions. Above some
    thousand entries torch's heap is faster.
    """
    if logits.is_cuda or logits.shape[1] > 8192 or k in (0, logits.shape[1]):
        values, ids = logits.topk(k, dim=-1)
        return values, ids
    partition = np.argpartition(logits.numpy(), -k, axis=1)[:, -k:]
    ids = torch.from_numpy(np.ascontiguousarray(partition))
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True)
    return values, ids.gather(1, order)
