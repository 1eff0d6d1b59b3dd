"""The trainer's questions to the teachers: they work while the student's forward does.

After a batch has come, the sequences of its first micro-batches are asked for at once. The head of
a micro-batch waits for its own answers. Meanwhile later ones are asked, so that a teacher never
waits for the student. Each rank asks for the micro-batches that it trains. Under context
parallelism all ranks of a group ask the same.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.model_files import cache_root
from prime_composer.backends.protocols import Rollout
from prime_composer.contract import HiddenStates, Logits, Scores, TeacherHead, TwoHeads
from prime_composer.full_vocabulary import teacher_logprobs
from prime_composer.recipe.backends import Served
from prime_composer.scoring.shared_vocabulary import MOST_PADDING, lacking, within_head
from prime_composer.step.states import check_states
from prime_composer.teachers.mixture import mix
from prime_composer.teachers.own_prompt import OwnPromptScorer
from prime_composer.teachers.server import ServerScorer
from prime_composer.teachers.watch import KNOWN_TOKENS, SHARE_APART, KnownRequest, known_rollout
from prime_composer.upstream import meeting
from prime_composer.upstream.keys import SWITCH
from prime_composer.upstream.left_prompts import LeftPromptScorer
from prime_composer.upstream.log import log
from prime_composer.upstream.settings import Teacher
from prime_composer.upstream.teachers import Entries, read_entries

# Several of a vLLM's prefill steps, so that it does not run idle. At 8 kB per hidden state they are
# 0.5 GB of this machine's memory. One micro-batch is asked for at least.
AHEAD_TOKENS = 65_536  # Tokens of later micro-batches, asked for while one is awaited

CHECKED_EVERY = 16  # Rows per row whose log-prob is computed again, from hidden state and head


@dataclass(frozen=True, eq=False)
class Wanted:
    """A sequence of a micro-batch that a teacher has to score."""

    place: slice  # its place in the packed micro-batch
    rollout: Rollout  # its tokens, up to the last one that trains
    teachers: Sequence[Teacher]  # who scores it


def wanted_of(
    tensors: Mapping[str, Any], trained: Bool[Tensor, " seq"], entries: Entries
) -> list[Wanted]:
    """Return the sequences of a packed micro-batch that train a token of ours.

    Padding is the end of the last one, and does not train.
    ``sequence_lengths`` has the boundaries, and ``env_names`` the environment of each token.
    """
    tokens, start = tensors["input_ids"][0], 0
    wanted: list[Wanted] = []
    for length in tensors["sequence_lengths"]:
        mask = trained[start : start + length]
        positions = mask.nonzero()
        if len(positions):
            end = int(positions[-1]) + 1
            own = tokens[start : start + end]
            rollout = Rollout(own, mask[:end], torch.full((end,), torch.nan), "length", len(wanted))
            environment = tensors["env_names"][start]
            try:
                teachers = read_entries(entries, environment)
            except ValueError:
                raise ValueError(
                    f"{SWITCH}: `teachers` names none for the environment {environment!r}. Each "
                    "environment whose tokens the loss compares needs a list of {url, model, "
                    "weight}."
                ) from None
            wanted.append(Wanted(slice(start, start + length), rollout, teachers))
        start += length
    return wanted


class Frozen:
    """A served teacher whose weights never change, and a request whose scores are known."""

    def __init__(
        self, scorer: ServerScorer, k: int, hidden: bool, reader: OwnPromptScorer | None = None
    ):
        self.scorer = scorer
        self._reader = reader or scorer  # asks with the prompts that the teacher reads
        self._k = k
        self._hidden = hidden
        self._known: KnownRequest | None = None
        self._watching = threading.Lock()

    def ask(self, rollouts: Sequence[Rollout]) -> Callable[[], list[Scores]]:
        """Send the requests, and return a function that waits for the scores."""
        return in_background(self._score, rollouts).result

    def _score(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        scores = self._reader.score(rollouts, self._k, hidden=self._hidden)
        with self._watching:  # several micro-batches are asked for at once
            self._watch(rollouts)
        return scores

    def _watch(self, rollouts: Sequence[Rollout]) -> None:
        """Send the known request where the scores that have just come may be another model's."""
        starts = self.scorer.starts
        if self._known is None:
            self._begin(rollouts, starts)
        elif self._known.is_due(starts, len(rollouts)):
            (again,) = self.scorer.score([self._known.rollout], self._k)
            if change := self._known.change(again, starts):
                raise InvalidAnswer(
                    f"{self.scorer.origin} {change}: start it as it was. This step is not trained."
                )

    def _begin(self, rollouts: Sequence[Rollout], starts: int | None) -> None:
        """Keep the beginning of the first long sequence, and its scores, which are compared with
        what the server samples behind it."""
        long = (r.token_ids for r in rollouts if len(r.token_ids) >= KNOWN_TOKENS.start)
        tokens = next(long, None)
        if tokens is not None:
            begun = tokens[: KNOWN_TOKENS.start].tolist()
            own = self.scorer.own_logprobs(within_head(begun, self.scorer.limits.vocab_size))
            meeting.compare_with_itself(self.scorer.origin, own)
            rollout = known_rollout(tokens[: KNOWN_TOKENS[-1]], 1)
            (scores,) = self.scorer.score([rollout], self._k)
            self._known = KnownRequest(rollout, scores, share=SHARE_APART, sign=starts)


