"""The one client of a served teacher: its scoring plugin, or vLLM's JSON where it has none.

A server says by itself whether it has the plugin. Responses of both kinds become ``Scores``, which
pass the same check as all others (``teachers.responses``). Whoever asks brings a transport:
the one-machine run and the trainer that of ``backends.server``, prime-rl's orchestrator its own
openai client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.alignment import SequenceToScore, make_rollout, sequences_to_score
from prime_composer.backends.answers import check_choices
from prime_composer.backends.errors import RequestRefused, ServerError
from prime_composer.backends.server import completion_request, plain_sampling
from prime_composer.backends.vllm_logprobs import answer_bytes, at_least_one, read_completions
from prime_composer.contract import InvalidAnswer, Scores, TeacherHead
from prime_composer.scoring.head import DTYPES_BY_NAME
from prime_composer.scoring.kinds import (
    GIVEN,
    HIDDEN,
    SAMPLED,
    TOP_K,
    Kind,
    SupportKind,
    row_bytes,
)
from prime_composer.scoring.wire import (
    ENVELOPE_BYTES,
    SCORE_PATH,
    VERSION,
    WITHOUT_PLUGIN,
    Bytes,
    Facts,
    ScoreRequest,
    ScoreResponse,
    SequenceRequest,
    WireError,
    decode_response,
)
from prime_composer.teachers.compatibility import OwnLogprobs
from prime_composer.teachers.responses import (
    AskedOfPlugin,
    joined_rows,
    read_binary_response,
    read_json_response,
    wrong_response,
)

T = TypeVar("T")

GREETING_BYTES = 2**20  # More than any plugin says of itself. A larger page is of another server.

LOST = (404, 405)  # Statuses of a server that had the plugin's route and has it no more

OWN_TOKENS = 32  # What a server samples, to score it


@runtime_checkable
class Transport(Protocol):
    """Sends a client's requests to one server."""

    @property
    def origin(self) -> str:
        """The server in words, at the beginning of a sentence."""
        ...

    async def receive(self, path: str, body: Any, max_bytes: int, *, tail: int = 0) -> Bytes:
        """Send one request by POST, again while the server is away, and return the response.

        It has ``max_bytes`` at most, of which the last ``tail`` should begin at an aligned address.
        ``RequestRefused`` is an error that another try does not change.
        """
        ...

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``, which reads a large response."""
        ...

    def json_request(self, model: str, token_ids: Sequence[int], k: int) -> tuple[str, Any]:
        """Return path and body of vLLM's own request for the log-probs of a prompt."""
        ...

    def refused(self, refusal: RequestRefused, path: str, k: int = 0) -> Exception:
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
    """What is known of a server's scoring plugin."""

    facts: Facts | None = None  # what it last said of itself; None where the server has none
    first: Facts | None = None  # what it said at first, which later responses have to agree with
    was_asked: bool = False  # whether the server was asked
    fingerprints: set[str | None] = field(default_factory=set)  # None: of scores without one

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


def support_kind(by_student: bool) -> SupportKind:
    """Return the kind that gives a support, of the teacher's choice or of the student's."""
    return GIVEN if by_student else TOP_K


