"""Kinds of scores: what a row of a response can hold, from the request to a teacher's ``Scores``.

A kind is one object, which both sides have. Wire, endpoint and worker know kinds by its methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.contract import Scores
from prime_composer.scoring.wire import (
    Facts,
    Field,
    ScoreRequest,
    SequenceRequest,
    decode_ids,
    encode_ids,
)

Arrays = Mapping[str, NDArray[Any]]  # [n] or [n, columns]; half precision as its bits


class HeadFailed(Exception):
    """The model's own head raised an error."""


@dataclass
class HiddenRows:
    """Rows of hidden states, each of which predicts the next token of its sequence."""

    hidden: Float[Tensor, "n d"]  # last hidden states, after the final norm, [n, d]
    next_ids: Int[Tensor, " n"]  # the tokens that followed, [n]
    head: Callable[[Tensor], Tensor]  # hidden states -> logits, in the model's dtype

    @cached_property
    def logits(self) -> Float[Tensor, "n v"]:
        """Logits in float32; the head runs once, and not at all where no kind reads them."""
        try:
            logits = self.head(self.hidden)
        except Exception as error:
            raise HeadFailed from error
        return logits.float()

    @cached_property
    def log_normalizer(self) -> Float[Tensor, "n 1"]:
        """logsumexp of the logits."""
        return self.logits.logsumexp(-1, keepdim=True)


class KindRequest(msgspec.Struct, frozen=True):
    """What one kind is asked for the rows of one sequence."""

    kind: str  # its name
    k: int = 0  # columns of what is asked for, such as ids per row
    numbers: bytes = b""  # int32 numbers of each row, [n, m]; empty without any

    def per_row(self, n: int) -> NDArray[np.int32] | None:
        """Return the numbers of n rows, [n, m]; None without any."""
        return np.frombuffer(self.numbers, "<i4").reshape(n, -1) if self.numbers else None

    def of_rows(self, n: int, rows: slice | NDArray[np.bool_]) -> "KindRequest":
        """Return the request for some of n rows."""
        numbers = self.per_row(n)
        if numbers is None:
            return self
        return msgspec.structs.replace(self, numbers=numbers[rows].tobytes())

    def group(self, n: int) -> tuple[Any, ...]:
        """Return what requests for n rows must agree in to be computed together."""
        return self.kind, self.k, len(self.numbers) // max(1, n)


