"""Answer marked requests where vLLM has the hidden states of a prompt, in its worker.

A request is marked by ``SamplingParams.extra_args``. Its prompt log-probs are then not vLLM's: head
and ranking run on the rows of interest alone, and all requests of a batch share them. The result
takes the place of vLLM's tensors, which travel to the API server without a copy.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.lm_head import of_device
from prime_composer.scoring.head import DTYPE_NAMES as FLOATS
from prime_composer.scoring.kinds import KINDS, HeadFailed, HiddenRows, KindRequest

MARK = "prime_composer"  # Key of ``SamplingParams.extra_args``

BLOCK_BYTES = {"cpu": 2**26, "cuda": 2**28}  # Largest block of logits in float32, by kind of device

DTYPE_NAMES = {torch.int32: "int32", **FLOATS}

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class RowsRequest(msgspec.Struct, frozen=True):
    """What a marked request asks for. Whoever makes one has checked it against the prompt."""

    start: int  # position of the first token of interest
    stop: int  # the prompt's length: the tokens up to its end are of interest
    requests: tuple[KindRequest, ...]  # what it asks of each kind, for all rows
    skip: tuple[tuple[int, int], ...] = ()  # positions between them that are of no interest

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Positions of the tokens of interest, each [first, last)."""
        edges = [self.start, *itertools.chain(*self.skip), self.stop]
        return [*zip(edges[::2], edges[1::2], strict=True)]

    @property
    def n(self) -> int:
        return sum(last - first for first, last in self.ranges)

    def mark(self) -> dict[str, bytes]:
        """Return a request's extra arguments: bytes, so that no JSON body of another route can."""
        return {MARK: msgspec.msgpack.encode(self)}

    @classmethod
    def of(cls, sampling_params: Any) -> "RowsRequest | None":
        """Return what a request is marked with; None for one that is not marked."""
        extra = getattr(sampling_params, "extra_args", None)
        mark = extra.get(MARK) if extra else None
        return msgspec.msgpack.decode(mark, type=cls) if isinstance(mark, bytes) else None


@dataclass
class Progress:
    """The rows of one request so far; a long prompt is prefilled in pieces."""

    rows_request: RowsRequest
    n: int = field(init=False)  # rows of interest
    arrays: dict[str, Tensor] = field(default_factory=dict)  # all rows by name, on the CPU
    # the arrays' bytes, of which they are views
    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    next_row: int = 0  # rows before this one are there
    has_gap: bool = False  # rows were never computed: a prefix cache had them
    # "type" and "text" of an exception; empty without one
    error: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n = self.rows_request.n

    def write(self, row: int, pieces: dict[str, Tensor]) -> None:
        """Store rows by name, on the CPU, from ``row`` on."""
        count = len(next(iter(pieces.values())))
        self.has_gap |= row > self.next_row
        self.next_row = max(self.next_row, row + count)
        if not self.arrays:
            self._make_arrays(pieces)
        for name, piece in pieces.items():
            self.arrays[name][row : row + count] = piece

    def _make_arrays(self, pieces: dict[str, Tensor]) -> None:
        """Make room for all rows, the widest dtypes first, so that each array is aligned."""
        order = sorted(pieces, key=lambda name: -pieces[name].itemsize)
        sizes = [self.n * pieces[name][0].numel() * pieces[name].itemsize for name in order]
        self.data = torch.empty(sum(sizes), dtype=torch.uint8)
        for name, part in zip(order, self.data.split(sizes), strict=True):
            rows = part.view(pieces[name].dtype)
            self.arrays[name] = rows.view(self.n, *pieces[name].shape[1:])

    @property
    def is_whole(self) -> bool:
        return not self.has_gap and self.next_row == self.n

    def payload(self) -> tuple[Tensor, Tensor]:
        """Return the description and the bytes of all arrays, as uint8."""
        if self.error:
            return uint8(json.dumps(self.error).encode()), uint8(b"")
        if not self.is_whole:
            return uint8(b""), uint8(b"")
        fields = [
            (name, DTYPE_NAMES[array.dtype], 0 if array.ndim == 1 else array.shape[1])
            for name, array in self.arrays.items()
        ]
        return uint8(json.dumps(fields).encode()), self.data


def uint8(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))


@dataclass(frozen=True)
class Piece:
    """Rows of one request in one batch."""

    begin: int  # its first row in the batch's hidden states
    row: int  # its first row's place among the request's rows of interest
    next_ids: Int[Tensor, " count"]  # the tokens that followed, one per row
    progress: Progress  # the request's

    @property
    def count(self) -> int:
        return len(self.next_ids)

    def numbers(self, index: int) -> NDArray[np.int32] | None:
        """Return what the request of this index says of these rows, [count, m]."""
        numbers = self.progress.rows_request.requests[index].per_row(self.progress.n)
        return None if numbers is None else numbers[self.row : self.row + self.count]


