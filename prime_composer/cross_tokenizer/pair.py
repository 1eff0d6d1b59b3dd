"""What of a pair of tokenizers is the same for every text: the tables of teacher and student."""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from prime_composer.cross_tokenizer.token_bytes import CACHED_TEXTS, TokenBytes

SEEN = 20  # Occurrences in texts from which on a token's openness is counted and not derived

OPEN_SHARE = 0.02  # Of occurrences at which an open token's first token is another

SPACE_BYTE = 32

Key = TypeVar("Key", bound=Hashable)


class Memo(Generic[Key]):
    """Whole numbers of keys, computed for many keys at once and kept."""

    def __init__(self, compute: Callable[[list[Key]], Sequence[int]], most: int):
        self._compute, self._most = compute, most
        self._known: dict[Key, int] = {}

    def __call__(self, keys: Sequence[Key]) -> NDArray[np.int64]:
        known = self._known
        found = list(map(known.get, keys))
        if None in found:
            if len(known) > self._most:
                # A new one: another thread may read the old one.
                known = self._known = {}
            missing = [key for key in dict.fromkeys(keys) if key not in known]
            known.update(zip(missing, self._compute(missing), strict=True))
            found = [known[key] for key in keys]
        return np.array(found, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Tables:
    """Arrays of a pair of tokenizers.

    An *entry* is a teacher's token w from its byte d on: what w still writes where the student has
    written its first d bytes. Its index is ``start[w] + d``. A pair whose student has a lead that
    the teacher does not have (``Pair``) has one entry more for each token: ``start[w] - 1``, the
    lead and then all of w.

    Attributes:
        order: the teacher's ordinary ids, sorted by their bytes.
        start: index of each teacher token's entry 0, and of the one after the last, [V_T + 1].
        first: first token of the student's encoding of each entry; -1 where the entry begins inside
            a character.
        open: whether what follows may change that first token.
        asks: whether that is so, or a longer token of the student begins with the entry.
        path_start: index in ``path_ids`` of each student token's path, and of the end, [V_S + 1].
        path_ids: the teacher's encoding of each student token's bytes; nothing where these are not
            whole characters.
    """

    order: NDArray[np.int64]
    start: NDArray[np.int64]
    first: NDArray[np.int64]
    open: NDArray[np.bool_]
    asks: NDArray[np.bool_]
    path_start: NDArray[np.int64]
    path_ids: NDArray[np.int64]


class TokenizerPair:
    """A teacher's and a student's tokenizer.

    A *lead* is what a model writes in front of each answer and is no part of it: a space, with some
    templates of sentencepiece tokenizers. ``leads`` are the teacher's and the student's. Each is
    empty, a space, or that of the other. On ``texts``, as the teacher writes them, is counted which
    of its tokens are open. The ends are the ids that end a turn.
    """

    def __init__(
        self,
        teacher: TokenBytes,
        student: TokenBytes,
        teacher_ends: Iterable[int],
        student_end: int,
        texts: Iterable[str],
        leads: tuple[bytes, bytes] = (b"", b""),
    ):
        if leads[0] != leads[1] and not {*leads} <= {b"", b" "}:
            raise ValueError(f"leads {leads} that differ by more than a space")
        self.teacher, self.student = teacher, student
        self.teacher_lead, self.student_lead = leads
        self.before = b"" if leads[0] else leads[1]
        """What the student writes in front of all that the teacher writes."""
        self.teacher_ends, self.student_end = sorted(teacher_ends), student_end
        self.prefixes = frozenset(
            content[:end] for content in student.of_id if content for end in range(1, len(content))
        )
        self.tables = self._build(texts)
        self.contents = [teacher.of_id[i] or b"" for i in self.tables.order.tolist()]
        self.longest = max(map(len, self.contents), default=0)
        self.id_of = self._ids_of_contents()
        self.path_first = np.full(len(student.of_id), -1)
        long = np.flatnonzero(np.diff(self.tables.path_start) > 1)
        self.path_first[long] = self.tables.path_ids[self.tables.path_start[long]]
        self.within = lru_cache(CACHED_TEXTS)(self._within)
        self._canonical = Memo(self._which_are_canonical, CACHED_TEXTS)
        self.continuations = Memo(self._continuations, CACHED_TEXTS)
        """Of some bytes and a teacher token after them: twice the first student token plus 2, 0
        where that is unknown, and plus 1 where what follows may change it."""

    @property
    def digest(self) -> str:
        """Name of what decides its numbers: tokenizers, ends, leads, and what is open."""
        named = json.dumps(
            [
                *(self.teacher.digest, self.student.digest, self.teacher_ends, self.student_end),
                *(self.teacher_lead.hex(), self.student_lead.hex()),
            ]
        )
        return hashlib.sha256(named.encode() + self.tables.open.tobytes()).hexdigest()

    def path(self, student_id: int) -> list[int]:
        """Return the teacher's encoding of a student token's bytes."""
        begin, end = self.tables.path_start[student_id : student_id + 2]
        ids: list[int] = self.tables.path_ids[begin:end].tolist()
        return ids

    def written(self, teacher_id: int, skip: int) -> bytes:
        content = self.teacher.of_id[teacher_id] or b""
        return self.before + content if skip < 0 else content[skip:]

    def longer_than(self, prefix: bytes) -> slice:
        """Return where in ``order`` the tokens are that begin with some bytes and are longer."""
        after = bisect_right(self.contents, prefix)
        kept = prefix.rstrip(b"\xff")
        if not kept:
            return slice(after, len(self.contents))
        return slice(after, bisect_left(self.contents, kept[:-1] + bytes([kept[-1] + 1])))

    def is_open(self, content: bytes, first: int) -> bool:
        """Return whether what follows may change the first student token of some bytes."""
        return content in self.prefixes or changes_with_a_digit(self.student, content, first)

    def begins_with(self, before: int | None, token: int) -> bool:
        """Return whether the student itself writes a token after another, or first (None)."""
        if before is not None:
            return self.canonical(before, token)
        return (self.student.of_id[token] or b"").startswith(self.student_lead)

    def canonical(self, left: int, right: int) -> bool:
        """Return whether the student itself writes two tokens next to each other."""
        return bool(self._canonical([left * len(self.student.of_id) + right])[0])

    def are_canonical(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return ``canonical`` of each pair of tokens, [e]."""
        before_space, with_space = self._alone
        known = before_space[left] & with_space[right]
        asked = np.flatnonzero(~known)
        keys = left[asked] * len(self.student.of_id) + right[asked]
        known[asked] = self._canonical(keys.tolist()) > 0
        return known

    @cached_property
    def _alone(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which student tokens a space follows as if nothing did, and which are such a space's.

        What has no merge across it is encoded on either side by itself. White space before it is no
        such token: expressions that split words look ahead of it.
        """
        contents = [content or b"" for content in self.student.of_id]
        joined = {left for c in contents for left, right in pairwise(c) if right == SPACE_BYTE}
        encoded = encoded_bytes(self.student, contents)
        by_itself = np.array([ids == [i] for i, ids in enumerate(encoded)])
        free = {*range(33, 127)} - joined
        left = [bool(content) and content[-1] in free for content in contents]
        right = [content[:1] == b" " for content in contents]
        return by_itself & np.array(left), by_itself & np.array(right)

    def _which_are_canonical(self, keys: list[int]) -> list[bool]:
        of_id = self.student.of_id
        pairs = [divmod(key, len(of_id)) for key in keys]
        written = [(of_id[left] or b"") + (of_id[right] or b"") for left, right in pairs]
        encoded = encoded_bytes(self.student, written)
        return [ids is None or ids == [*p] for ids, p in zip(encoded, pairs, strict=True)]

    def _continuations(self, keys: list[tuple[bytes, int]]) -> list[int]:
        longer = [content + (self.teacher.of_id[token] or b"") for content, token in keys]
        codes = []
        for whole, ids, (content, _) in zip(
            longer, encoded_bytes(self.student, longer), keys, strict=True
        ):
            if not ids or whole == content:  # a part of a character, or a special token
                codes.append(0)
            else:
                codes.append(2 * (ids[0] + 1) + self.is_open(whole, ids[0]))
        return codes

    def _within(self, rest: bytes, token: int) -> tuple[int, ...]:
        """Return the teacher's tokens that begin with some bytes and end inside a student token."""
        content = rest + (self.student.of_id[token] or b"")
        shorter = (self.id_of.get(content[:end]) for end in range(len(rest) + 1, len(content)))
        return tuple(i for i in shorter if i is not None)

    def _ids_of_contents(self) -> dict[bytes, int]:
        """Return the id of each content. Of several, it is the one that the teacher writes."""
        ids: dict[bytes, int] = {}
        for content, index in zip(self.contents, self.tables.order.tolist(), strict=True):
            if content not in ids or self.teacher.encode_bytes(content) == (index,):
                ids[content] = index
        return ids

    def _build(self, texts: Iterable[str]) -> Tables:
        teacher, student = self.teacher.of_id, self.student.of_id
        full = [self.before + content if content else b"" for content in teacher]
        start = np.cumsum([0, *map(len, full)]) + len(self.before)
        order = sorted((i for i, c in enumerate(teacher) if c), key=lambda i: teacher[i] or b"")
        paths = encoded_bytes(self.teacher, [content or b"" for content in student])
        begun_by_longer = {path[0] for path in paths if path is not None and len(path) > 1}

        index_of: dict[bytes, int] = {}
        of_entry = np.array(
            [
                index_of.setdefault(content[d:], len(index_of))
                for content in full
                for d in range(len(content))
            ]
        )
        remainders = list(index_of)
        first, is_cut = first_tokens(self.student, remainders)
        digits = np.array(
            [
                token >= 0 and changes_with_a_digit(self.student, content, token)
                for content, token in zip(remainders, first.tolist(), strict=True)
            ]
        )
        begins_longer = np.array([content in self.prefixes for content in remainders])
        first_entries = start[order]  # of whole tokens
        is_open = (is_cut | digits | begins_longer)[of_entry]
        is_open[first_entries] = (is_cut | digits)[of_entry[first_entries]] | np.isin(
            order, [*begun_by_longer]
        )
        counted = self._counted(texts, start, first[of_entry])
        for token, share in counted.items():
            is_open[start[token]] = share > OPEN_SHARE
        return Tables(
            order=np.array(order),
            start=start,
            first=first[of_entry],
            open=is_open,
            asks=is_open | begins_longer[of_entry],
            path_start=np.cumsum([0, *(len(path or ()) for path in paths)]),
            path_ids=np.array([i for path in paths for i in path or ()], dtype=np.int64),
        )

    def _counted(
        self, texts: Iterable[str], start: NDArray[np.int64], first: NDArray[np.int64]
    ) -> dict[int, float]:
        """Return how often a frequent token's first student token is another one in texts."""
        seen, other = Counter[int](), Counter[int]()
        for text in texts:
            student_ids = self.student.encode_all([text])[0]
            teacher_ids = self.teacher.encode_all([text])[0]
            written = dict(zip(self.student.starts(student_ids), student_ids, strict=False))
            for offset, token in zip(self.teacher.starts(teacher_ids), teacher_ids, strict=False):
                if offset in written:
                    seen[token] += 1
                    other[token] += written[offset] != first[start[token]]
        return {token: other[token] / n for token, n in seen.items() if n >= SEEN}


def encoded_bytes(tokenizer: TokenBytes, contents: Sequence[bytes]) -> list[list[int] | None]:
    """Return the ids of each; None where the bytes are not whole characters."""
    texts = [whole_characters(content) for content in contents]
    whole = [text is not None and not cut for text, cut in texts]
    ids = iter(
        tokenizer.encode_all([text or "" for (text, _), w in zip(texts, whole, strict=True) if w])
    )
    return [next(ids) if w else None for w in whole]


def first_tokens(
    tokenizer: TokenBytes, contents: Sequence[bytes]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first token of each, -1 where that is unknown, and whether bytes are left over."""
    texts = [whole_characters(content) for content in contents]
    encoded = tokenizer.encode_all([text or "" for text, _ in texts])
    first = np.array([ids[0] if ids else -1 for ids in encoded])
    return first, np.array([cut > 0 for _, cut in texts])


def whole_characters(content: bytes) -> tuple[str | None, int]:
    """Return the whole characters that bytes begin with, or None, and how many are after them."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError as error:
        rest = len(content) - error.start
        return (content[: error.start].decode(), rest) if error.start else (None, 0)


def changes_with_a_digit(tokenizer: TokenBytes, content: bytes, first: int) -> bool:
    """Return whether a digit more changes the first token of bytes that end in a digit."""
    if not content[-1:].isdigit():
        return False
    return any(
        encoded is not None and encoded[0] != first
        for encoded in (tokenizer.encode_bytes(content + b"%d" % digit) for digit in range(10))
    )
