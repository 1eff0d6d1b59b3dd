"""Question and answer of the scoring plugin as bytes.

A question is JSON, because prime-rl's router passes no other body on. An answer is a msgpack map
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
"""Of the plugin, in VLLM_PLUGINS and in each answer."""

VERSION = 1
SCORE_PATH = "/v1/prime_composer/score"
HEAD_PATH = "/v1/prime_composer/head"
"""Below /v1, so that the server's API key guards them."""

DTYPES = {"int32": "<i4", "float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
"""Name in an answer -> NumPy's. NumPy has no bfloat16: its bits come as integers."""

ENVELOPE_BYTES = 2**14
"""What an answer may have besides its arrays, in all and again for each sequence."""

Bytes = bytes | bytearray | memoryview

Count = Annotated[int, msgspec.Meta(ge=0)]

WITHOUT_PLUGIN = (
    "scoring plugin and answers in JSON, which is several times slower for K of 8 and more; "
    "`prime-rl teacher` starts a server with it"
)
"""End of the sentence in which a client says that a server has or had no plugin."""


class WireError(ValueError):
    """Bytes that are no question or no answer of this version.

    Attributes:
        is_ours: they come from this plugin, of whatever version.
    """

    def __init__(self, message: str, is_ours: bool = True):
        super().__init__(message)
        self.is_ours = is_ours


class SequenceToAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence of a question.

    Attributes:
        token_ids: prompt and completion.
        start: position of the first token of interest, at least 1: token 0 has no context.
        given: ids of the caller's choice for each token of interest, from ``encode_ids``.
    """

    token_ids: list[int]
    start: int
    given: str = ""


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question to ``SCORE_PATH``. Without sequences it asks for the facts alone.

    Attributes:
        version: the client's.
        sequences: what to answer for, in order.
        kinds: names of ``kinds.KINDS``, what each sequence's answer holds.
        k: K of the kind ``top_k``.
        model: the served name, for a router and for the server. It answers 404 for another one,
            such as an adapter: the plugin answers for the model itself.
    """

    version: int
    sequences: list[SequenceToAnswer]
    kinds: list[str] = []
    k: int = 0
    model: str = ""


class Limits(msgspec.Struct, frozen=True):
    """The largest question that a server takes. It answers 413 to a larger one.

    Attributes:
        sequences: of a question.
        tokens: of all its sequences together.
        question_bytes: of its JSON.
        answer_bytes: of the arrays of its answer.
    """

    sequences: Count
    tokens: Count
    question_bytes: Count
    answer_bytes: Count


class Facts(msgspec.Struct):
    """What a server says about itself in each answer.

    Attributes:
        model: directory or hub id.
        vocab_size: entries of the output head.
        hidden_size: columns of hidden states.
        max_model_len: longest sequence, plus one.
        dtype: of weights and activations, and so of hidden states.
        kinds: what it can answer.
        vllm: its version.
        limits: of a question. None: an older server, which does not say.
        fingerprint: of the engine's process that computed the rows, and of its last load of
            weights. None: an older server, or an answer without rows.
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

    def change(self, now: "Facts") -> str:
        """Say how the model of a later answer differs; empty for the same model.

        Another ``max_model_len``, other kinds or limits, another vLLM and another start of the
        engine are no other model.
        """
        return ", ".join(
            f"{name} was {getattr(self, name)} and is {getattr(now, name)}"
            for name in ("model", "vocab_size", "hidden_size", "dtype")
            if getattr(self, name) != getattr(now, name)
        )


class Field(msgspec.Struct, array_like=True):
    """One array of a sequence's answer.

    Attributes:
        name: of the array.
        dtype: a name of ``DTYPES``.
        columns: entries per row; 0 for one number without a column axis.
    """

    name: str
    dtype: str
    columns: Count


class Rows(msgspec.Struct):
    """The answer for one sequence: one row per token from ``start`` to the end.

    Attributes:
        n: number of rows.
        fields: the arrays, in order.
        data: the arrays' bytes, one array after the other. Decoded, they are a view of the answer.
    """

    n: Count
    fields: list[Field]
    data: memoryview


class Answer(msgspec.Struct):
    """An answer of ``SCORE_PATH``.

    Attributes:
        plugin: ``NAME``. Anything else is another route.
        version: the server's.
        facts: what the server says about itself.
        sequences: one per sequence of the question, in order.
    """

    plugin: str
    version: int
    facts: Facts
    sequences: list[Rows]


class HeadQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question to ``HEAD_PATH``: for the facts, or for some rows.

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


class HeadAnswer(msgspec.Struct):
    """An answer of ``HEAD_PATH``: the facts, or some rows.

    Attributes:
        plugin: ``NAME``.
        version: the server's.
        facts: None in an answer with rows.
        rows: the weights and then, where the head has one, the bias of each row.
    """

    plugin: str
    version: int
    facts: HeadFacts | None = None
    rows: Rows | None = None


class _Greeting(msgspec.Struct):
    plugin: str
    version: int


def decode_answer(content: Bytes, kind: type[Any]) -> Any:
    """Return an ``Answer`` or a ``HeadAnswer``, whose arrays are views of ``content``.

    Raises:
        WireError: it is something else, or of another version.
    """
    try:
        greeting = msgspec.msgpack.decode(content, type=_Greeting)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no answer of the plugin: {error}", is_ours=False) from None
    if greeting.plugin != NAME:
        raise WireError(f"an answer of {greeting.plugin[:100]!r}", is_ours=False)
    if greeting.version != VERSION:
        raise WireError(
            f"version {greeting.version} of the plugin, and this prime_composer reads version "
            f"{VERSION}; install the same prime_composer on both sides"
        )
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a damaged answer of the plugin: {error}") from None


def row_bytes(kinds: Sequence[str], k: int, given: int, facts: Facts) -> int:
    """Return how many bytes an answer has for each token of interest.

    Args:
        kinds: of the question.
        k: K of the kind ``top_k``.
        given: number of ids of the caller's choice.
        facts: the server's.
    """
    hidden = facts.hidden_size * np.dtype(DTYPES.get(facts.dtype, "<f4")).itemsize
    sizes = {"sampled": 4, "top_k": 8 * k, "given": 4 * given, "hidden": hidden}
    return sum(sizes[kind] for kind in kinds)


def answer_parts(answer: Answer) -> list[Bytes]:
    """Return the bytes of an answer in parts, of which the arrays are no copies.

    The last sequence's arrays end the answer, so that a client that knows their size knows where
    they begin.
    """

    def count(byte: bytes, number: int) -> bytes:
        return byte + number.to_bytes(4, "big")

    # A sequence of its own begins where msgpack has the number of sequences, or of bytes, last.
    rows, empty = answer.sequences, msgspec.structs.replace(answer, sequences=[])
    parts: list[Bytes] = [msgspec.msgpack.encode(empty)[:-1] + count(b"\xdd", len(rows))]
    for one in rows:
        envelope = msgspec.msgpack.encode(msgspec.structs.replace(one, data=memoryview(b"")))
        parts += [envelope[:-2] + count(b"\xc6", len(one.data)), one.data]
    return parts


def row_digests(weight: NDArray[Any], bias: NDArray[Any] | None) -> bytes:
    """Return the SHA-256 of each row of a head, one after the other.

    They do not depend on how workers share the rows among them.

    Args:
        weight: [rows, d].
        bias: [rows]; a row's entry is hashed after its weights.
    """
    if bias is None:
        return b"".join(sha256(row).digest() for row in weight)
    return b"".join(
        sha256(row.tobytes() + entry.tobytes()).digest()
        for row, entry in zip(weight, bias, strict=True)
    )


def unpack_arrays(rows: Rows, n: int) -> dict[str, NDArray[Any]]:
    """Return name -> array, [n] or [n, columns]. No byte is copied.

    Args:
        rows: the answer for one sequence.
        n: the rows that were asked for.

    Raises:
        WireError: fields and data do not fit together, or the number of rows is another one.
    """
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
    """Return token ids [n, m] as text for a question."""
    return base64.b64encode(np.asarray(ids, "<i4").tobytes()).decode("ascii")


def decode_ids(text: str, n: int) -> NDArray[np.int32]:
    """Return the ids of ``encode_ids``, [n, m].

    Raises:
        WireError: it is no such text, or its length is no multiple of n.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("given ids that are no base64") from None
    if len(data) % (4 * n):
        raise WireError(f"{len(data)} bytes of given ids, no multiple of 4 times {n} rows")
    return np.frombuffer(data, "<i4").reshape(n, -1)
