"""The one client of a served teacher: its scoring plugin, or vLLM's JSON where it has none.

A server says by itself whether it has the plugin. Responses of both kinds become ``Scores``, which
pass the same check as all others (``backends.alignment.checked``). Whoever asks brings a transport:
the one-machine run and the trainer that of ``backends.server``, prime-rl's orchestrator its own
openai client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.backends.alignment import SequenceToScore, checked
from prime_composer.backends.errors import Refused
from prime_composer.backends.vllm_logprobs import answer_bytes, asked_for, read_answer, top_k_of
from prime_composer.contract import HiddenStates, InvalidAnswer, Scores, TeacherHead
from prime_composer.scoring.head import DTYPES_BY_NAME
from prime_composer.scoring.wire import (
    DTYPES,
    ENVELOPE_BYTES,
    SCORE_PATH,
    VERSION,
    WITHOUT_PLUGIN,
    Answer,
    Bytes,
    Facts,
    Question,
    SequenceToAnswer,
    WireError,
    decode_answer,
    encode_ids,
    row_bytes,
    unpack_arrays,
)

T = TypeVar("T")

CHECKED_ROWS = 1024
"""Rows of hidden states that are looked through at once."""

GREETING_BYTES = 2**20
"""More than any plugin says of itself. Another server's page of this size says that it is none."""

LOST = (404, 405)
"""Statuses of a server that had the plugin's route and has it no more."""


@runtime_checkable
class Transport(Protocol):
    """Sends a client's requests to one server.

    Attributes:
        origin: the server in words, at the beginning of a sentence.
    """

    @property
    def origin(self) -> str: ...

    async def receive(self, path: str, body: Any, max_bytes: int, *, tail: int = 0) -> Bytes:
        """Send one request by POST, again while the server is away, and return the response.

        Args:
            path: below the server's URL.
            body: sent as JSON.
            max_bytes: largest response.
            tail: bytes at the response's end that should begin at an aligned address.

        Raises:
            Refused: an error that another try does not change.
        """
        ...

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``, which reads a large response."""
        ...

    def json_request(self, model: str, token_ids: Sequence[int], k: int) -> tuple[str, Any]:
        """Return path and body of vLLM's own request for the log-probs of a prompt."""
        ...

    def refused(self, refusal: Refused, path: str, k: int = 0) -> Exception:
        """Return the error for a refusal, with its remedy."""
        ...

    def error(self, message: str) -> Exception:
        """Return an error about this server."""
        ...

    def show(self, message: str) -> None:
        """Tell the user."""
        ...


@dataclass
class Known:
    """What is known of a server's scoring plugin.

    Attributes:
        facts: what it last said of itself; None where the server has none.
        first: what it said at first, which later responses have to agree with.
        was_asked: whether the server was asked.
        fingerprints: of all its scores; None among them for those that have none.
    """

    facts: Facts | None = None
    first: Facts | None = None
    was_asked: bool = False
    fingerprints: set[str | None] = field(default_factory=set)

    @property
    def vocab_size(self) -> int | None:
        """Entries of the teacher's head; None where the server has never said it."""
        return None if self.first is None else self.first.vocab_size

    @property
    def starts(self) -> int | None:
        """How many starts of the server its scores have named; None where some name none.

        A start is one of its engine, or a load of other weights. Replicas are starts as well.
        """
        return None if None in self.fingerprints else len(self.fingerprints)


