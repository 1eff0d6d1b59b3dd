"""Read a request, and refuse what would end vLLM's engine or take the server from all others."""

import itertools
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request

from prime_composer.scoring.kinds import KINDS, KindRequest, id_outside, row_bytes
from prime_composer.scoring.wire import (
    VERSION,
    Facts,
    HeadRequest,
    RequestLimits,
    ScoreRequest,
    SequenceRequest,
)
from prime_composer.scoring.worker import RowsRequest

MOST_SEQUENCES = 2**10  # Each costs the API server about 0.2 ms, besides its tokens

MOST_TOKENS = 2**18  # Or one sequence of the model's full length where that is longer

MOST_REQUEST_BYTES = 2**25  # Or 16 per token of the longest sequence; decoding takes 0.2 s

MOST_RESPONSE_BYTES = 2**32 - 1  # Of arrays: what a count of msgpack holds

MOST_HEAD_BYTES = 2**29  # Rows of the output head in one response, counted in float32

KEYS_PER_SEQUENCE = 4  # At least as many commas in JSON besides those between tokens


class BadRequest(ValueError):
    """A request that is not answered, with the refusal's ``status``."""

    status = 400


class TooLarge(BadRequest):
    """A request beyond the server's limits."""

    status = 413


class OtherVersion(Exception):
    """A request of another version. The response says which one this is."""


class Versioned(msgspec.Struct):
    """What every request has."""

    version: int


def limits_of(max_model_len: int) -> RequestLimits:
    """Return the limits of a server, which admit any one sequence of its model."""
    return RequestLimits(
        MOST_SEQUENCES,
        max(MOST_TOKENS, max_model_len),
        max(MOST_REQUEST_BYTES, 16 * max_model_len),
        MOST_RESPONSE_BYTES,
    )


async def body_of(request: Request, facts: Facts) -> bytearray:
    """Return a request's body, of which no more is read than the limits admit."""
    limits = limits_of(facts.max_model_len)
    announced, most = request.headers.get("Content-Length", ""), limits.question_bytes
    body = bytearray()
    too_long = announced.isdecimal() and int(announced) > most
    if not too_long:
        async for chunk in request.stream():
            body += chunk
            too_long = len(body) > most
            if too_long:
                break
    if too_long:
        raise TooLarge(f"A request may have {most:,} bytes on this server; ask in pieces.")
    most_commas = limits.tokens + KEYS_PER_SEQUENCE * limits.sequences + 1000
    if body.count(b",") > most_commas:
        raise too_many(limits)
    return body


def too_many(limits: RequestLimits) -> TooLarge:
    """Return the refusal of a request with too many sequences or tokens."""
    return TooLarge(
        f"A request may have {limits.sequences:,} sequences with {limits.tokens:,} tokens in all "
        "on this server; ask in pieces."
    )


def read(body: bytes | bytearray, kind: type[Any]) -> Any:
    """Return a request of this version."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        # Another version's may have other keys.
        with suppress(ValueError, RecursionError):
            if msgspec.json.decode(body, type=Versioned).version != VERSION:
                raise OtherVersion from None
        raise BadRequest(f"The request cannot be read: {error}") from None
    if decoded.version != VERSION:
        raise OtherVersion
    return decoded


def check_request(score_request: ScoreRequest, facts: Facts) -> None:
    limits = limits_of(facts.max_model_len)
    sequences, kinds = score_request.sequences, score_request.kinds
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    if len(sequences) > limits.sequences or tokens > limits.tokens:
        raise too_many(limits)
    if sequences and not kinds or len({*kinds} & KINDS.keys()) != len(kinds):
        raise BadRequest(f"kinds {kinds}, where some of {list(KINDS)} are needed, each once")


def check_head_request(head_request: HeadRequest, facts: Facts) -> None:
    first, last = head_request.first, head_request.last
    if not first <= last <= facts.vocab_size:
        raise BadRequest(
            f"rows {first} to {last}, where 0 <= first <= last <= {facts.vocab_size} is needed"
        )
    if (last - first) * facts.hidden_size * 4 > MOST_HEAD_BYTES:
        raise TooLarge(f"{last - first} rows at once are too many; ask in pieces")


def rows_request_of(index: int, score_request: ScoreRequest, facts: Facts) -> RowsRequest:
    """Return what the worker has to do for one sequence, named by its index."""
    sequence = score_request.sequences[index]
    place, length = f"sequence {index}", len(sequence.token_ids)
    if length + 1 > facts.max_model_len:
        raise BadRequest(
            f"{place} has {length} tokens, and max_model_len = {facts.max_model_len} leaves room "
            f"for {facts.max_model_len - 1}"
        )
    if not 1 <= sequence.start < length:
        raise BadRequest(
            f"{place} has {length} tokens and start = {sequence.start}, where a start from 1 to "
            f"{length - 1} is needed"
        )
    edges = [sequence.start, *itertools.chain(*sequence.skip), length]
    if any(second <= first for first, second in itertools.pairwise(edges)):
        raise BadRequest(
            f"{place} skips {sequence.skip[:3]}, where ranges in order are needed, each [first, "
            f"last) with a token of interest before and after it, from start = {sequence.start} to "
            f"{length}"
        )
    wrong = id_outside(min(sequence.token_ids), max(sequence.token_ids), facts.vocab_size)
    if wrong:
        raise BadRequest(f"{place}: {wrong}")
    try:
        asked = requests_of(sequence, score_request, facts)
        return RowsRequest(sequence.start, length, asked, tuple(sequence.skip))
    except ValueError as error:
        raise BadRequest(f"{place}, {error}") from None


def requests_of(
    sequence: SequenceRequest, score_request: ScoreRequest, facts: Facts
) -> tuple[KindRequest, ...]:
    """Return what each kind of a request is asked for one sequence."""
    found = {name: kind.read(score_request, sequence, facts) for name, kind in KINDS.items()}
    return tuple(request for name in score_request.kinds if (request := found[name]) is not None)


def response_size(rows_requests: list[RowsRequest], facts: Facts) -> int:
    """Return how many bytes a response's arrays have."""
    rows = size = 0
    for rows_request in rows_requests:
        asked = ((KINDS[one.kind], one.k) for one in rows_request.requests)
        rows += rows_request.n
        size += rows_request.n * row_bytes(asked, facts)
    if size > MOST_RESPONSE_BYTES:
        raise TooLarge(
            f"The response would have {size:,} bytes, {size // rows:,} for each token of interest, "
            f"and at most {MOST_RESPONSE_BYTES:,} are answered at once; ask about fewer tokens, or "
            "with a smaller k"
        )
    return size
