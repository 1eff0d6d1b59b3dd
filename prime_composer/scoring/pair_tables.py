"""Integer tables of two tokenizers, which a client sends once: what ``student_candidates`` sums by.

They are named by the SHA-256 of their bytes. The workers keep the last few, and are alone in that:
an API server passes them on and remembers nothing, so that several behind one port and a server
that was started again answer alike. A table is checked when it comes. What a request says of it
later can make its own numbers wrong, and nothing else.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

VARIABLE = "PRIME_COMPOSER_PAIRS"
"""Environment variable of a server: pairs of tokenizers whose tables are kept. 0: it takes none."""

KEPT = 4
"""That number, where the variable is not set."""

MOST_STUDENT_IDS = 2**20
"""Entries of a student's vocabulary: sums over it are held in memory for a block of rows."""

LENGTHS = ("order", "start", "entries", "ends", "parent", "path_first", "widths")


class WrongTables(ValueError):
    """Bytes that are no tables, or none for the served model. The message says why."""


class UnknownTables(LookupError):
    """A request names tables that are not here: the client has to send them."""


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """What comes before the arrays.

    Attributes:
        lengths: of the arrays, in the order of ``LENGTHS``.
        lead: bytes that every entry of a teacher's token has in front of it, 0 or 1.
    """

    lengths: list[int]
    lead: int


@dataclass(frozen=True, eq=False)
class PairTables:
    """The tables of a teacher's and a student's tokenizer, in int32.

    An *entry* is a teacher's token w from its byte d on; its index is ``start[w] + d``
    (``cross_tokenizer.pair.Tables``, of which this is a part).

    Attributes:
        order: the teacher's ordinary ids, sorted by their bytes.
        start: index of each teacher token's entry 0, and of the one after the last, [V_T + 1].
        entries: of each entry twice the first student token plus 2, 0 where that is unknown, and
            plus 1 where what follows may change it.
        ends: the teacher's ids that end its turn.
        parent: the longest other token that a teacher's token begins with; -1 for none, [V_T].
        path_first: the first of the teacher's tokens for each student token, where it takes
            several; -1 for all others, [V_S].
        widths: bytes of each student token, [V_S].
        lead: bytes that an entry of index ``start[w] - 1`` has in front of w; 0 without such ones.
    """

    order: NDArray[np.int32]
    start: NDArray[np.int32]
    entries: NDArray[np.int32]
    ends: NDArray[np.int32]
    parent: NDArray[np.int32]
    path_first: NDArray[np.int32]
    widths: NDArray[np.int32]
    lead: int

    @cached_property
    def content(self) -> bytes:
        """The bytes that are sent."""
        arrays = [getattr(self, name) for name in LENGTHS]
        header = msgspec.msgpack.encode(Header([len(array) for array in arrays], self.lead))
        size = len(header).to_bytes(4, "little")
        return b"".join([size, header, *(array.astype("<i4").tobytes() for array in arrays)])

    @cached_property
    def name(self) -> str:
        """Their SHA-256 in hexadecimal digits."""
        return name_of(self.content)

    @classmethod
    def of(cls, content: bytes, vocab_size: int) -> "PairTables":
        """Return the tables of some bytes, checked: no index of one leads out of another.

        Args:
            content: from ``PairTables.content``.
            vocab_size: entries of the teacher's head.

        Raises:
            WrongTables: they are others.
        """
        size = 4 + int.from_bytes(content[:4], "little")
        try:
            header = msgspec.msgpack.decode(content[4:size], type=Header)
        except (ValueError, RecursionError) as error:
            raise WrongTables(f"no tables of two tokenizers: {error}") from None
        lengths = header.lengths
        if len(lengths) != len(LENGTHS) or min(lengths) < 0 or header.lead not in (0, 1):
            raise WrongTables(f"arrays of {lengths[:9]} entries and a lead of {header.lead}")
        if len(content) != size + 4 * sum(lengths):
            raise WrongTables(
                f"{len(content):,} bytes, where {size + 4 * sum(lengths):,} were expected"
            )
        numbers = np.frombuffer(content, "<i4", offset=size).copy()
        arrays = np.split(numbers, np.cumsum(lengths)[:-1])
        tables = cls(**dict(zip(LENGTHS, arrays, strict=True)), lead=header.lead)
        wrong = tables._wrong(vocab_size)
        if wrong:
            raise WrongTables(wrong)
        return tables

    def _wrong(self, vocab_size: int) -> str:
        """Say what cannot be; empty for nothing."""
        teacher, student = len(self.start) - 1, len(self.widths)
        if not 0 < teacher <= vocab_size:
            return f"a teacher of {teacher} tokens, where the served head has {vocab_size}"
        if not 0 < student <= MOST_STUDENT_IDS or len(self.path_first) != student:
            return f"students of {student} and {len(self.path_first)} tokens"
        if len(self.parent) != teacher:
            return f"{len(self.parent)} parents of {teacher} tokens"
        length = np.diff(self.start.astype(np.int64))
        if (self.start[0], self.start[-1] - self.lead) != (self.lead, len(self.entries)) or (
            length < 0
        ).any():
            return "entries that do not follow one another"
        for name, ids, least, most in (
            ("order", self.order, 0, teacher),
            ("ends", self.ends, 0, teacher),
            ("parent", self.parent, -1, teacher),
            ("path_first", self.path_first, -1, teacher),
            ("entries", self.entries, 0, 2 * student + 2),
            ("widths", self.widths, 0, 2**16),
        ):
            if len(ids) and not least <= int(ids.min()) <= int(ids.max()) < most:
                found = int(ids.min()), int(ids.max())
                return f"{name} from {found[0]} to {found[1]}, not from {least} to {most - 1}"
        if len(self.order) > teacher or (length[self.order] <= self.lead).any():
            return f"{len(self.order)} ordinary tokens, where each writes a byte"
        if not (self.entries[self.start[self.order]] > 1).any():
            return "no entry with a known token"
        has = self.parent >= 0
        if (length[self.parent[has]] >= length[has]).any():
            return "a token that begins with one of its own length"
        return ""


