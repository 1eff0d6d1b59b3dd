"""A teacher with a tape: what it was asked before is read, and what it answers is kept.

First run and second run see the same numbers: an answer goes through the tape's bytes before its
first use too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import Scores, TeacherHead
from prime_composer.teachers.tape.answers import (
    CHOSEN,
    HEAD_KEY,
    KNOWN_KEY,
    answer_key,
    head_of_bytes,
    head_record,
    ids_as_bytes,
    known_of_bytes,
    known_record,
    scores_as_bytes,
    scores_of_bytes,
    teacher_question,
    text_key,
    text_record,
    texts_of_bytes,
)
from prime_composer.teachers.tape.store import Note, Record, Store, TapeError
from prime_composer.teachers.watch import (
    COMPARED_IDS,
    KNOWN_TOKENS,
    known_rollout,
    largest_difference,
    server_starts,
)

S = TypeVar("S")  # What scores: a ``Scorer``, or the parts of one that are asked for

Header = Mapping[str, Any]  # Whose answers a tape has

ONCE = "run it once with its teacher (tape_only = false)"  # How a tape gets what it lacks


class NotOnTape(TapeError):
    """No teacher is open, and its tape lacks an answer, to the rollout or prompt at ``index``."""

    def __init__(self, what: str, index: int, remedy: str):
        super().__init__(f"{what}; {remedy}")
        self.what, self.index, self.remedy = what, index, remedy


class TapedScorer:
    """Scores of a teacher, each of which is kept on a tape (``protocols.Scorer``).

    An answer with K ids has the answers with fewer ids in it, and one with hidden states has the
    one without. Ids of the caller's choice are part of what is asked. Two of its answers to one
    request may differ by ``limit`` nats.
    """

    def __init__(
        self,
        scorer: Scorer | None,
        store: Store,
        header: Header,
        table: str,
        context: int,
        *,
        limit: float = 0.0,
        is_fixed: bool = True,
        ends: Sequence[int] | None = None,
    ):
        self.live, self._store, self.header, self._table = scorer, store, header, table
        self._context, self._limit, self._is_fixed = context, limit, is_fixed
        self._ends = ends
        self._head: TeacherHead | None = None
        self._counts = Counter[str]()

    @property
    def folder(self) -> Path:
        return self._store.folder

    @property
    def limits(self) -> Limits:
        """The teacher's sizes; of one that is not open, as far as the tape says them."""
        if self.live is not None:
            return self.live.limits
        window = self.header["server_max_model_len"] or self._context
        return Limits(window, self.header["vocab_size"])

    @property
    def gives_any_ids(self) -> bool:
        """Whether the teacher gives any K, chosen ids and hidden states."""
        own = self.header["any_ids"]
        return bool(own if self.live is None else self.live.gives_any_ids)

    @property
    def starts(self) -> int | None:
        """Starts that the teacher's server has named."""
        return server_starts(self.live)

    @property
    def sampler(self) -> "TapedSampler | None":
        """The teacher's sampler, with the same tape; None where the teacher has none."""
        sampler = None if self.live is None else self.live.sampler
        if self.live is not None and sampler is None:
            return None
        return TapedSampler(
            sampler, self._store, self.limits, self._table, self._is_fixed, self._ends
        )

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says. The teacher is asked once for what is not there."""
        vocab_size = self.limits.vocab_size
        k = vocab_size if support_size == "full" else support_size
        if k is None and self.live is not None:
            return self.live.score(rollouts, support_size)  # which refuses it
        if k is None:
            raise TapeError(
                f"[{self._table}] the tape {self.folder} is of a server that did not say the size "
                "of its vocabulary: set k to a number"
            )
        questions = [
            teacher_question(
                rollout,
                k,
                None if prompts is None else prompts[index],
                None if candidate_ids is None else candidate_ids[index],
                hidden,
            )
            for index, rollout in enumerate(rollouts)
        ]
        if hidden and self._head is None and (content := self._store.get(HEAD_KEY)) is not None:
            self._head = head_of_bytes(content, f"The tape {self.folder}")
        self._store.refresh()
        notes = [one.note for one in questions]
        found = {one.key: content for one in notes if (content := self._get(one)) is not None}
        chosen = first_missing([one.key for one in notes], found)
        missing = sum(one.key not in found for one in notes)
        self._counts.update(asked=len(questions), missing=missing)
        if chosen:
            arguments: dict[str, Any] = {"hidden": True} if hidden else {}
            for name, values in (
                ("prompts", prompts),
                ("candidate_ids", candidate_ids),
            ):
                if values is not None:
                    arguments[name] = [values[index] for index in chosen]
            asked = [notes[index] for index in chosen]
            found |= self._ask(rollouts, chosen, asked, support_size, arguments)
        return [
            scores_of_bytes(found[one.note.key], one.start, self._head if hidden else None).top(k)
            for one in questions
        ]

    def _get(self, one: Note) -> bytes | None:
        # An answer about chosen ids has no answer about fewer of them in it.
        content = self._store.get(one.key, one.k, one.hidden, exact=one.kind == CHOSEN)
        # Without the head no loss reads hidden states, as where the disk was full for it.
        return None if one.hidden and self._head is None else content

    def _ask(
        self,
        rollouts: Sequence[Rollout],
        chosen: Sequence[int],
        notes: Sequence[Note],
        support_size: int | Literal["full"],
        arguments: Mapping[str, Any],
    ) -> dict[str, bytes]:
        """Ask the teacher about some rollouts, keep its answers, and return them by their keys."""
        if self.live is None:
            first = rollouts[chosen[0]]
            ids = " ".join(map(str, first.completion_ids[:8]))
            raise NotOnTape(
                f"[{self._table}] the tape {self.folder} lacks {len(chosen)} of "
                f"{len(rollouts)} answers, and tape_only = true opens no teacher. The first one is "
                f"about rollout {chosen[0]}, of {len(first.token_ids) - first.start} tokens that "
                f"begin with {ids} (K = {notes[0].k}{', hidden states' * notes[0].hidden})",
                chosen[0],
                f"{ONCE}, or let `prime-rl tape make` score the data's answers",
            )
        asked = [rollouts[index] for index in chosen]
        self._remember(asked[0], notes[0].k)
        answers = self.live.score(asked, support_size, **arguments)
        if self._head is None and answers[0].hidden:
            self._head = answers[0].hidden[0].head
            self._store.add([head_record(self._head)], self._is_fixed)
        records = [
            Record(note, scores_as_bytes(scores))
            for note, scores in zip(notes, answers, strict=True)
        ]
        self._store.add(records, self._is_fixed)
        # Another process may have been first. Then its numbers are those of all.
        return {
            note.key: self._store.get(note.key, note.k, note.hidden, exact=True) or content
            for note, content in records
        }

    def _remember(self, rollout: Rollout, k: int) -> None:
        """Keep one request with its answer, by which the teacher is known when it is opened."""
        if self.live is None or self._store.get(KNOWN_KEY) is not None:
            return
        end = rollout.start + KNOWN_TOKENS.stop - 1
        known = known_rollout(rollout.token_ids[:end], rollout.start)
        (scores,) = self.live.score([known], min(k, COMPARED_IDS))
        self._store.add([known_record(known, scores)], self._is_fixed)

    @property
    def needs_proof(self) -> bool:
        """Whether answers were kept that others do not read yet."""
        return self._store.is_unmarked

    def mark(self) -> None:
        """Let others read what was kept: the teacher has just answered a known request rightly."""
        self._store.mark()

    def verify(self) -> None:
        """Ask the open teacher what the tape knows, compare, and let others read what was kept."""
        limit = self._limit
        content = self._store.get(KNOWN_KEY)
        if self.live is None or content is None:
            return
        rollout, scores = known_of_bytes(content)
        (again,) = self.live.score([rollout], scores.k)
        apart = largest_difference(scores, again)
        if not apart <= limit:
            raise TapeError(
                f"[{self._table}] the tape {self.folder} has the answers of another teacher: the "
                f"one that is open scores its first tokens {apart:.2g} nat apart (at most "
                f"{limit:g}). Name another folder in `tape`, or run with the tape's teacher. Where "
                "it is the same model on another machine or build, set checks.tolerance above that "
                "difference"
            )
        self.mark()

    def take_metrics(self) -> dict[str, float]:
        """Return the share of the answers since the last call that the tape had."""
        asked, missing = self._counts["asked"], self._counts["missing"]
        self._counts.clear()
        return {"tape/read": 1 - missing / asked} if asked else {}

    def close(self) -> None:
        if self.live is not None:
            self.live.close()


class TapedSampler:
    """Answers that a teacher samples, each of which is kept on its tape (``protocols.Sampler``).

    A greedy answer is one to its prompt. Another one is one of its call: of all its prompts, in
    their order, and of the seed. Both are of what ends an answer.
    """

    def __init__(
        self,
        sampler: Sampler | None,
        store: Store,
        limits: Limits,
        table: str,
        is_fixed: bool,
        ends: Sequence[int] | None = None,
    ):
        self._sampler, self._store, self._table = sampler, store, table
        self._is_fixed = is_fixed
        self._ends = repr(sorted(ends or ())).encode()
        self.limits = limits if sampler is None else sampler.limits

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Sample as ``protocols.Sampler`` says. The teacher is asked for what is not there."""
        of_call: list[tuple[bytes, ...]] = [(self._ends,)] * len(prompts)
        if draws := params.temperature > 0:
            call = self._ends + answer_key(*map(ids_as_bytes, prompts)).encode()
            of_call = [(f"{seed} {place}".encode(), call) for place in range(len(prompts))]
        keys = [
            text_key(prompt, params, *more) for prompt, more in zip(prompts, of_call, strict=True)
        ]
        self._store.refresh()
        found = {key: content for key in keys if (content := self._store.get(key)) is not None}
        places = first_missing(keys, found)
        if places:
            if draws:  # those of a call belong together
                places = [*range(len(prompts))]
            found |= self._ask(prompts, keys, places, params, seed)
        return [
            rollout
            for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
            for rollout in texts_of_bytes(found[key], prompt, place)
        ]

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[str],
        places: Sequence[int],
        params: SamplingParams,
        seed: int,
    ) -> dict[str, bytes]:
        if self._sampler is None:
            raise NotOnTape(
                f"[{self._table}] the tape {self._store.folder} lacks the teacher's own answers "
                f"to {len(places)} of {len(prompts)} prompts, and tape_only = true opens no "
                "teacher",
                places[0],
                ONCE,
            )
        rollouts = self._sampler.generate([prompts[place] for place in places], params, seed)
        records = [
            text_record(
                keys[place],
                prompts[place],
                [one for one in rollouts if one.prompt_index == index],
            )
            for index, place in enumerate(places)
        ]
        self._store.add(records, self._is_fixed)
        return {
            record.note.key: self._store.get(record.note.key) or record.content
            for record in records
        }

    def update_weights(self, model: nn.Module) -> None:
        """Refuse: a teacher's weights are fixed."""
        raise NotImplementedError("the weights of a teacher are fixed")

    def close(self) -> None:
        """Do nothing: the scorer closes its sampler."""


def first_missing(keys: Sequence[str], found: Mapping[str, bytes]) -> list[int]:
    """Return the places of the keys that were not found, of equal ones the first."""
    missing: dict[str, int] = {}
    for place, key in enumerate(keys):
        if key not in found:
            missing.setdefault(key, place)
    return [*missing.values()]


def live_of(scorer: S) -> S | Scorer | None:
    """Return the teacher behind a tape, or the scorer itself; None where no teacher is open."""
    return scorer.live if isinstance(scorer, TapedScorer) else scorer
