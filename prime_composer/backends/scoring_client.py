"""The client of the scoring plugin: a server's scores, hidden states and head in binary.

A server says by itself whether it has the plugin. Scores pass the same check as all others
(``backends.answers``). What is no answer of the plugin, of another version or of another model than
before ends the run, with the server and the sequence.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_composer.backends.alignment import SequenceToScore, make_scores
from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.http import Connection, Refused, ServerError
from prime_composer.backends.protocols import TeacherScores
from prime_composer.backends.vllm_logprobs import asked_for
from prime_composer.scoring.head import DTYPE_NAMES, bits_of
from prime_composer.scoring.wire import (
    DTYPES,
    ENVELOPE_BYTES,
    HEAD_PATH,
    SCORE_PATH,
    VERSION,
    Answer,
    Facts,
    HeadAnswer,
    HeadFacts,
    HeadQuestion,
    Question,
    SequenceToAnswer,
    WireError,
    decode_answer,
    encode_ids,
    row_digests,
    unpack_arrays,
)

HEAD_ROWS = 4096
"""Rows of the output head per request."""

MOST_HEAD_ENTRIES = 2**33
"""More than any model has."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class PluginGone(ServerError):
    """A server that had the plugin is there without it."""


@dataclass(frozen=True)
class OutputHead:
    """A teacher's output head: logits = scale · softcap(h Wᵀ + bias).

    Attributes:
        weight: W, [V, d].
        bias: [V]; None without one.
        facts: scale, softcap, and the dtype that the server multiplies in.
    """

    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, " v"] | None
    facts: HeadFacts

    @property
    def sha256(self) -> str:
        """Of the rows' own digests, in hexadecimal digits."""
        bias = None if self.bias is None else bits_of(self.bias)
        return hashlib.sha256(row_digests(bits_of(self.weight), bias)).hexdigest()

    def logits(self, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return the logits of hidden states, in the dtype that the server computes in."""
        dtype = TORCH_DTYPES[self.facts.computed_in]
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = torch.nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)
        if self.facts.softcap is not None:
            logits = self.facts.softcap * torch.tanh(logits / self.facts.softcap)
        return logits * self.facts.scale


class ScoringClient:
    """Asks the plugin of one server.

    Args:
        connection: to the server.
        facts: what the server said of itself.
        model: the name that the server knows its model by.

    Attributes:
        version: of the plugin. A server of another one is refused.
    """

    version = VERSION

    def __init__(self, connection: Connection, facts: Facts, model: str):
        self.facts = facts
        self.origin = f"{connection.name[0].upper()}{connection.name[1:]}"
        self._connection = connection
        self._model = model

    @classmethod
    def discover(cls, connection: Connection, model: str) -> "ScoringClient | None":
        """Return a client; None where the server has no plugin.

        Args:
            connection: to the server.
            model: the name that the server knows its model by.

        Raises:
            ServerError: the plugin is of another version, or the server is gone.
        """
        question = msgspec.to_builtins(Question(VERSION, [], model=model))
        request = connection.request("POST", SCORE_PATH, question)
        try:
            answer: Answer = decode_answer(connection.run(request), Answer)
        except Refused as refusal:
            if refusal.status in (401, 403):
                raise
            return None
        except WireError as error:
            if not error.is_ours:
                return None
            raise connection.error(
                f"{connection.name} answered {SCORE_PATH} with {error}."
            ) from None
        return cls(connection, answer.facts, model)

    def check_same_model(self, now: Facts) -> None:
        """Check that a later answer is the same model's.

        Raises:
            ServerError: it is another one's.
        """
        change = self.facts.change(now)
        if change:
            raise self._connection.error(
                f"{self._connection.name} serves another model since the run began: {change}; "
                "start it as it was, or start a new run."
            )

    async def score(self, index: int, sequence: SequenceToScore, k: int) -> TeacherScores:
        """Return the scores of one sequence, with the teacher's own top K.

        Args:
            index: of the sequence, for messages.
            sequence: what to score.
            k: K; 0 for the sampled token only.

        Raises:
            ServerError: the server is gone, refuses, or serves another model.
            PluginGone: the server has the plugin no more.
            InvalidAnswer: an answer that no model can have given.
        """
        asked = asked_for(k)
        n = len(sequence.token_ids) - sequence.start
        arrays = await self._ask(index, sequence, ["sampled", "top_k"], n * (4 + 8 * asked), asked)
        own, ids, logprobs = (
            self._array(arrays, name, shape, dtype, index)
            for name, shape, dtype in (
                ("sampled", (n,), np.float32),
                ("top_ids", (n, asked), np.int32),
                ("top_logprobs", (n, asked), np.float32),
            )
        )
        scores = make_scores(
            torch.from_numpy(own.copy()),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logprobs.copy()),
            sampled=torch.tensor(sequence.token_ids[sequence.start :]),
            k=asked,
            vocab_size=self.facts.vocab_size,
            origin=self.origin,
            sequence=index,
            start=sequence.start,
        )
        return replace(
            scores,
            token_ids=scores.token_ids[:, :k],
            teacher_logprobs=scores.teacher_logprobs[:, :k],
        )

    async def given(
        self, index: int, sequence: SequenceToScore, ids: Int[Tensor, "n m"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "n m"]]:
        """Return log q of the sampled tokens, and of ids that the caller chose.

        Args:
            index: of the sequence, for messages.
            sequence: what to score.
            ids: of the caller's choice.

        Raises:
            ServerError: the server is gone, refuses, or serves another model.
            PluginGone: the server has the plugin no more.
            InvalidAnswer: an answer that no model can have given.
        """
        n, m = ids.shape
        size = n * (4 + 4 * m)
        arrays = await self._ask(index, sequence, ["sampled", "given"], size, given=ids.numpy())
        own = self._array(arrays, "sampled", (n,), np.float32, index)
        logprobs = self._array(arrays, "given", (n, m), np.float32, index)
        scores = make_scores(
            torch.from_numpy(own.copy()),
            ids,
            torch.from_numpy(logprobs.copy()),
            sampled=torch.tensor(sequence.token_ids[sequence.start :]),
            k=m,
            vocab_size=self.facts.vocab_size,
            origin=self.origin,
            sequence=index,
            start=sequence.start,
            ranked=False,
        )
        return scores.ref_logprobs, scores.teacher_logprobs

    async def hidden_states(self, index: int, sequence: SequenceToScore) -> Float[Tensor, "n d"]:
        """Return the last hidden states that predict the tokens from ``start`` on.

        They are those after the final norm, in the teacher's dtype.

        Args:
            index: of the sequence, for messages.
            sequence: what to read.

        Raises:
            ServerError: the server is gone, refuses, or serves another model.
            PluginGone: the server has the plugin no more.
            InvalidAnswer: hidden states of another shape or dtype, or not finite.
        """
        n, d = len(sequence.token_ids) - sequence.start, self.facts.hidden_size
        dtype = TORCH_DTYPES.get(self.facts.dtype)
        if dtype is None:
            raise self._connection.error(
                f"{self._connection.name} computes in {self.facts.dtype}, and hidden states are "
                f"read in {', '.join(TORCH_DTYPES)}; start it with --dtype bfloat16."
            )
        arrays = await self._ask(index, sequence, ["hidden"], n * d * dtype.itemsize)
        bits = self._array(arrays, "hidden", (n, d), np.dtype(DTYPES[self.facts.dtype]), index)
        hidden = torch.from_numpy(bits.copy()).view(dtype)
        wrong = (~hidden.isfinite()).any(dim=1).nonzero()
        if len(wrong):
            position = sequence.start + int(wrong[0])
            raise InvalidAnswer(
                f"{self.origin} gave hidden states at sequence {index}, position {position} that "
                "are not finite."
            )
        return hidden

    def head(self, folder: Path | None = None) -> OutputHead:
        """Return the teacher's output head.

        Args:
            folder: where heads are kept, in a file that is named by its hash. None: nowhere.

        Raises:
            ServerError: the server is gone or cannot read it, or it changed meanwhile.
        """
        facts = self.head_facts()
        rows, columns = self.facts.vocab_size, self.facts.hidden_size
        fits = (facts.rows, facts.columns) == (rows, columns) and rows * columns < MOST_HEAD_ENTRIES
        if facts.dtype not in TORCH_DTYPES or not fits:
            raise self._head_error(
                f"is {facts.rows} x {facts.columns} in {facts.dtype}, where {rows} x {columns} in "
                f"{', '.join(TORCH_DTYPES)} was expected"
            )
        path = None if folder is None else folder / f"{facts.sha256}.safetensors"
        if path is not None and path.exists():
            tensors = load_file(path)
        else:
            tensors = self._download_head(facts)
        head = OutputHead(tensors["weight"], tensors.get("bias"), facts)
        if head.sha256 != facts.sha256:
            place = "on the way" if path is None or not path.exists() else f"in {path}; delete it"
            raise self._head_error(f"changed meanwhile, or was damaged {place}")
        if path is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            save_file(tensors, unfinished)
            unfinished.replace(path)
        return head

    def head_facts(self) -> HeadFacts:
        """Return what the server says about the teacher's output head.

        Raises:
            ServerError: the server is gone or cannot read it.
        """
        facts = self._head_answer(0, 0).facts
        if facts is None:
            raise self._head_error("says nothing about itself")
        return facts

    def _download_head(self, facts: HeadFacts) -> dict[str, Tensor]:
        dtype = TORCH_DTYPES[facts.dtype]
        tensors = {"weight": torch.empty(facts.rows, facts.columns, dtype=dtype)}
        if facts.bias:
            tensors["bias"] = torch.empty(facts.rows, dtype=dtype)
        for first in range(0, facts.rows, HEAD_ROWS):
            last = min(first + HEAD_ROWS, facts.rows)
            rows = self._head_answer(first, last, facts).rows
            try:
                arrays = {} if rows is None else unpack_arrays(rows, last - first)
            except WireError as error:
                raise self._head_error(f"has a wrong piece: {error}") from None
            for name, target in tensors.items():
                piece = arrays.get(name)
                if piece is None or piece.shape != target[first:last].shape:
                    raise self._head_error(f"lacks the {name} of rows {first} to {last}")
                target[first:last] = torch.from_numpy(piece.copy()).view(dtype)
        return tensors

    def _head_answer(self, first: int, last: int, facts: HeadFacts | None = None) -> HeadAnswer:
        size = 0 if facts is None else (last - first) * (facts.columns + 1) * 4
        question = msgspec.to_builtins(HeadQuestion(VERSION, first, last))
        request = self._connection.request(
            "POST", HEAD_PATH, question, max_bytes=ENVELOPE_BYTES + size
        )
        try:
            return decode_answer(self._connection.run(request), HeadAnswer)
        except Refused as refusal:
            raise self._connection.error(
                f"{self._connection.name} answered {refusal.status} to {HEAD_PATH}: "
                f"{refusal.reason}"
            ) from refusal
        except WireError as error:
            raise self._head_error(f"comes as {error}") from None

    def _head_error(self, found: str) -> ServerError:
        return self._connection.error(f"The output head of {self._connection.name} {found}.")

    async def _ask(
        self,
        index: int,
        sequence: SequenceToScore,
        kinds: list[str],
        size: int,
        k: int = 0,
        given: NDArray[Any] | None = None,
    ) -> dict[str, NDArray[Any]]:
        tokens, start = sequence.token_ids, sequence.start
        one = SequenceToAnswer(tokens, start, "" if given is None else encode_ids(given))
        question = msgspec.to_builtins(Question(VERSION, [one], kinds, k, self._model))
        try:
            content = await self._connection.request(
                "POST", SCORE_PATH, question, max_bytes=ENVELOPE_BYTES + size
            )
        except Refused as refusal:
            if refusal.status in (404, 405):
                raise PluginGone(
                    f"{self.origin} lost its scoring plugin: it was started again without it. "
                    "Start it as it was, with `prime-rl teacher`.",
                    url=self._connection.url,
                    section=self._connection.section,
                ) from refusal
            raise self._connection.error(
                f"{self._connection.name} answered {refusal.status} to {SCORE_PATH}: "
                f"{refusal.reason}"
            ) from refusal
        try:
            answer: Answer = decode_answer(content, Answer)
            self.check_same_model(answer.facts)
            if len(answer.sequences) != 1:
                raise WireError(f"{len(answer.sequences)} sequences, where 1 was expected")
            return unpack_arrays(answer.sequences[0], len(tokens) - start)
        except WireError as error:
            raise InvalidAnswer(
                f"{self.origin} gave a wrong answer for sequence {index}: {error}."
            ) from None

    def _array(
        self,
        arrays: dict[str, NDArray[Any]],
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        index: int,
    ) -> NDArray[Any]:
        found = arrays.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            words = "none" if found is None else f"{found.dtype} {found.shape}"
            raise InvalidAnswer(
                f"{self.origin} gave a wrong answer for sequence {index}: {words} as {name}, where "
                f"{np.dtype(dtype)} {shape} was expected."
            )
        return found