class Kind(ABC):
    """One kind of scores, on the server."""

    name: ClassVar[str]  # on the wire, and at the beginning of its arrays' names

    @abstractmethod
    def fields(self, k: int, facts: Facts) -> list[Field]:
        """Return name, dtype and columns of each array of ``arrays``, in any order."""

    @abstractmethod
    def arrays(
        self, rows: HiddenRows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        """Compute the arrays, [n] or [n, columns] by name, in int32, float32 or half precision.

        It runs in vLLM's worker, on its device. An error costs the requests of these rows, and no
        others.
        """

    def read(
        self, score_request: ScoreRequest, sequence: SequenceRequest, facts: Facts
    ) -> KindRequest | None:
        """Return what a sequence asks of this kind, checked; None where it does not.

        What passes must not harm vLLM's engine. A kind without parameters is named, and no more.
        The message of a ``ValueError`` is the response.
        """
        return KindRequest(self.name) if self.name in score_request.kinds else None

    def write(self, request: KindRequest, score_request: ScoreRequest, n: int) -> None:
        """Put what is asked of n rows into a request with one sequence, as ``read`` reads it."""
        score_request.kinds.append(self.name)


class SupportKind(Kind):
    """A kind that gives a support, and what a client does with it."""

    what: ClassVar[str] = "these scores"  # it gives, in words, for messages
    ranked: ClassVar[bool] = False  # the most probable ids, the most probable one first
    in_json: ClassVar[bool] = False  # a server without the plugin gives it too

    @abstractmethod
    def scores(self, arrays: Arrays, request: KindRequest, start: int) -> Scores:
        """Return the scores of this kind's arrays and ``sampled``. Whoever asked checks them."""


class SampledToken(SupportKind):
    """log q of the token that followed, float32 [n]."""

    name = "sampled"

    def fields(self, k: int, facts: Facts) -> list[Field]:
        return [Field("sampled", "float32", 0)]

    def arrays(
        self, rows: HiddenRows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        own = rows.logits.gather(-1, rows.next_ids[:, None]) - rows.log_normalizer
        return {"sampled": own.squeeze(-1)}

    def scores(self, arrays: Arrays, request: KindRequest, start: int) -> Scores:
        own = own_logprobs(arrays)
        return Scores(own, torch.empty(len(own), 0).long(), torch.empty(len(own), 0), start=start)


class TopK(SupportKind):
    """The K most probable ids, int32 [n, K], and their log q, float32 [n, K], in order."""

    name, what = "top_k", "the most probable ids"
    ranked = in_json = True

    def fields(self, k: int, facts: Facts) -> list[Field]:
        return [Field("top_ids", "int32", k), Field("top_logprobs", "float32", k)]

    def arrays(
        self, rows: HiddenRows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        values, ids = largest(rows.logits, request.k)
        return {"top_ids": ids.int(), "top_logprobs": values - rows.log_normalizer}

    def read(
        self, score_request: ScoreRequest, sequence: SequenceRequest, facts: Facts
    ) -> KindRequest | None:
        k, kinds = score_request.k, score_request.kinds
        if not 0 <= k <= facts.vocab_size or (self.name in kinds) != (k > 0):
            raise ValueError(
                f"k = {k} with kinds {kinds}: {self.name} needs a k from 1 to the vocabulary's "
                f"{facts.vocab_size}, and without it k is 0"
            )
        return KindRequest(self.name, k) if k else None

    def write(self, request: KindRequest, score_request: ScoreRequest, n: int) -> None:
        super().write(request, score_request, n)
        score_request.k = request.k

    def of(self, k: int) -> KindRequest:
        return KindRequest(self.name, k)

    def scores(self, arrays: Arrays, request: KindRequest, start: int) -> Scores:
        return Scores(
            own_logprobs(arrays),
            torch.from_numpy(arrays["top_ids"].astype(np.int64)),
            tensor(arrays["top_logprobs"]),
            start=start,
        )


class Given(SupportKind):
    """log q of the ids that the caller chose, float32 [n, m]."""

    name, what = "given", "log-probs of given ids"

    def fields(self, k: int, facts: Facts) -> list[Field]:
        return [Field("given", "float32", k)]

    def arrays(
        self, rows: HiddenRows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        assert numbers is not None
        return {"given": rows.logits.gather(-1, numbers.long()) - rows.log_normalizer}

    def read(
        self, score_request: ScoreRequest, sequence: SequenceRequest, facts: Facts
    ) -> KindRequest | None:
        ids = decode_ids(sequence.given, sequence.rows)
        if (self.name in score_request.kinds) != (ids.size > 0):
            raise ValueError("the kind given and given ids go together")
        if not ids.size:
            return None
        wrong = id_outside(int(ids.min()), int(ids.max()), facts.vocab_size)
        if wrong:
            raise ValueError(f"given ids: {wrong}")
        return KindRequest(self.name, ids.shape[1], numbers=ids.tobytes())

    def write(self, request: KindRequest, score_request: ScoreRequest, n: int) -> None:
        """The ids are a field of the sequence."""
        super().write(request, score_request, n)
        (sequence,), ids = score_request.sequences, request.per_row(n)
        assert ids is not None
        sequence.given = encode_ids(ids)

    def of(self, ids: Int[Tensor, "n k"]) -> KindRequest:
        # NumPy converts in this thread, while torch's threads have other work.
        return KindRequest(self.name, ids.shape[1], numbers=np.asarray(ids, "<i4").tobytes())

    def scores(self, arrays: Arrays, request: KindRequest, start: int) -> Scores:
        """Return the ids as they were given, with their log-probs."""
        own = own_logprobs(arrays)
        ids = request.per_row(len(own))
        assert ids is not None
        return Scores(
            own, torch.from_numpy(ids.astype(np.int64)), tensor(arrays["given"]), start=start
        )


class Hidden(Kind):
    """The last hidden states, [n, d] in the model's dtype. Needs no head, and gives no support."""

    name = "hidden"

    def fields(self, k: int, facts: Facts) -> list[Field]:
        return [Field("hidden", facts.dtype, facts.hidden_size)]

    def arrays(
        self, rows: HiddenRows, request: KindRequest, numbers: Int[Tensor, "n m"] | None
    ) -> dict[str, Tensor]:
        return {"hidden": rows.hidden}

    def states(self, arrays: Arrays, dtype: torch.dtype) -> Float[Tensor, "n d"]:
        """Return the hidden states, which are the array's own bytes."""
        return torch.from_numpy(arrays["hidden"]).view(dtype)


SAMPLED, TOP_K, GIVEN, HIDDEN = SampledToken(), TopK(), Given(), Hidden()

KINDS: dict[str, Kind] = {kind.name: kind for kind in (SAMPLED, TOP_K, GIVEN, HIDDEN)}
"""What a server can answer, by name."""


def row_bytes(requests: Iterable[tuple[Kind, int]], facts: Facts) -> int:
    """Return how many bytes kinds have in a response for each token of interest."""
    return sum(field.row_bytes for kind, k in requests for field in kind.fields(k, facts))


def id_outside(lowest: int, highest: int, vocab_size: int) -> str:
    """Say which id is not in the vocabulary, and would end vLLM's engine; empty for none."""
    if lowest >= 0 and highest < vocab_size:
        return ""
    return f"id {lowest if lowest < 0 else highest}, where 0 to {vocab_size - 1} is needed"


def own_logprobs(arrays: Arrays) -> Float[Tensor, " n"]:
    """Return log q of the sampled tokens, which every client asks for."""
    return tensor(arrays["sampled"])


def tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor, without a copy where its bytes may be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


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