class TeacherConnections:
    """Connections to the teachers' servers, and their output heads."""

    def __init__(
        self,
        entries: Entries,
        k: int,
        hidden: bool,
        head_on: str = "device",
        own_prompts: Collection[str] = (),  # names of teachers that read prompts of their own
    ):
        self.entries = entries
        self._own_prompts = own_prompts
        self.k = k
        self.hidden = hidden
        self._head_on = head_on
        self._frozen: dict[tuple[str, str], Frozen] = {}
        self._heads: dict[TeacherHead, TeacherHead] = {}

    def frozen(self, teacher: Teacher) -> Frozen:
        """Return the connection to a teacher; the first time, open it and load its head."""
        key = teacher.url, teacher.model
        if key not in self._frozen:
            scorer = ServerScorer(
                Served(url=teacher.url, api_key_var=teacher.api_key_var),
                teacher.model,
                starting=True,
                status=log,
                heads=cache_root() / "heads",
            )
            meeting.compare_with_student(scorer.origin, scorer, lambda: scorer.limits.max_model_len)
            if self.hidden:
                scorer.score([], 0, hidden=True)  # finds the plugin, and loads the head
            own = teacher.model in self._own_prompts
            reader = LeftPromptScorer(scorer, teacher.model) if own else None
            self._frozen[key] = Frozen(scorer, self.k, self.hidden, reader)
        return self._frozen[key]

    def ask(self, wanted: Sequence[Wanted]) -> Callable[[], list[Scores]]:
        """Send a micro-batch's questions; return what waits for the scores, placed as in it."""
        asked: dict[Frozen, list[Rollout]] = {}
        for sequence in wanted:
            for teacher in sequence.teachers:
                asked.setdefault(self.frozen(teacher), []).append(sequence.rollout)
        pending = {frozen: frozen.ask(rollouts) for frozen, rollouts in asked.items()}

        def answers() -> list[Scores]:
            scores = {frozen: iter(wait()) for frozen, wait in pending.items()}
            return [
                mixture_of(one, [next(scores[self.frozen(teacher)]) for teacher in one.teachers])
                for one in wanted
            ]

        return answers

    def logits(self, share: HiddenStates, states: Tensor, student: Logits) -> Logits:
        """Return a teacher's logits over hidden states on the student's device."""
        if share.head not in self._heads:
            head, size = share.head, student.size
            if abs(head.weight.shape[0] - size) > MOST_PADDING:
                raise ValueError(
                    f"{head.origin} has an output head of {head.weight.shape[0]} ids and the "
                    f"student one of {size}. Padding explains at most {MOST_PADDING}: student and "
                    "teacher must share one tokenizer."
                )
            if self._head_on == "device":
                try:
                    head = on_device(head, student.hidden.device)
                except torch.OutOfMemoryError as error:
                    gigabytes = head.weight.numel() * head.weight.itemsize / 1e9
                    raise ValueError(
                        f"{head.origin} has an output head of {tuple(head.weight.shape)} in "
                        f"{head.weight.dtype}, {gigabytes:.1f} GB, for which the student's device "
                        'has no memory: set head_on = "cpu" in the teacher\'s table.'
                    ) from error
            self._heads[share.head] = head
        return self._heads[share.head].over(states)