def read_payload(description: Tensor, data: Tensor, n: int) -> dict[str, Tensor]:
    """Return name -> array, views of ``data``, from an engine in this process, ``n`` rows each."""
    if description.dtype != torch.uint8:
        raise ValueError(
            "vLLM answered without the scoring code of prime_composer, as from a model runner of "
            "another platform; use a vLLM of CPU or CUDA."
        )
    if not len(description):
        raise ValueError("vLLM left rows of the prompt out")
    fields = json.loads(description.numpy().tobytes())
    if isinstance(fields, dict):
        said = f"{fields['type']}: {fields['text']}"
        raise ValueError(f"vLLM's worker could not compute the rows: {said}")
    arrays: dict[str, Tensor] = {}
    offset = 0
    for name, dtype_name, columns in fields:
        dtype = DTYPES_BY_NAME[dtype_name]
        size = n * (columns or 1) * dtype.itemsize
        array = data[offset : offset + size].view(dtype)
        arrays[name] = array.view(n, columns) if columns else array
        offset += size
    return arrays


@dataclass(frozen=True)
class Prefill:
    """What one batch computes of a marked request's prompt."""

    progress: Progress
    prompt: Sequence[int] | Int[Tensor, " longest"]  # its ids, and maybe more behind them
    before: int  # how many of its tokens earlier batches computed
    count: int  # how many this batch computes
    begin: int  # its first row in the batch's hidden states


def answer_batch(
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden_states: Tensor,
    prefills: dict[str, Prefill],
) -> dict[str, Progress]:
    """Compute the rows of marked requests in one batch; return the requests that are complete."""
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    done: dict[str, Progress] = {}
    for name, prefill in prefills.items():
        progress, before, after = prefill.progress, prefill.before, prefill.before + prefill.count
        asked = progress.rows_request
        alike, row = tuple(one.group(progress.n) for one in asked.requests), 0
        for first, last in asked.ranges:  # row i of the hidden states predicts token i + 1
            low, high = max(first - 1, before), min(after, last - 1)
            if high > low:
                next_ids = torch.as_tensor(prefill.prompt[low + 1 : high + 1])
                piece = Piece(
                    prefill.begin - before + low, row + low + 1 - first, next_ids, progress
                )
                groups.setdefault(alike, []).append(piece)
            row += last - first
        if after >= asked.stop:
            done[name] = progress
    for group in groups.values():
        answer_group(head, vocab_size, hidden_states, group)
    return done


def answer_group(
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden_states: Tensor,
    group: Sequence[Piece],
) -> None:
    """Compute the rows of pieces that ask for the same, and store them.

    A kind that fails, for want of memory for example, must not end the engine: the pieces' requests
    keep the reason. The head runs for the other blocks all the same, because with tensor
    parallelism all workers run it together. ``hidden_states`` are the whole batch's, [tokens, d].
    """
    device, requests = hidden_states.device, group[0].progress.rows_request.requests
    parts = [hidden_states[piece.begin : piece.begin + piece.count] for piece in group]
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    next_ids = torch.cat([piece.next_ids for piece in group]).to(device, torch.int64)
    numbers = [
        joined_numbers([piece.numbers(index) for piece in group]) for index in range(len(requests))
    ]
    numbers = [None if each is None else each.to(device) for each in numbers]
    # Besides its logits a row takes values and ids of each column, in two widths.
    entries = vocab_size + sum(4 * request.k for request in requests)
    size = max(1, of_device(BLOCK_BYTES, device) // (4 * entries))
    error: dict[str, str] = {}
    for first in range(0, len(rows), size):
        block = slice(first, first + size)
        these = HiddenRows(rows[block], next_ids[block], head)
        try:
            arrays = {
                name: array.cpu()
                for request, each in zip(requests, numbers, strict=True)
                for name, array in KINDS[request.kind]
                .arrays(these, request, None if each is None else each[block])
                .items()
            }
        except HeadFailed:
            raise
        except Exception as failure:
            error = {"type": type(failure).__name__, "text": str(failure)}
        else:
            write(group, first, arrays)
    if error:
        for piece in group:
            piece.progress.error = error


def joined_numbers(parts: Sequence[NDArray[np.int32] | None]) -> Int[Tensor, "n m"] | None:
    """Return the numbers of rows that are one after the other; None without any."""
    chosen = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(chosen)) if chosen else None


def write(group: Sequence[Piece], first: int, arrays: dict[str, Tensor]) -> None:
    """Store a block of the rows of pieces, which are one after the other."""
    last, end = first + len(next(iter(arrays.values()))), 0
    for piece in group:
        begin, end = end, end + piece.count
        low, high = max(begin, first), min(end, last)
        if low < high:
            rows = slice(low - first, high - first)
            piece.progress.write(
                piece.row + low - begin, {name: array[rows] for name, array in arrays.items()}
            )
