"""The client of the scoring plugin: a server's scores, hidden states and head in binary.

A server says by itself whether it has the plugin. Scores pass the same check as all others
(``backends.answers``). What is no answer of the plugin, of another version or of another model than
before ends the run, with the server and the sequence.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
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
from prime_composer.backends.output_head import (
    MOST_HEAD_ENTRIES,
    TORCH_DTYPES,
    OutputHead,
    available_bytes,
    read_head,
)
from prime_composer.backends.protocols import TeacherScores
from prime_composer.backends.vllm_logprobs import asked_for
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
    row_bytes,
    unpack_arrays,
)

HEAD_ROWS = 4096
"""Rows of the output head per request."""

CHECKED_ROWS = 1024
"""Rows of hidden states that are looked through at once."""


class PluginGone(ServerError):
    """A server that had the plugin is there without it."""


def kinds_of(given: bool, hidden: bool) -> list[str]:
    """Return the kinds of a question for log-probs.

    Args:
        given: of ids of the caller's choice, in place of the teacher's top K.
        hidden: with hidden states.
    """
    return ["sampled", "given" if given else "top_k", *["hidden"] * hidden]


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

    async def score(
        self,
        index: int,
        sequence: SequenceToScore,
        k: int,
        candidates: Int[Tensor, "n k"] | None = None,
    ) -> TeacherScores:
        """Return the scores of one sequence.

        Args:
            index: of the sequence, for messages.
            sequence: what to score.
            k: K; 0 for the sampled token only.
            candidates: ids to score instead of the teacher's own top K.

        Raises:
            ServerError: the server is gone, refuses, or serves another model.
            PluginGone: the server has the plugin no more.
            InvalidAnswer: an answer that no model can have given.
        """
        arrays = await self._ask(index, sequence, k, candidates)
        return self._scores(index, sequence, arrays, k, candidates)

    async def score_with_hidden(
        self,
        index: int,
        sequence: SequenceToScore,
        k: int = 0,
        candidates: Int[Tensor, "n k"] | None = None,
    ) -> tuple[TeacherScores, Float[Tensor, "n d"]]:
        """Return the scores of one sequence, and the last hidden states behind them.

        The states are those after the final norm, in the teacher's dtype. Row i predicts token
        ``start + i``. The scores hold no hidden states, whose head is another request.

        Args:
            index: of the sequence, for messages.
            sequence: what to score.
            k: K; 0 for the sampled token only.
            candidates: ids to score instead of the teacher's own top K.

        Raises:
            ServerError: the server is gone, refuses, or serves another model.
            PluginGone: the server has the plugin no more.
            InvalidAnswer: an answer that no model can have given, or hidden states of another shape
                or dtype, or not finite.
        """
        dtype = TORCH_DTYPES.get(self.facts.dtype)
        if dtype is None:
            raise self._connection.error(
                f"{self._connection.name} computes in {self.facts.dtype}, and hidden states are "
                f"read in {', '.join(TORCH_DTYPES)}; start it with --dtype bfloat16."
            )
        arrays = await self._ask(index, sequence, k, candidates, hidden=True)
        scores = self._scores(index, sequence, arrays, k, candidates)
        shape = (len(sequence.token_ids) - sequence.start, self.facts.hidden_size)
        bits = self._array(arrays, "hidden", shape, np.dtype(DTYPES[self.facts.dtype]), index)
        hidden = torch.from_numpy(bits).view(dtype)
        for first in range(0, len(hidden), CHECKED_ROWS):
            wrong = (~hidden[first : first + CHECKED_ROWS].isfinite()).any(dim=1).nonzero()
            if len(wrong):
                position = sequence.start + first + int(wrong[0])
                raise InvalidAnswer(
                    f"{self.origin} gave hidden states at sequence {index}, position {position} "
                    "that are not finite."
                )
        return scores, hidden

    def _scores(
        self,
        index: int,
        sequence: SequenceToScore,
        arrays: dict[str, NDArray[Any]],
        k: int,
        candidates: Int[Tensor, "n k"] | None,
    ) -> TeacherScores:
        n, asked = len(sequence.token_ids) - sequence.start, asked_for(k)
        own = self._array(arrays, "sampled", (n,), np.float32, index)
        if candidates is None:
            ids = self._array(arrays, "top_ids", (n, asked), np.int32, index).astype(np.int64)
            logprobs = self._array(arrays, "top_logprobs", (n, asked), np.float32, index)
            token_ids = torch.from_numpy(ids)
        else:
            asked = k
            logprobs = self._array(arrays, "given", (n, k), np.float32, index)
            token_ids = candidates
        scores = make_scores(
            torch.from_numpy(own.copy()),
            token_ids,
            torch.from_numpy(logprobs.copy()),
            sampled=sequence.sampled,
            k=asked,
            vocab_size=self.facts.vocab_size,
            origin=self.origin,
            sequence=index,
            start=sequence.start,
            ranked=candidates is None,
            lacks=sequence.lacks,
        )
        return replace(
            scores,
            token_ids=scores.token_ids[:, :k],
            teacher_logprobs=scores.teacher_logprobs[:, :k],
        )

    def head(self, folder: Path | None = None) -> OutputHead:
        """Return the teacher's output head.

        Args:
            folder: where heads are kept, in a file that is named by its hash. None: nowhere.

        Raises:
            ServerError: the server is gone or cannot read it, or it changed meanwhile.
        """
        facts = self._checked_facts()
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

    def _checked_facts(self) -> HeadFacts:
        """Return the head's facts, if they fit what the server says of its model."""
        facts = self.head_facts()
        rows, columns = self.facts.vocab_size, self.facts.hidden_size
        fits = (facts.rows, facts.columns) == (rows, columns) and rows * columns < MOST_HEAD_ENTRIES
        if facts.dtype not in TORCH_DTYPES or not fits:
            raise self._head_error(
                f"is {facts.rows} x {facts.columns} in {facts.dtype}, where {rows} x {columns} in "
                f"{', '.join(TORCH_DTYPES)} was expected"
            )
        if available_bytes() < facts.rows * facts.columns * TORCH_DTYPES[facts.dtype].itemsize:
            raise self._head_error(
                f"is {facts.rows} x {facts.columns} in {facts.dtype}, and this machine has "
                f"{available_bytes() / 1e9:.1f} GB of free memory; set k to a number"
            )
        return facts

    def head_of_files(self, folder: Path) -> OutputHead:
        """Return the output head of a checkpoint on this machine, if it is the server's.

        Args:
            folder: of the checkpoint.

        Raises:
            ServerError: the head is another one, or the server cannot read its own.
            ValueError: the folder has no head.
        """
        facts = self._checked_facts()
        weight, bias = read_head(folder, facts.rows)
        dtype = TORCH_DTYPES[facts.dtype]
        head = OutputHead(weight.to(dtype), None if bias is None else bias.to(dtype), facts)
        if head.sha256 != facts.sha256:
            rows, columns = weight.shape
            raise self._head_error(
                f"({facts.rows} x {facts.columns} in {facts.dtype}) is not the one of {folder} "
                f"({rows} x {columns}): it may be quantized, adapted, or of another checkpoint. "
                "Leave `head` out of the teacher's table to read the server's own"
            )
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
        k: int,
        candidates: Int[Tensor, "n k"] | None,
        hidden: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays of a sequence's answer, in several questions if its ids need them."""
        tokens, start = sequence.token_ids, sequence.start
        if candidates is None:
            return await self._ask_rows(index, tokens, start, k, None, hidden)
        parts = []
        for rows in self._rows_per_question(len(tokens), candidates):
            beginning, first = tokens[: start + rows.stop], start + rows.start
            ids = candidates[rows.start : rows.stop]
            parts.append(await self._ask_rows(index, beginning, first, k, ids, hidden))
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def answer_bytes(self, rows: int, k: int, given: bool, hidden: bool) -> int:
        """Return the size of an answer's arrays.

        Args:
            rows: tokens of interest.
            k: K.
            given: whether the ids are the caller's choice.
            hidden: whether it has hidden states.

        Raises:
            ServerError: it is more than the server answers at once.
        """
        top, ids = (0, k) if given else (asked_for(k), 0)
        per_row = row_bytes(kinds_of(given, hidden), top, ids, self.facts)
        limits = self.facts.limits
        if limits is not None and rows * per_row > limits.answer_bytes:
            remedy = 'set k to a number instead of "full"' if hidden else "lower the loss's k"
            raise self._connection.error(
                f"{self._connection.name} answers at most {limits.answer_bytes:,} bytes at once. A "
                f"rollout with {rows:,} tokens of its own takes {rows * per_row:,}, which are "
                f"{per_row:,} for each; {remedy}, or lower rollout.max_tokens to "
                f"{limits.answer_bytes // per_row:,}."
            )
        return rows * per_row

    def _rows_per_question(self, tokens: int, candidates: Int[Tensor, "n k"]) -> Sequence[range]:
        """Return which rows of a sequence to ask for at once, in order."""
        n, m = candidates.shape
        limits = self.facts.limits
        if limits is None:
            return [range(n)]
        others = ENVELOPE_BYTES + tokens * len(f"{self.facts.vocab_size}, ")
        most = max(0, limits.question_bytes - others) * 3 // (16 * m)  # base64 of int32
        if most == 0:
            raise self._connection.error(
                f"{self._connection.name} takes questions of at most {limits.question_bytes:,} "
                f"bytes, too few for {tokens:,} tokens and {m:,} ids for one of them; lower the "
                "loss's k."
            )
        return [range(first, min(first + most, n)) for first in range(0, n, most)]

    async def _ask_rows(
        self,
        index: int,
        tokens: list[int],
        start: int,
        k: int,
        candidates: Int[Tensor, "n k"] | None,
        hidden: bool,
    ) -> dict[str, NDArray[Any]]:
        asked, given = (
            (asked_for(k), "") if candidates is None else (0, encode_ids(candidates.numpy()))
        )
        kinds = kinds_of(candidates is not None, hidden)
        size = self.answer_bytes(len(tokens) - start, k, candidates is not None, hidden)
        one = SequenceToAnswer(tokens, start, given)
        question = msgspec.to_builtins(Question(VERSION, [one], kinds, asked, self._model))
        try:
            content = await self._connection.receive(
                "POST", SCORE_PATH, question, ENVELOPE_BYTES + size, tail=size
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
        return found if found.flags.aligned else found.copy()
