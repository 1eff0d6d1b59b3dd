"""Q by brute force: a search through the texts of a teacher, token by token.

This is the measure of what one prefill gives (``sums``, ``finish``), and shares no table and no sum
with them. Of the pair it takes the two tokenizers, their ends and their leads.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prime_composer.cross_tokenizer.pair import TokenizerPair, whole_characters

Row = NDArray[np.floating]
"""The teacher's probabilities after some of its tokens, [V_T]."""

RowsOf = Callable[[Sequence[tuple[int, ...]]], Sequence[Row]]
"""Returns the row after each sequence of the teacher's tokens, which its prompt precedes."""

SMALL = 1e-3
"""Share of the least mass that is followed, up to which a token is not looked at by itself."""

APOSTROPHES = ("'", "\u2019")
"""A letter after these may join the word before them."""


@dataclass(frozen=True)
class Exact:
    """Q after some student tokens."""

    q: dict[int, float]  # probability of each student id that has any
    # share of the mass that was not followed to its end. It is in ``q`` as if the text ended there,
    # or in none.
    pruned: float
    sequences: int  # sequences of teacher tokens whose row was read


@dataclass(frozen=True)
class Node:
    """Teacher tokens after an anchor, what they write, and their probability."""

    tokens: tuple[int, ...]
    content: bytes
    mass: float


@dataclass
class Found:
    """Masses that a search has found."""

    of_token: dict[int, float] = field(default_factory=dict)  # those of each student token
    # that of tokens that write nothing, and of what is too improbable to look at
    without: float = 0.0
    pruned: float = 0.0  # what was not followed to its end

    def add(self, token: int, mass: float) -> None:
        """Add mass to a student token."""
        if mass > 0:
            self.of_token[token] = self.of_token.get(token, 0.0) + mass


class Reference:
    """The search through a teacher's texts.

    Args:
        threshold: mass up to which a text is not followed, as a share of that of the teacher's own
            tokenization. With 0 all are.
        words: words before a position of which other tokenizations count too. None: all of them.
    """

    def __init__(
        self, pair: TokenizerPair, rows_of: RowsOf, threshold: float = 1e-4, words: int | None = 2
    ):
        self.pair, self.rows_of = pair, rows_of
        self.threshold, self.words = threshold, words
        named = sorted((content, i) for i, content in enumerate(pair.teacher.of_id) if content)
        self.contents = [content for content, _ in named]
        self.ids = np.array([i for _, i in named])
        self.begins = np.array([content[0] for content in self.contents])

    def target(self, ids: Sequence[int], at: int) -> Exact | None:
        """Return Q after the first ``at`` tokens of a completion.

        None: no text of the teacher leads there, as after a token that the student itself would not
        write, or into the middle of a character.
        """
        pair, written = self.pair, [*ids[:at]]
        content = pair.student.bytes_of(written)
        if any(pair.student.of_id[i] is None for i in written):
            return None
        if at and not content.startswith(pair.student_lead):
            return None
        text, cut = whole_characters(content[len(pair.student_lead) :])
        if cut:
            return None
        search = _Search(self, written, text or "")
        search.run()
        found = search.found
        whole = sum(found.of_token.values()) + found.without
        if whole <= 0:
            return None
        shares = {token: mass / whole for token, mass in found.of_token.items()}
        return Exact(shares, found.pruned / whole, search.sequences)