class TeacherClient:
    """Asks one served teacher for scores.

    Args:
        transport: sends the requests.
        model: the name that the server knows its model by.
        known: of its plugin. Clients of one server may share it.

    Attributes:
        version: of the plugin. A server of another one is refused.
    """

    version = VERSION

    def __init__(self, transport: Transport, model: str, known: Known | None = None):
        self.known = known or Known()
        self._transport = transport
        self._model = model

    @property
    def facts(self) -> Facts | None:
        """What the plugin last said of itself; None where the server has none."""
        return self.known.facts

    async def discover(self) -> None:
        """Ask whether the server has the plugin.

        Raises:
            Exception: the transport's error. The plugin is of another version, or serves another
                model than before; or the server refuses an API key.
        """
        question = msgspec.to_builtins(Question(VERSION, [], model=self._model))
        found = None
        try:
            content = await self._transport.receive(SCORE_PATH, question, GREETING_BYTES)
            found = decode_answer(content, Answer).facts
        except Refused as refusal:
            if refusal.status in (401, 403) or (refusal.status >= 500 and refusal.status != 501):
                raise self._transport.refused(refusal, SCORE_PATH) from refusal
        except InvalidAnswer:
            pass  # larger than any response of the plugin
        except WireError as error:
            if error.is_ours:
                raise self._transport.error(
                    f"{self._transport.origin} answered {SCORE_PATH} with {error}."
                ) from None
        if found is None:
            self.go_without_plugin()
        else:
            self._check_same_model(found)
            self.known.facts = found
        self.known.was_asked = True

    def go_without_plugin(self) -> None:
        """Ask in JSON from now on, until the plugin is discovered again."""
        if self.facts is not None or not self.known.was_asked:  # several requests may see it
            words = "has no" if self.facts is None else "lost its"
            self._transport.show(f"{self._transport.origin} {words} {WITHOUT_PLUGIN}")
        self.known.facts = None

    def _check_same_model(self, now: Facts) -> None:
        self.known.first = self.known.first or now
        change = self.known.first.change(now)
        if change:
            raise self._transport.error(
                f"{self._transport.origin} serves another model since the run began: {change}; "
                "start it as it was, or start a new run."
            )

    async def score(
        self,
        sequence: SequenceToScore,
        candidates: Int[Tensor, "n k"] | None = None,
        *,
        k: int,
        head: TeacherHead | None = None,
        binary: bool = True,
    ) -> Scores:
        """Return the scores of one sequence.

        Args:
            sequence: what to score.
            candidates: ids to score instead of the teacher's own top K. They need the plugin.
            k: K; 0 for the sampled token only.
            head: the teacher's output head, for hidden states too. They need the plugin, and are
                in the teacher's dtype.
            binary: use the plugin where the server has it.

        Raises:
            InvalidAnswer: a response that no model can have given, or hidden states of another
                shape or dtype, or not finite.
            Exception: the transport's error. The server is gone, refuses, has no plugin where one
                is needed, or serves another model.
        """
        if binary and self.facts is not None:
            try:
                return await self._score_binary(sequence, candidates, k, head, self.facts)
            except Refused as refusal:
                if refusal.status not in LOST:
                    raise self._transport.refused(refusal, SCORE_PATH, k) from refusal
                if head is not None or candidates is not None:
                    raise self._transport.error(
                        f"{self._transport.origin} lost its scoring plugin: it was started again "
                        "without it. Start it as it was, with `prime-rl teacher`."
                    ) from refusal
                self.go_without_plugin()
        return await self._score_json(sequence, k)

    async def _score_json(self, sequence: SequenceToScore, k: int) -> Scores:
        """Return the scores from the top ``asked_for(k)`` of a server without the plugin."""
        asked, transport = asked_for(k), self._transport
        path, body = transport.json_request(self._model, sequence.token_ids, asked)
        most = answer_bytes(len(sequence.token_ids), asked)
        try:
            content = await transport.receive(path, body, most)
        except Refused as refusal:
            raise transport.refused(refusal, path, k) from refusal
        self.known.fingerprints.add(None)
        return await transport.read(read_json, content, sequence, k, transport.origin)

    async def _score_binary(
        self,
        sequence: SequenceToScore,
        candidates: Int[Tensor, "n k"] | None,
        k: int,
        head: TeacherHead | None,
        facts: Facts,
    ) -> Scores:
        """Return the plugin's scores, in several requests if the given ids need them."""
        dtype = DTYPES_BY_NAME.get(facts.dtype)
        if head is not None and dtype is None:
            raise self._transport.error(
                f"{self._transport.origin} computes in {facts.dtype}, and hidden states are read "
                f"in {', '.join(DTYPES_BY_NAME)}; start it with --dtype bfloat16."
            )
        if candidates is None:
            return await self._score_rows(sequence, None, k, head)
        parts = []
        for rows in self._rows_per_request(len(sequence.token_ids), candidates, facts):
            stop = sequence.start + rows.stop
            part = replace(
                sequence,
                token_ids=sequence.token_ids[:stop],
                start=sequence.start + rows.start,
                lacks=sequence.lacks[rows.start : rows.stop],
            )
            parts.append(await self._score_rows(part, candidates[rows.start : rows.stop], k, head))
        return joined(parts)

    async def _score_rows(
        self,
        sequence: SequenceToScore,
        candidates: Int[Tensor, "n k"] | None,
        k: int,
        head: TeacherHead | None,
    ) -> Scores:
        facts, by_student = self.facts, candidates is not None
        assert facts is not None
        given = "" if candidates is None else encode_ids(candidates.numpy())
        size = self.answer_bytes(len(sequence.lacks), k, by_student, head is not None)
        question = Question(
            VERSION,
            [SequenceToAnswer(sequence.token_ids, sequence.start, given)],
            kinds_of(by_student, head is not None),
            0 if by_student else asked_for(k),
            self._model,
        )
        content = await self._transport.receive(
            SCORE_PATH, msgspec.to_builtins(question), ENVELOPE_BYTES + size, tail=size
        )
        try:
            answer: Answer = decode_answer(content, Answer)
        except WireError as error:
            raise wrong_answer(self._transport.origin, sequence, str(error)) from None
        self._check_same_model(answer.facts)
        self.known.fingerprints.add(answer.facts.fingerprint)
        return await self._transport.read(
            read_binary, answer, sequence, candidates, k, head, facts, self._transport.origin
        )

    def answer_bytes(self, rows: int, k: int, by_student: bool, hidden: bool) -> int:
        """Return the size of the plugin's arrays; 0 without the plugin.

        Args:
            rows: tokens of interest.
            k: K.
            by_student: whether the ids are the caller's choice.
            hidden: whether there are hidden states.

        Raises:
            Exception: the transport's error. It is more than the server answers at once.
        """
        if self.facts is None:
            return 0
        top, ids = (0, k) if by_student else (asked_for(k), 0)
        per_row = row_bytes(kinds_of(by_student, hidden), top, ids, self.facts)
        limits = self.facts.limits
        if limits is not None and rows * per_row > limits.answer_bytes:
            remedy = 'set k to a number instead of "full"' if hidden else "lower the loss's k"
            raise self._transport.error(
                f"{self._transport.origin} answers at most {limits.answer_bytes:,} bytes at once. "
                f"A rollout with {rows:,} tokens of its own takes {rows * per_row:,}, which are "
                f"{per_row:,} for each; {remedy}, or lower rollout.max_tokens to "
                f"{limits.answer_bytes // per_row:,}."
            )
        return rows * per_row

    def _rows_per_request(
        self, tokens: int, candidates: Int[Tensor, "n k"], facts: Facts
    ) -> Sequence[range]:
        """Return which rows of a sequence to ask for at once, in order."""
        n, m = candidates.shape
        limits = facts.limits
        if limits is None:
            return [range(n)]
        others = ENVELOPE_BYTES + tokens * len(f"{facts.vocab_size}, ")
        most = max(0, limits.question_bytes - others) * 3 // (16 * m)  # base64 of int32
        if most == 0:
            raise self._transport.error(
                f"{self._transport.origin} takes questions of at most {limits.question_bytes:,} "
                f"bytes, too few for {tokens:,} tokens and {m:,} ids for one of them; lower the "
                "loss's k."
            )
        return [range(first, min(first + most, n)) for first in range(0, n, most)]