class TeacherClient:
    """Asks one served teacher for scores. Clients of one server may share what is ``known``."""

    version = VERSION  # of the plugin; a server of another one is refused

    def __init__(self, transport: Transport, model: str, known: Known | None = None):
        self.known = known or Known()
        self.transport = transport
        self.model = model

    @property
    def facts(self) -> Facts | None:
        """What the plugin last said of itself; None where the server has none."""
        return self.known.facts

    async def discover_once(self) -> None:
        """Ask whether the server has the plugin, unless it was asked before."""
        if not self.known.was_asked:
            await self.discover()

    async def discover(self) -> None:
        """Ask whether the server has the plugin. Errors are the transport's."""
        score_request = msgspec.to_builtins(ScoreRequest(VERSION, [], model=self.model))
        found = None
        try:
            content = await self.transport.receive(SCORE_PATH, score_request, GREETING_BYTES)
            found = decode_response(content, ScoreResponse).facts
        except RequestRefused as refusal:
            if refusal.status in (401, 403) or (refusal.status >= 500 and refusal.status != 501):
                raise self.transport.refused(refusal, SCORE_PATH) from refusal
        except InvalidAnswer:
            pass  # larger than any response of the plugin
        except WireError as error:
            if error.is_ours:
                raise self.transport.error(
                    f"{self.transport.origin} answered {SCORE_PATH} with {error}."
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
            self.transport.show(f"{self.transport.origin} {words} {WITHOUT_PLUGIN}")
        self.known.facts = None

    def _check_same_model(self, now: Facts) -> None:
        self.known.first = self.known.first or now
        change = self.known.first.change(now)
        if change:
            raise self.transport.error(
                f"{self.transport.origin} serves another model since the run began: {change}; "
                "start it as it was, or start a new run."
            )

    def check_can(self, kind: SupportKind, hidden: bool, *, binary: bool = True) -> None:
        """Check that the server has what only a plugin gives."""
        what = "hidden states" if hidden else kind.what
        if self.facts is None or not binary:
            if hidden or not kind.in_json:
                raise self.transport.error(
                    f"{self.transport.origin} has no scoring plugin, which {what} need; start it "
                    'with prime-composer teacher, or set k to a number and chosen_by = "teacher".'
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
        """Return the scores of one sequence, with hidden states where there is a ``head``.

        ``candidates`` stand for the teacher's own top K. They and hidden states, which are in the
        teacher's dtype, need the plugin. K = 0 is the sampled token alone. ``InvalidAnswer`` is
        raised where no model can have given a response; other errors are the transport's.
        """
        kind = support_kind(candidates is not None)
        self.check_can(kind, head is not None, binary=binary)
        if binary and self.facts is not None:
            if candidates is None:
                request = TOP_K.of(at_least_one(k))
            else:
                request = GIVEN.of(candidates)
            asked = AskedOfPlugin(kind, request, head)
            try:
                return (await self._score_binary(sequence, asked, self.facts)).top(k)
            except RequestRefused as refusal:
                if refusal.status not in LOST:
                    raise self.transport.refused(refusal, SCORE_PATH, k) from refusal
                if head is not None or not kind.in_json:
                    raise self.transport.error(
                        f"{self.transport.origin} lost its scoring plugin: it was started again "
                        "without it. Start it as it was, with `prime-composer teacher`."
                    ) from refusal
                self.go_without_plugin()
        return await self._score_json(sequence, k)

    async def own_logprobs(self, prompt: Sequence[int]) -> OwnLogprobs | str:
        """Let the server sample some tokens, and score them. A string says why it does not."""
        # Without a seed, which ends a CPU's engine beside a partially prefilled prompt.
        settings = plain_sampling(max_tokens=OWN_TOKENS, ignore_eos=True, temperature=1, logprobs=0)
        body = completion_request(self.model, prompt, settings)
        most = answer_bytes(len(prompt) + OWN_TOKENS, 1)
        try:
            content = await self.transport.receive("/v1/completions", body, most)
            choices = read_completions(bytes(content), self.transport.origin)
            check_choices(len(choices), 1, origin=self.transport.origin, prompt=0)
            logprobs = choices[0].logprobs.token_logprobs if choices[0].logprobs else []
            ids, reason = choices[0].token_ids, choices[0].finish_reason
            rollout = make_rollout(prompt, ids, logprobs, reason, 0)
        except RequestRefused as refusal:
            return f"it answered {refusal.status}: {refusal.reason}"
        except (ServerError, InvalidAnswer) as error:
            return str(error)
        (sequence,) = sequences_to_score([rollout])
        scores = await self.score(sequence, k=0)
        return OwnLogprobs(rollout.inference_logprobs[rollout.start :], scores.ref_logprobs)

    async def _score_json(self, sequence: SequenceToScore, k: int) -> Scores:
        """Return the scores from the top ``at_least_one(k)`` of a server without the plugin."""
        asked, transport = at_least_one(k), self.transport
        path, body = transport.json_request(self.model, sequence.token_ids, asked)
        most = answer_bytes(len(sequence.token_ids), asked)
        try:
            content = await transport.receive(path, body, most)
        except RequestRefused as refusal:
            raise transport.refused(refusal, path, k) from refusal
        self.known.fingerprints.add(None)
        return await transport.read(read_json_response, content, sequence, k, transport.origin)

    async def _score_binary(
        self,
        sequence: SequenceToScore,
        asked: AskedOfPlugin,
        facts: Facts,
    ) -> Scores:
        """Return the plugin's scores, in several requests if the numbers per row need them."""
        if asked.head is not None and facts.dtype not in DTYPES_BY_NAME:
            raise self.transport.error(
                f"{self.transport.origin} computes in {facts.dtype}, and hidden states are read "
                f"in {', '.join(DTYPES_BY_NAME)}; start it with --dtype bfloat16."
            )
        n = len(sequence.lacks)
        parts = [
            await self._score_rows(sequence.window(rows), asked.of_rows(n, rows), facts)
            for rows in self._rows_per_request(sequence, asked, facts)
        ]
        return joined_rows(parts)

    async def _score_rows(
        self, sequence: SequenceToScore, asked: AskedOfPlugin, facts: Facts
    ) -> Scores:
        if sequence.read is not None:
            asked = asked.of_rows(len(sequence.read), sequence.read.numpy())
        one = SequenceRequest(sequence.asked_ids, sequence.ranges[0][0], skip=sequence.skip)
        n = sequence.count
        score_request = ScoreRequest(VERSION, [one], [], model=self.model)
        for each, its in asked.of_kinds:
            each.write(its, score_request, n)
        size = self._checked_size(n, [(each, its.k) for each, its in asked.of_kinds], facts)
        content = await self.transport.receive(
            SCORE_PATH, msgspec.to_builtins(score_request), ENVELOPE_BYTES + size, tail=size
        )
        try:
            response: ScoreResponse = decode_response(content, ScoreResponse)
        except WireError as error:
            raise wrong_response(self.transport.origin, sequence, str(error)) from None
        self._check_same_model(response.facts)
        self.known.fingerprints.add(response.facts.fingerprint)
        return await self.transport.read(
            read_binary_response, response, sequence, asked, facts, self.transport.origin
        )

    def response_bytes(self, rows: int, k: int, by_student: bool, hidden: bool) -> int:
        """Return the size of the plugin's arrays; 0 without the plugin."""
        if self.facts is None:
            return 0
        own = support_kind(by_student), k if by_student else at_least_one(k)
        kinds: list[tuple[Kind, int]] = [(SAMPLED, 0), own, *[(HIDDEN, 0)] * hidden]
        return self._checked_size(rows, kinds, self.facts)

    def _checked_size(self, rows: int, kinds: Sequence[tuple[Kind, int]], facts: Facts) -> int:
        per_row, limits = row_bytes(kinds, facts), facts.limits
        if limits is not None and rows * per_row > limits.answer_bytes:
            hidden = any(kind is HIDDEN for kind, _ in kinds)
            remedy = 'set k to a number instead of "full"' if hidden else "lower the loss's k"
            raise self.transport.error(
                f"{self.transport.origin} answers at most {limits.answer_bytes:,} bytes at once. "
                f"A rollout with {rows:,} tokens of its own takes {rows * per_row:,}, which are "
                f"{per_row:,} for each; {remedy}, or lower rollout.max_tokens to "
                f"{limits.answer_bytes // per_row:,}."
            )
        return rows * per_row

    def _rows_per_request(
        self, sequence: SequenceToScore, asked: AskedOfPlugin, facts: Facts
    ) -> Sequence[slice]:
        """Return which rows of a sequence to ask for at once, in order."""
        read, tokens, limits = sequence.read, len(sequence.token_ids), facts.limits
        n = len(sequence.lacks)
        m = sum(len(request.numbers) for _, request in asked.of_kinds) // (4 * max(1, n))
        if limits is None or m == 0:
            return [slice(0, n)]
        others = ENVELOPE_BYTES + tokens * len(f"{facts.vocab_size}, ")
        most = max(0, limits.question_bytes - others) * 3 // (16 * m)  # base64 of int32
        if most == 0:
            raise self.transport.error(
                f"{self.transport.origin} takes requests of at most {limits.question_bytes:,} "
                f"bytes, too few for {tokens:,} tokens and {m:,} ids for one of them; lower the "
                "loss's k."
            )
        places = range(n) if read is None else read.nonzero()[:, 0].tolist()
        edges = [0, *places[most::most], n]
        return [slice(*ends) for ends in pairwise(edges)]
