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

NAME = "prime_composer"
"""Of the plugin, in VLLM_PLUGINS and in each response."""

VERSION = 1
SCORE_PATH = "/v1/prime_composer/score"
HEAD_PATH = "/v1/prime_composer/head"
"""Below /v1, so that the server's API key guards them."""

FLOAT32_HEAD = {"head_dtype": "float32"}
"""vLLM's ``hf_overrides`` for float32 sums of the head's products, also in half precision."""

DTYPES = {"int32": "<i4", "float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
"""Name in a response -> NumPy's. NumPy has no bfloat16: its bits come as integers."""

ENVELOPE_BYTES = 2**14
"""What a response may have besides its arrays, in all and again for each sequence."""

Bytes = bytes | bytearray | memoryview

Count = Annotated[int, msgspec.Meta(ge=0)]

WITHOUT_PLUGIN = (
    "scoring plugin and answers in JSON, which has no hidden states, and is several times slower "
    "for K of 8 and more; `prime-composer teacher` starts a server with it"
)
"""End of the sentence in which a client says that a server has or had no plugin."""


class WireError(ValueError):
    """Bytes that are no request or no response of this version.

    ``is_ours`` says whether they come from this plugin, of whatever version.
    """

    def __init__(self, message: str, is_ours: bool = True):
        super().__init__(message)
        self.is_ours = is_ours


class SequenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence of a request.

    Attributes:
        token_ids: prompt and completion.
        start: position of the first token of interest, at least 1: token 0 has no context.
        given: ids of the caller's choice for each token of interest, from ``encode_ids``.
    """

    token_ids: list[int]
    start: int
    given: str = ""

    @property
    def rows(self) -> int:
        """Tokens of interest."""
        return len(self.token_ids) - self.start


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to ``SCORE_PATH``. Without sequences it asks for the facts alone.

    Attributes:
        version: the client's.
        sequences: what to answer for, in order.
        kinds: names of ``kinds.KINDS``, what each sequence's response has.
        k: K of the kind ``top_k``.
        model: the served name, for a router and for the server. It answers 404 for another one,
            such as an adapter: the plugin answers for the model itself.
    """

    version: int
    sequences: list[SequenceRequest]
    kinds: list[str] = []
    k: int = 0
    model: str = ""


class Limits(msgspec.Struct, frozen=True):
    """The largest request that a server takes. It answers 413 to a larger one.

    Attributes:
        sequences: of a request.
        tokens: of all its sequences together.
        question_bytes: of its JSON.
        answer_bytes: of the arrays of its response.
    """

    sequences: Count
    tokens: Count
    question_bytes: Count
    answer_bytes: Count


class Facts(msgspec.Struct):
    """What a server says about itself in each response.

    Attributes:
        model: directory or hub id.
        vocab_size: entries of the output head.
        hidden_size: columns of hidden states.
        max_model_len: longest sequence, plus one.
        dtype: of weights and activations, and so of hidden states.
        kinds: what it can answer.
        vllm: its version.
        limits: of a request. None: an older server, which does not say.
        fingerprint: of the engine's process that computed the rows, and of its last load of
            weights. None: an older server, or a response without rows.
        head_dtype: of the logits. None: an older server, or a quantized model, whose head may be.
    """

    model: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: str
    kinds: list[str]
    vllm: str
    limits: Limits | None = None
    fingerprint: str | None = None
    head_dtype: str | None = None

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
    """One array of a sequence's response.

    Attributes:
        name: of the array.
        dtype: a name of ``DTYPES``.
        columns: entries per row; 0 for one number without a column axis.
    """

    name: str
    dtype: str
    columns: Count

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return np.dtype(DTYPES.get(self.dtype, "<f4")).itemsize * (self.columns or 1)


class Rows(msgspec.Struct):
    """The response for one sequence: one row per token from ``start`` to the end.

    Attributes:
        n: number of rows.
        fields: the arrays, in order.
        data: the arrays' bytes, one array after the other. Decoded, they are a view of the whole
            response.
    """

    n: Count
    fields: list[Field]
    data: memoryview


class ScoreResponse(msgspec.Struct):
    """A response of ``SCORE_PATH``.

    Attributes:
        plugin: ``NAME``. Anything else is another route.
        version: the server's.
        facts: what the server says about itself.
        sequences: one per sequence of the request, in order.
    """

    plugin: str
    version: int
    facts: Facts
    sequences: list[Rows]


class HeadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to ``HEAD_PATH``: for the facts, or for some rows.

    Attributes:
        version: the client's.
        first: first row of the head, which is a token's id.
        last: the row after the last one; equal to ``first`` for the facts alone.
    """

    version: int
    first: Count = 0
    last: Count = 0


class HeadFacts(msgspec.Struct):
    """How logits come from hidden states: scale · softcap(h Wᵀ + bias).

    softcap(z) is cap · tanh(z / cap), or z without a cap.

    Attributes:
        rows: entries of the vocabulary.
        columns: size of the hidden states.
        dtype: of the weights.
        sha256: of the rows' own digests (``row_digests``), in hexadecimal digits.
        scale: factor after the cap.
        softcap: cap of the logits; None for none.
        bias: whether the head has one.
        computed_in: the dtype that the server multiplies in.
    """

    rows: int
    columns: int
    dtype: str
    sha256: str
    scale: float
    softcap: float | None
    bias: bool
    computed_in: str


class HeadResponse(msgspec.Struct):
    """A response of ``HEAD_PATH``: the facts, or some rows.

    Attributes:
        plugin: ``NAME``.
        version: the server's.
        facts: None in a response with rows.
        rows: the weights and then, where the head has one, the bias of each row.
    """

    plugin: str
    version: int
    facts: HeadFacts | None = None
    rows: Rows | None = None


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

    The last sequence's arrays end the response, so that a client that knows their size knows where
    they begin.
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
    """Return the SHA-256 of each row of a head, one after the other.

    They do not depend on how workers share the rows among them. A row's bias is hashed after its
    weights.
    """
    if bias is None:
        return b"".join(sha256(row).digest() for row in weight)
    return b"".join(
        sha256(row.tobytes() + entry.tobytes()).digest()
        for row, entry in zip(weight, bias, strict=True)
    )


def unpack_arrays(rows: Rows, n: int) -> dict[str, NDArray[Any]]:
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
