"""How ``SpoilingServer`` spoils an answer: one name per way.

``ROWS`` change rows of prompt_logprobs, ``ANSWERS`` a whole answer with scores, ``SAMPLES`` one
with rollouts, ``CARDS`` the list of models. ``BODIES`` replace the bytes of any answer, and
``CONNECTIONS`` are played by the server itself. ``MODELS`` are plausible numbers. ``PACKED`` change
an answer of the scoring plugin, and ``PACKED_BODIES`` its bytes. ``reload_ignored`` is a server
that takes no weights, ``tokens_shifted`` another tokenizer. ``status_NNN`` answers with that
status, and ``status_NNN_after`` with the header Retry-After as well.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

Row = dict[str, dict[str, Any]]
RowMode = Callable[[Row], Row]
AnswerMode = Callable[[dict[str, Any]], Any]
"""Answer -> the spoiled answer; it may change the answer in place."""


def encode(answer: Any) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(answer).encode()


def each(change: Callable[[float], Any]) -> RowMode:
    """Change the log-prob of every entry of a row."""
    return lambda row: {
        key: {**entry, "logprob": change(entry["logprob"])} for key, entry in row.items()
    }


ROWS: dict[str, RowMode] = {
    "positive_0.3": each(lambda value: value + 0.3),
    "nan": each(lambda value: math.nan),
}
"""The checks of every value have tests of their own (``tests/backends/test_answers.py``)."""


def set_rows(change: Callable[[list[Any]], Any]) -> AnswerMode:
    """Replace the rows of an answer."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        holder = answer["choices"][0]
        holder["prompt_logprobs"] = change(holder["prompt_logprobs"])
        return answer

    return spoil


def two_choices(answer: dict[str, Any]) -> dict[str, Any]:
    """Add a choice."""
    found = answer["choices"]
    return answer | {"choices": [*found, {**found[0], "index": len(found)}]}


ANSWERS: dict[str, AnswerMode] = {
    "rows_swapped": set_rows(lambda rows: [None, *rows[2:], rows[1]]),
    "two_choices": two_choices,
}


def samples(
    ids: Callable[[list[int]], Any] = list, mu: Callable[[list[float]], Any] = list
) -> AnswerMode:
    """Replace token ids and log-probs of every rollout."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            choice["token_ids"] = ids(choice["token_ids"])
            choice["logprobs"]["token_logprobs"] = mu(choice["logprobs"]["token_logprobs"])
        return answer

    return spoil


SAMPLES: dict[str, AnswerMode] = {
    "mu_shifted": samples(mu=lambda values: [value - 1 for value in values]),
    "mu_one_for_all": samples(mu=lambda values: values[:1]),
    "too_many_tokens": samples(
        lambda tokens: tokens + tokens[-1:] * 50, lambda values: values + [-1.0] * 50
    ),
}

CARDS: dict[str, AnswerMode] = {
    "models_number": lambda answer: {"data": [1]},
    "models_none": lambda answer: {"data": []},
}

PackedMode = Callable[[dict[str, Any]], Any]
"""An answer of the plugin as a map -> the spoiled answer."""


def pack(answer: Any) -> bytes:
    """Return an answer of the plugin as bytes."""
    return msgspec.msgpack.encode(answer)


def facts(**values: Any) -> PackedMode:
    """Set facts of an answer."""
    return lambda answer: answer | {"facts": answer["facts"] | values}


def sequence(change: Callable[[dict[str, Any]], dict[str, Any]]) -> PackedMode:
    """Change the first sequence of an answer."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        first, *rest = answer["sequences"]
        return answer | {"sequences": [change(first), *rest]}

    return spoil


def array(name: str, change: Callable[[Any], Any]) -> PackedMode:
    """Change an array of the first sequence; its length stays."""

    def spoil(one: dict[str, Any]) -> dict[str, Any]:
        data, offset = bytearray(one["data"]), 0
        for found, dtype, columns in one["fields"]:
            count = one["n"] * (columns or 1)
            if found == name:
                values = np.frombuffer(one["data"], dtype, count, offset).copy()
                values = values.reshape(one["n"], columns) if columns else values
                changed = np.asarray(change(values), dtype).tobytes()
                data[offset : offset + 4 * count] = changed
            offset += 4 * count
        return one | {"data": bytes(data)}

    return sequence(spoil)


def at_last(value: Any) -> Callable[[Any], Any]:
    """Set the last row of an array."""

    def change(values: Any) -> Any:
        values[-1] = value
        return values

    return change


def row_short(one: dict[str, Any]) -> dict[str, Any]:
    """Leave the last row of every array out, and say so."""
    pieces, offset = [], 0
    for _, _, columns in one["fields"]:
        size = 4 * (columns or 1)
        pieces.append(one["data"][offset : offset + size * (one["n"] - 1)])
        offset += size * one["n"]
    return one | {"n": one["n"] - 1, "data": b"".join(pieces)}


PACKED: dict[str, PackedMode] = {
    "packed_nan": array("sampled", at_last(math.nan)),
    "packed_rows_swapped": array("sampled", lambda values: np.roll(values, 1)),
    "packed_row_short": sequence(row_short),
    "packed_vocab_size": facts(vocab_size=7),
    "packed_model": facts(model="another"),
}
"""For the binary road. Each array has 4 bytes per entry. More damage of bytes and fields is in
``tests/scoring/test_wire.py``."""

PACKED_STATES: dict[str, PackedMode] = {
    "states_rows_swapped": array("hidden", lambda values: np.roll(values, 1, axis=0)),
    "states_scaled": array("hidden", lambda values: 1.1 * values),
    "states_of_the_wrong_width": sequence(
        lambda one: one | {
            "fields": [
                [*field[:2], field[2] - 1 if field[0] == "hidden" else field[2]]
                for field in one["fields"]
            ],
            "data": one["data"][: -4 * one["n"]],
        }
    ),
}  # fmt: skip
"""The same, where hidden states were asked for. They come last."""

PACKED_BODIES: dict[str, Callable[[bytes], bytes]] = {
    "packed_truncated": lambda content: content[: len(content) // 2],
}

WHOLE = ANSWERS | SAMPLES | CARDS | PACKED | PACKED_STATES
"""What changes a whole answer."""

DEEP = 100_000

BODIES: dict[str, bytes] = {
    "html": b"<html><body><h1>It works!</h1></body></html>",
    "garbage": bytes(range(1, 256)) * 4,
    "deep": b"[" * DEEP + b"]" * DEEP,
}

CONNECTIONS = ("drop", "cut")
"""Played by the server: a closed connection, and a cut body."""

MODELS = ("other_model", "other_model_for_new", "tempered")
"""Plausible numbers of another model, or of another temperature. ``other_model_for_new`` is right
for a sequence that was scored before, as a probe's."""

ROADS = ("scoring", "binary", "head", "sampling", "models", "reload", "tokenize")
"""``binary`` are the scores of the scoring plugin, ``head`` its output head."""


def road_of(mode: str) -> str | None:
    """Return the road that a mode spoils; None where it may spoil any."""
    if mode in ROWS or mode in ANSWERS or mode in MODELS:
        return "scoring"
    if mode in PACKED or mode in PACKED_STATES or mode in PACKED_BODIES:
        return "binary"
    if mode in SAMPLES:
        return "sampling"
    if mode in CARDS:
        return "models"
    if mode == "reload_ignored":
        return "reload"
    if mode == "tokens_shifted":
        return "tokenize"
    if mode in BODIES or mode in CONNECTIONS:
        return None
    if re.fullmatch(r"status_\d{3}(_after)?", mode):
        return None
    raise KeyError(mode)