class _Search:
    """One search, from an anchor in the text on: a byte at which both tokenizers begin a word."""

    def __init__(self, reference: Reference, written: Sequence[int], text: str):
        self.reference, self.pair = reference, reference.pair
        begin, skipped = self._anchor(written, text)
        self.context = (*written[skipped:],)
        # With the anchor at the text's begin, the leads are a part of what both write.
        self.leads = (b"", b"") if begin else (self.pair.teacher_lead, self.pair.student_lead)
        before = (self.pair.teacher_lead + text.encode()[:begin]).decode() if begin else ""
        self.before = self.pair.teacher.encode(before)
        self.rest = self.leads[0] + text.encode()[begin:]
        self.least, self.found, self.sequences = 0.0, Found(), 0

    def _anchor(self, written: Sequence[int], text: str) -> tuple[int, int]:
        """Return the byte of the text, and the number of the student's tokens before it."""
        pair, words = self.pair, self.reference.words
        if words is None:
            return 0, 0
        leads = pair.teacher_lead.decode(), pair.student_lead.decode()
        token_at = {start: at for at, start in enumerate(pair.student.starts(written)[:-1])}
        by_teacher, by_student = (
            {start - len(lead) for start in tokens.word_starts(lead + text)}
            for lead, tokens in zip(leads, (pair.teacher, pair.student), strict=True)
        )
        places = sorted(
            start
            for start in by_teacher & by_student
            if start > 0 and start + len(leads[1]) in token_at
        )
        if len(places) < words:
            return 0, 0
        return places[-words], token_at[places[-words] + len(leads[1])]

    def run(self) -> None:
        """Follow all texts that begin as the rest does."""
        front = [Node((), b"", 1.0)]
        self.least = self.reference.threshold * self._own_mass()
        while front:
            rows = self.reference.rows_of([(*self.before, *node.tokens) for node in front])
            self.sequences += len(front)
            pairs = zip(front, rows, strict=True)
            front = [child for node, row in pairs for child in self._children(node, row)]

    def _own_mass(self) -> float:
        """Return the mass of the texts that begin as the rest does, by the teacher's own tokens."""
        ids = self.pair.teacher.encode(self.rest.decode())
        if not ids:
            return 1.0
        rows = self.reference.rows_of([(*self.before, *ids[:end]) for end in range(len(ids))])
        steps = [float(row[token]) for token, row in zip(ids[:-1], rows, strict=False)]
        places = self._beginning_with(self.pair.teacher.of_id[ids[-1]] or b"")
        return float(np.prod(steps) * rows[-1][self.reference.ids[places]].sum())

    def _beginning_with(self, content: bytes) -> slice:
        """Return the places in ``contents`` of the tokens that begin with some bytes."""
        contents, kept = self.reference.contents, content.rstrip(b"\xff")
        begin, end = bisect_left(contents, content), len(contents)
        if kept:
            end = bisect_left(contents, kept[:-1] + bytes([kept[-1] + 1]))
        return slice(begin, end)

    def _children(self, node: Node, row: Row) -> list[Node]:
        """Return the continuations of a node that have to be followed; the others are found."""
        rest = self.rest[len(node.content) :]
        masses = node.mass * row[self.reference.ids].astype(np.float64)
        if rest:
            return self._toward(node, masses, rest)
        end = node.mass * float(row[self.pair.teacher_ends].sum())
        silent = max(0.0, node.mass - float(masses.sum()) - end)
        self._end(node.content, end, ended=True)
        if node.content == self.rest:
            self.found.without += silent
            return self._one_by_one(node, masses, np.flatnonzero(masses))
        self._end(node.content, silent, ended=True)
        children = []
        by_begin = np.bincount(self.reference.begins, weights=masses, minlength=256)
        is_small = by_begin <= SMALL * self.least
        left = float(by_begin[is_small].sum())
        self._end(node.content, left)
        self.found.pruned += left
        for first in np.flatnonzero(~is_small).tolist():
            settled = self._settled(node.content + bytes([first]))
            if settled is not None:
                self._settle(settled, float(by_begin[first]))
            else:
                within = np.searchsorted(self.reference.begins, [first, first + 1])
                children += self._one_by_one(node, masses, np.arange(*within))
        return children

    def _toward(self, node: Node, masses: NDArray[np.float64], rest: bytes) -> list[Node]:
        """Follow the tokens that write a part of the rest, all of it, or more."""
        contents = self.reference.contents
        parts = [
            at
            for length in range(1, len(rest))
            for at in range(*(cut(contents, rest[:length]) for cut in (bisect_left, bisect_right)))
        ]
        longer = self._beginning_with(rest)
        places = np.array([*parts, *range(longer.start, longer.stop)], dtype=int)
        return self._one_by_one(node, masses, places)

    def _one_by_one(
        self, node: Node, masses: NDArray[np.float64], places: NDArray[np.int64]
    ) -> list[Node]:
        """Follow some tokens, given by their places in ``contents``."""
        is_large = masses[places] > SMALL * self.least
        left = float(masses[places[~is_large]].sum())
        self._end(node.content, left)
        self.found.pruned += left
        children = []
        for at in places[is_large].tolist():
            tokens = (*node.tokens, int(self.reference.ids[at]))
            content = node.content + self.reference.contents[at]
            child = Node(tokens, content, float(masses[at]))
            if self._is_followed(child):
                children.append(child)
        return children

    def _is_followed(self, node: Node) -> bool:
        """Return whether a node has to be followed; what is not, is found."""
        is_longer = len(node.content) > len(self.rest)
        if is_longer and (settled := self._settled(node.content)) is not None:
            self._settle(settled, node.mass)
            return False
        if node.mass > self.least:
            return True
        if is_longer:
            self._end(node.content, node.mass)
        self.found.pruned += node.mass
        return False

    def _student_ids(self, content: bytes) -> tuple[int, ...]:
        """Return the student's tokens of the whole characters that the teacher wrote."""
        text = whole_characters(content[len(self.leads[0]) :])[0]
        return self.pair.student.encode(self.leads[1].decode() + text) if text else ()

    def _end(self, content: bytes, mass: float, *, ended: bool = False) -> None:
        """Add mass as if no text followed: to the student's next token, if there is one.

        Unless the turn has ``ended``, the text may have none after the context, or only a part of a
        character.
        """
        ids, at = self._student_ids(content), len(self.context)
        ids = (*ids, self.pair.student_end) if ended else ids
        if ids[:at] == self.context:
            if len(ids) > at:
                self.found.add(ids[at], mass)
            else:
                self.found.without += mass

    def _settle(self, settled: tuple[int | None], mass: float) -> None:
        """Add mass to what ``_settled`` returned."""
        if settled[0] is not None:
            self.found.add(settled[0], mass)

    def _settled(self, content: bytes) -> tuple[int | None] | None:
        """Return the student's next token if nothing that follows changes it, else None.

        It is in a one-tuple, whose None is another context. What follows may change the last word,
        and white space before it.
        """
        text, cut = whole_characters(content)
        if not text or cut or text.endswith(APOSTROPHES):
            return None
        student, encoded = self.pair.student, self._student_ids(content)
        written = student.bytes_of(encoded).decode()
        last = max(student.word_starts(written))
        if not written.encode()[last:].strip():
            last = len(written.rstrip().encode())
        ends = student.starts(encoded)[1:]
        for place, (token, end) in enumerate(zip(encoded, ends, strict=True)):
            if end > last:
                return None
            if place == len(self.context):
                return (token,)
            if token != self.context[place]:
                return (None,)
        return None
