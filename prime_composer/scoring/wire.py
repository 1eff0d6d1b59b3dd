"""Request and response of the scoring plugin as bytes.

A request is JSON, because prime-rl's router passes no other body on. A response is a msgpack map
with raw little-endian arrays: per token 4 bytes for the sampled token, 8 K for the top K, 4 m for m
given ids and 2 d for hidden states in bfloat16.

``VERSION`` changes whenever an older client or server would misread the other side.
"""

import base64
import binascii
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

NAME = "prime_composer"  # Of the plugin, in VLLM_PLUGINS and in each response

VERSION = 2
SCORE_PATH = "/v1/prime_composer/score"
HEAD_PATH = "/v1/prime_composer/head"  # Below /v1, so that the server's API key guards both

FLOAT32_HEAD = {"head_dtype": "float32"}  # float32 sums also in half precision

DTYPES = {"int32": "<i4", "float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
"""Name in a response -> NumPy's. NumPy has no bfloat16: its bits come as integers."""

ENVELOPE_BYTES = 2**14  # Besides a response's arrays, in all and for each sequence

Bytes = bytes | bytearray | memoryview

Count = Annotated[int, msgspec.Meta(ge=0)]

WITHOUT_PLUGIN = (
    "scoring plugin and answers in JSON, which has no hidden states, and is several times slower "
    "for K of 8 and more; `prime-composer teacher` starts a server with it"
)
"""End of the sentence in which a client says that a server has or had no plugin."""


class WireError(ValueError):
    """Bytes that are no request or response of this version; ``is_ours`` if of this plugin."""

    def __init__(self, message: str, is_ours: bool = True):
        super().__init__(message)
        self.is_ours = is_ours


class SequenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence of a request."""

    token_ids: list[int]  # prompt and completion
    start: int  # position of the first token of interest, at least 1
    given: str = ""  # ids of the caller's choice, from ``encode_ids``
    # positions behind ``start`` that are of no interest, each [first, last), in order
    skip: list[tuple[int, int]] = []

    @property
    def rows(self) -> int:
        return len(self.token_ids) - self.start - sum(last - first for first, last in self.skip)


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to ``SCORE_PATH``. Without sequences it asks for the facts alone."""

    version: int  # the client's
    sequences: list[SequenceRequest]  # what to answer for, in order
    kinds: list[str] = []  # names of ``kinds.KINDS``
    k: int = 0  # of the kind ``top_k``
    model: str = ""  # the served name; the server answers 404 for another, as an adapter's


class RequestLimits(msgspec.Struct, frozen=True):
    """The largest request that a server takes. It answers 413 to a larger one."""

    sequences: Count  # of a request
    tokens: Count  # of all its sequences together
    question_bytes: Count  # of its JSON
    answer_bytes: Count  # of the arrays of its response


class Facts(msgspec.Struct):
    """What a server says about itself in each response."""

    model: str  # directory or hub id
    vocab_size: int  # entries of the output head
    hidden_size: int  # columns of hidden states
    max_model_len: int  # longest sequence, plus one
    dtype: str  # of weights and activations, and so of hidden states
    kinds: list[str]  # what it can answer
    vllm: str  # its version
    limits: RequestLimits | None = None  # of a request; None: an older server
    fingerprint: str | None = None  # of the process that computed the rows, and of its last load
    head_dtype: str | None = None  # of the logits; None: an older server, or a quantized model
    runner: str | None = None  # which of vLLM's two model runners; None: an older server

    def change(self, now: "Facts") -> str:
        """Say how the model of a later response differs; empty for the same model.

        Another ``max_model_len``, other kinds or limits, another vLLM and another start of the
        engine are no other model.
        """
        return ", ".join(
            f"{name} was {getattr(self, name)} and is {getattr(now, name)}"
            for name in ("model", "vocab_size", "hidden_size", "dtype")
            if getattr(self, name) != getattr(now, name)
        )


class Field(msgspec.Struct, array_like=True):
    """One array of a sequence's response."""

    name: str
    dtype: str  # a name of ``DTYPES``
    columns: Count  # entries per row; 0 for one number without a column axis

    @property
    def row_bytes(self) -> int:
        return np.dtype(DTYPES.get(self.dtype, "<f4")).itemsize * (self.columns or 1)


class SequenceRows(msgspec.Struct):
    """The response for one sequence: one row per token of interest."""

    n: Count  # number of rows
    fields: list[Field]  # the arrays, in order
    data: memoryview  # one array after the other; decoded, a view of the whole response


class ScoreResponse(msgspec.Struct):
    """A response of ``SCORE_PATH``."""

    plugin: str  # ``NAME``; anything else is another route
    version: int  # the server's
    facts: Facts
    sequences: list[SequenceRows]  # one per sequence of the request, in order


class HeadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to ``HEAD_PATH``: for the facts, or for some rows."""

    version: int  # the client's
    first: Count = 0  # first row of the head, which is a token's id
    last: Count = 0  # the row after the last one; equal to ``first`` for the facts


class HeadFacts(msgspec.Struct):
    """How logits come from hidden states: scale · softcap(h Wᵀ + bias).

    softcap(z) is cap · tanh(z / cap), or z without a cap.
    """

    rows: int  # entries of the vocabulary
    columns: int  # size of the hidden states
    dtype: str  # of the weights
    sha256: str  # of the rows' own digests (``row_digests``), in hexadecimal
    scale: float  # factor after the cap
    softcap: float | None  # None for none
    bias: bool  # whether the head has one
    computed_in: str  # the dtype that the server multiplies in


class HeadResponse(msgspec.Struct):
    """A response of ``HEAD_PATH``: the facts, or some rows."""

    plugin: str  # ``NAME``
    version: int  # the server's
    facts: HeadFacts | None = None  # None in a response with rows
    rows: SequenceRows | None = (
        None  # the weights and then, where the head has one, the bias of each row
    )


class _Greeting(msgspec.Struct):
    plugin: str
    version: int


def decode_response(content: Bytes, kind: type[Any]) -> Any:
    """Return a ``ScoreResponse`` or a ``HeadResponse``, whose arrays are views of ``content``."""
    try:
        greeting = msgspec.msgpack.decode(content, type=_Greeting)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no response of the plugin: {error}", is_ours=False) from None
    if greeting.plugin != NAME:
        raise WireError(f"a response of {greeting.plugin[:100]!r}", is_ours=False)
    if greeting.version != VERSION:
        raise WireError(
            f"version {greeting.version} of the plugin, and this prime_composer reads version "
            f"{VERSION}; install the same prime_composer on both sides"
        )
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a damaged response of the plugin: {error}") from None


def response_parts(response: ScoreResponse) -> list[Bytes]:
    """Return the bytes of a response in parts, of which the arrays are no copies.

    The last sequence's arrays end it: a client that knows their size knows where they begin.
    """

    def count(byte: bytes, number: int) -> bytes:
        return byte + number.to_bytes(4, "big")

    # A sequence of its own begins where msgpack has the number of sequences, or of bytes, last.
    rows, empty = response.sequences, msgspec.structs.replace(response, sequences=[])
    parts: list[Bytes] = [msgspec.msgpack.encode(empty)[:-1] + count(b"\xdd", len(rows))]
    for one in rows:
        envelope = msgspec.msgpack.encode(msgspec.structs.replace(one, data=memoryview(b"")))
        parts += [envelope[:-2] + count(b"\xc6", len(one.data)), one.data]
    return parts


def row_digests(weight: NDArray[Any], bias: NDArray[Any] | None) -> bytes:
    """Return the SHA-256 of each row of a head, its bias after its weights, one after the other."""
    if bias is None:
        return b"".join(sha256(row).digest() for row in weight)
    return b"".join(
        sha256(row.tobytes() + entry.tobytes()).digest()
        for row, entry in zip(weight, bias, strict=True)
    )


def unpack_arrays(rows: SequenceRows, n: int) -> dict[str, NDArray[Any]]:
    """Return name -> array, [n] or [n, columns]. No byte is copied. ``n`` rows were asked for."""
    if rows.n != n:
        raise WireError(f"{rows.n} rows, where {n} were expected")
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for field in rows.fields:
        if field.dtype not in DTYPES:
            raise WireError(f"an array of dtype {field.dtype[:100]!r}")
        dtype = np.dtype(DTYPES[field.dtype])
        count = n * (field.columns or 1)
        if offset + count * dtype.itemsize > len(rows.data):
            raise WireError(
                f"{len(rows.data)} bytes, too few for {field.name[:100]!r} with {count} entries"
            )
        array = np.frombuffer(rows.data, dtype, count, offset)
        arrays[field.name] = array.reshape(n, field.columns) if field.columns else array
        offset += count * dtype.itemsize
    if offset != len(rows.data):
        raise WireError(f"{len(rows.data)} bytes, where {offset} were expected")
    return arrays


def encode_ids(ids: Sequence[Sequence[int]] | NDArray[Any]) -> str:
    """Return token ids, or other int32 numbers, [n, m], as text for a request."""
    return base64.b64encode(np.asarray(ids, "<i4").tobytes()).decode("ascii")


def decode_ids(text: str, n: int) -> NDArray[np.int32]:
    """Return the ids of ``encode_ids``, [n, m]."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("ids of rows that are no base64") from None
    if len(data) % (4 * n):
        raise WireError(f"{len(data)} bytes of ids of rows, no multiple of 4 times {n} rows")
    return np.frombuffer(data, "<i4").reshape(n, -1)