def kinds_of(by_student: bool, hidden: bool) -> list[str]:
    """Return the kinds of a request for log-probs.

    Args:
        by_student: of ids of the caller's choice, in place of the teacher's top K.
        hidden: with hidden states.
    """
    return ["sampled", "given" if by_student else "top_k", *["hidden"] * hidden]


def read_json(content: Bytes, sequence: SequenceToScore, k: int, origin: str) -> Scores:
    """Return the scores in a response of vLLM in JSON, checked.

    Args:
        content: of ``/inference/v1/generate`` or ``/v1/completions``.
        sequence: what was asked for.
        k: size of the support, 0 for none.
        origin: who answered, for messages.

    Raises:
        InvalidAnswer: the content is something else, does not fit the tokens or K, or its numbers
            are no log-probs.
    """
    rows, asked = read_answer(bytes(content), origin), asked_for(k)
    scores = top_k_of(sequence.token_ids, rows, asked, origin, sequence.start)
    return checked(scores, sequence, k=asked, origin=origin).top(k)


def read_binary(
    answer: Answer,
    sequence: SequenceToScore,
    candidates: Int[Tensor, "n k"] | None,
    k: int,
    head: TeacherHead | None,
    facts: Facts,
    origin: str,
) -> Scores:
    """Return the scores in a response of the scoring plugin, checked.

    Args:
        answer: the decoded response.
        sequence, candidates, k, head: what was asked for (``TeacherClient.score``).
        facts: the server's.
        origin: who answered, for messages.

    Raises:
        InvalidAnswer: it has other sequences, arrays or shapes, or its numbers are none.
    """
    n, asked = len(sequence.lacks), asked_for(k) if candidates is None else k
    try:
        if len(answer.sequences) != 1:
            raise WireError(f"{len(answer.sequences)} sequences, where 1 was expected")
        arrays = unpack_arrays(answer.sequences[0], n)
    except WireError as error:
        raise wrong_answer(origin, sequence, str(error)) from None

    def array(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        found = arrays.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            words = "none" if found is None else f"{found.dtype} {found.shape}"
            expected = f"{np.dtype(dtype)} {shape}"
            raise wrong_answer(
                origin, sequence, f"{words} as {name}, where {expected} was expected"
            )
        return found if found.flags.aligned else found.copy()

    own = torch.from_numpy(array("sampled", (n,), np.float32).copy())
    if candidates is None:
        token_ids = torch.from_numpy(array("top_ids", (n, asked), np.int32).astype(np.int64))
        logprobs = array("top_logprobs", (n, asked), np.float32)
    else:
        token_ids, logprobs = candidates, array("given", (n, k), np.float32)
    scores = checked(
        Scores(own, token_ids, torch.from_numpy(logprobs.copy()), start=sequence.start),
        sequence,
        k=asked,
        origin=origin,
        ranked=candidates is None,
    ).top(k)
    if head is None:
        return scores
    bits = array("hidden", (n, facts.hidden_size), np.dtype(DTYPES[facts.dtype]))
    states = torch.from_numpy(bits).view(DTYPES_BY_NAME[facts.dtype])
    check_finite(states, sequence, origin)
    return replace(scores, hidden=(HiddenStates(states, head, ref_logprobs=scores.ref_logprobs),))


def joined(parts: Sequence[Scores]) -> Scores:
    """Return the scores of adjacent rows of one sequence as one."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    own = torch.cat([part.ref_logprobs for part in parts])
    shares = tuple(
        replace(
            share,
            states=torch.cat([part.hidden[index].states for part in parts]),
            ref_logprobs=own,
        )
        for index, share in enumerate(first.hidden)
    )
    return Scores(
        own,
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.teacher_logprobs for part in parts]),
        shares,
        start=first.start,
    )


def check_finite(states: Float[Tensor, "n d"], sequence: SequenceToScore, origin: str) -> None:
    """Check that hidden states are finite.

    Raises:
        InvalidAnswer: some are not.
    """
    for first in range(0, len(states), CHECKED_ROWS):
        wrong = (~states[first : first + CHECKED_ROWS].isfinite()).any(dim=1).nonzero()
        if len(wrong):
            position = sequence.start + first + int(wrong[0])
            raise InvalidAnswer(
                f"{origin} gave hidden states at sequence {sequence.index}, position {position} "
                "that are not finite."
            )


def wrong_answer(origin: str, sequence: SequenceToScore, found: str) -> InvalidAnswer:
    """Return the error for a response that is none of the plugin's."""
    place = "" if sequence.index is None else f" for sequence {sequence.index}"
    return InvalidAnswer(f"{origin} gave a wrong answer{place}: {found}.")