def name_of(content: bytes) -> str:
    """Return the name of tables by their bytes."""
    return sha256(content).hexdigest()


@dataclass(frozen=True, eq=False)
class Whole:
    """Where the mass of each teacher token goes if all of it is still to come."""

    # column of each teacher token among ``2 * len(firsts) + 2``: mass that is certain, mass that is
    # not, mass whose student token is unknown, and that of silent tokens
    index: Int[Tensor, " v"]
    firsts: Int[Tensor, " u"]  # the student's tokens, in order


class OnDevice:
    """Tables on the device of a worker."""

    def __init__(self, tables: PairTables, device: torch.device):
        def there(array: NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        self.teacher_size, self.student_size = len(tables.parent), len(tables.widths)
        (
            self.order,
            self.start,
            self.entries,
            self.ends,
            self.parent,
            self.path_first,
            self.widths,
        ) = (there(getattr(tables, name)) for name in LENGTHS)
        self.lead = tables.lead
        """Bytes that are counted with each token's."""
        self.wholes = {
            skip: Whole(*(there(array) for array in whole_of(tables, skip)))
            for skip in range(-tables.lead, 1)
        }


def whole_of(tables: PairTables, skip: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return ``Whole.index`` and ``Whole.firsts`` of tokens with a lead (-1) or without one (0)."""
    codes = tables.entries[tables.start[tables.order] + skip]
    firsts, place = np.unique(codes[codes > 1] // 2 - 1, return_inverse=True)
    columns = np.full(len(codes), 2 * len(firsts))
    columns[codes > 1] = place + len(firsts) * (codes[codes > 1] % 2)
    index = np.full(len(tables.parent), 2 * len(firsts) + 1)
    index[tables.order] = columns
    return index.astype(np.int32), firsts.astype(np.int32)


class Kept:
    """The tables that a worker keeps, those that were used last."""

    def __init__(self, most: int):
        self.most = most
        self._tables: OrderedDict[str, PairTables] = OrderedDict()
        self._there: dict[tuple[str, torch.device], OnDevice] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def clear(self) -> None:
        """Keep none, as after a start."""
        self._tables.clear()
        self._there.clear()

    def find(self, name: str) -> PairTables | None:
        """Return tables; None where they are not here."""
        return self._tables.get(name)

    def keep(self, tables: PairTables) -> None:
        """Keep tables."""
        self._tables[tables.name] = tables
        self._tables.move_to_end(tables.name)
        while len(self._tables) > self.most:
            self._tables.popitem(last=False)
        self._there = {key: one for key, one in self._there.items() if key[0] in self._tables}

    def on(self, name: str, device: torch.device) -> OnDevice:
        """Return tables on a device."""
        if name not in self._tables:
            raise UnknownTables(name)
        self._tables.move_to_end(name)
        key = name, device
        if key not in self._there:
            self._there[key] = OnDevice(self._tables[name], device)
        return self._there[key]


def most_kept() -> int:
    """Return how many tables this server keeps."""
    value = os.environ.get(VARIABLE, str(KEPT))
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE}={value!r}: set it to a number of pairs, 0 for none")
    return int(value)


KEPT_HERE = Kept(KEPT)
"""Of this process."""


def take_tables(worker: Any, name: str, content: bytes) -> dict[str, Any]:
    """Keep tables, as a method of vLLM's worker; without content, say whether they are here.

    Everything is of types that vLLM sends between its processes without pickling.

    Args:
        content: the tables' bytes.
    """
    try:
        KEPT_HERE.most = most_kept()
        if content:
            tables = PairTables.of(content, worker.model_config.get_vocab_size())
            if name != tables.name:
                return {"error": f"they have the SHA-256 {tables.name}"}
            KEPT_HERE.keep(tables)
    except ValueError as error:
        return {"error": str(error)}
    return {"has": name in KEPT_HERE}
