"""Read the output head of a served teacher, from its scoring plugin or from a checkpoint."""

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_composer.backends.errors import RequestRefused, ServerError
from prime_composer.backends.http import Connection
from prime_composer.backends.scratch import remove_left, scratch_folder
from prime_composer.scoring.head import DTYPES_BY_NAME
from prime_composer.scoring.wire import (
    ENVELOPE_BYTES,
    HEAD_PATH,
    VERSION,
    Facts,
    HeadFacts,
    HeadRequest,
    HeadResponse,
    WireError,
    decode_response,
    unpack_arrays,
)
from prime_composer.teachers.output_head import (
    MOST_HEAD_ENTRIES,
    OutputHead,
    available_bytes,
)

UNFINISHED = "unfinished_"  # How the names of folders begin in which a head is written

HEAD_ROWS = 4096  # Rows of the output head per request


class ServedHead:
    """The output head of a served teacher."""

    def __init__(self, connection: Connection, model: Facts):
        self._connection = connection
        self._model = model

    def read(self, folder: Path | None = None) -> OutputHead:
        """Return the teacher's output head."""
        facts = self._checked_facts()
        path = None if folder is None else folder / f"{facts.sha256}.safetensors"
        if path is not None and path.exists():
            tensors = load_file(path)
        else:
            tensors = self._download(facts)
        head = OutputHead(tensors["weight"], tensors.get("bias"), facts)
        if head.sha256 != facts.sha256:
            place = "on the way" if path is None or not path.exists() else f"in {path}; delete it"
            raise self._error(f"changed meanwhile, or was damaged {place}")
        if path is not None and not path.exists():
            _keep(tensors, path)
        elif path is not None:
            remove_left(UNFINISHED, path.parent)
        return head

    def _checked_facts(self) -> HeadFacts:
        """Return the head's facts, if they fit what the server says of its model."""
        facts = self.facts()
        rows, columns = self._model.vocab_size, self._model.hidden_size
        fits = (facts.rows, facts.columns) == (rows, columns) and rows * columns < MOST_HEAD_ENTRIES
        if facts.dtype not in DTYPES_BY_NAME or not fits:
            raise self._error(
                f"is {facts.rows} x {facts.columns} in {facts.dtype}, where {rows} x {columns} in "
                f"{', '.join(DTYPES_BY_NAME)} was expected"
            )
        if available_bytes() < facts.rows * facts.columns * DTYPES_BY_NAME[facts.dtype].itemsize:
            raise self._error(
                f"is {facts.rows} x {facts.columns} in {facts.dtype}, and this machine has "
                f"{available_bytes() / 1e9:.1f} GB of free memory; set k to a number"
            )
        return facts

    def facts(self) -> HeadFacts:
        """Return what the server says about the teacher's output head."""
        facts = self._answer(0, 0).facts
        if facts is None:
            raise self._error("says nothing about itself")
        return facts

    def _download(self, facts: HeadFacts) -> dict[str, Tensor]:
        dtype = DTYPES_BY_NAME[facts.dtype]
        tensors = {"weight": torch.empty(facts.rows, facts.columns, dtype=dtype)}
        if facts.bias:
            tensors["bias"] = torch.empty(facts.rows, dtype=dtype)
        for first in range(0, facts.rows, HEAD_ROWS):
            last = min(first + HEAD_ROWS, facts.rows)
            rows = self._answer(first, last, facts).rows
            try:
                arrays = {} if rows is None else unpack_arrays(rows, last - first)
            except WireError as error:
                raise self._error(f"has a wrong piece: {error}") from None
            for name, target in tensors.items():
                piece = arrays.get(name)
                if piece is None or piece.shape != target[first:last].shape:
                    raise self._error(f"lacks the {name} of rows {first} to {last}")
                target[first:last] = torch.from_numpy(piece.copy()).view(dtype)
        return tensors

    def _answer(self, first: int, last: int, facts: HeadFacts | None = None) -> HeadResponse:
        size = 0 if facts is None else (last - first) * (facts.columns + 1) * 4
        head_request = msgspec.to_builtins(HeadRequest(VERSION, first, last))
        request = self._connection.request(
            "POST", HEAD_PATH, head_request, max_bytes=ENVELOPE_BYTES + size
        )
        try:
            return decode_response(self._connection.run(request), HeadResponse)
        except RequestRefused as refusal:
            raise self._connection.error(
                f"{self._connection.name} answered {refusal.status} to {HEAD_PATH}: "
                f"{refusal.reason}"
            ) from refusal
        except WireError as error:
            raise self._error(f"comes as {error}") from None

    def _error(self, found: str) -> ServerError:
        return self._connection.error(f"The output head of {self._connection.name} {found}.")


def _keep(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a head's file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(UNFINISHED, path.parent) as folder:
            save_file(tensors, folder / path.name)
            (folder / path.name).replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the teacher's output head cannot be kept in {path.parent} ({error}); set "
            "PRIME_COMPOSER_CACHE to a folder that can be written"
        ) from error