def on_device(head: TeacherHead, device: torch.device) -> TeacherHead:
    bias = None if head.bias is None else head.bias.to(device)
    return replace(head, weight=head.weight.to(device), bias=bias)


@dataclass(eq=False)
class StepAnswers:
    """The answers for the micro-batches of one step, which are taken in order."""

    teachers: TeacherConnections
    wanted: Sequence[Sequence[Wanted]]
    _pending: dict[int, Callable[[], list[Scores]]] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        self._ask_ahead_of(0)

    def take(self, number: int) -> list[Scores]:
        """Ask for micro-batches behind this one, wait for its answers, and forget them."""
        self._ask_ahead_of(number)
        return self._pending.pop(number)()

    def _ask_ahead_of(self, number: int) -> None:
        while self._next < len(self.wanted) and (
            self._next <= number + 1 or self._tokens_behind(number) < AHEAD_TOKENS
        ):
            self._pending[self._next] = self.teachers.ask(self.wanted[self._next])
            self._next += 1

    def _tokens_behind(self, number: int) -> int:
        return sum(
            len(sequence.rollout.token_ids)
            for later in self.wanted[number + 1 : self._next]
            for sequence in later
        )


def in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Return the future result of a call in a thread, for which the process's end does not wait."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name="prime_composer_teacher").start()
    return future


def mixture_of(wanted: Wanted, parts: Sequence[Scores]) -> Scores:
    """Return the mixture of the teachers' scores of a sequence, at its place."""
    rollout = wanted.rollout
    scores = mix(
        rollout.token_ids[rollout.start :],
        [replace(part, start=rollout.start) for part in parts],
        [teacher.weight for teacher in wanted.teachers],
        sequence=rollout.prompt_index,
        trained=False,
    )
    return replace(scores, start=wanted.place.start + rollout.start)


def two_heads_of(
    scores: Scores, place: slice, token_ids: Tensor, student: Logits, teachers: TeacherConnections
) -> TwoHeads:
    """Return student and teachers of a sequence, row t for token t."""
    first, last = scores.start, scores.start + len(scores)
    rows = slice(first - place.start, last - place.start)
    device, compared, weights = student.hidden.device, [], []
    for share in scores.hidden:
        scored = teachers.logits(share, share.states.to(device), student)
        labels = token_ids[first:last]
        compare_states(scored, share, labels, scores.scored, place.start, rows.start)
        states = scored.hidden.new_zeros(student.row_count, scored.hidden.shape[1])
        states[rows] = scored.hidden
        compared.append(replace(scored, hidden=states))
        weights.append(share.weight)
    mixed = torch.tensor(weights, device=device).expand(student.row_count, -1)
    return TwoHeads(student, tuple(compared), mixed if len(weights) > 1 else None)


def compare_states(
    logits: Logits,
    share: HiddenStates,
    labels: Tensor,
    is_scored: Bool[Tensor, " n"] | None,
    begin: int,
    start: int,
) -> None:
    """Compare the teacher's hidden states and head with its own log-probs of some tokens.

    The products have full float32 precision, whatever the trainer's setting is. The sequence begins
    at token ``begin`` of the micro-batch, and its first scored token is its token ``start``.
    """
    if share.ref_logprobs is None:
        return
    places = torch.arange(len(labels)) if is_scored is None else is_scored.nonzero()[:, 0]
    index = places[::CHECKED_EVERY]
    index = index[~lacking(labels[index], logits.size)]
    rows = logits.at(index.to(logits.hidden.device))
    labels = labels[index].unsqueeze(1).to(logits.hidden.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            computed = teacher_logprobs(TwoHeads(rows, (rows,)), labels)
    finally:
        torch.set_float32_matmul_precision(precision)
    check_states(
        computed[:, 0],
        share.ref_logprobs[index],
        [share.head],
        lambda row: (
            f"{start + int(index[row])} of the sequence that begins at token {begin} of "
            "a micro-batch"
        ),
    )
