"""Where a rollout's tokens stand in the teacher's encoding of its text."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from prime_composer.cross_tokenizer.pair import TokenizerPair, whole_characters


@dataclass(frozen=True)
class Straddling:
    """Teacher tokens that begin before a student token and end after its begin."""

    row: int  # the teacher's row that they are in, which is that of their begin
    tokens: slice  # their places in the tables' ``order``
    skip: int  # bytes of each that the student has written already


@dataclass(frozen=True)
class Position:
    """Where one token of the student begins."""

    token: int  # the student's token
    before: int | None  # the one before it; None at the begin of the text
    row: int  # the last one that begins here or before: row j comes after j tokens
    rest: bytes  # bytes from the row's begin to this byte; empty where aligned
    # the teacher's tokens across this byte, by row, the latest row first
    straddling: tuple[Straddling, ...]
    # by row, tokens within ``rest`` that its encoding does not have
    off_path: tuple[tuple[int, tuple[int, ...]], ...]
    filtered: bool  # only tokens count that the student writes after ``before``
    canonical: bool  # the student itself writes this token after the one before
    skip: int  # bytes of the teacher's next token that are written; -1 before the lead

    @property
    def aligned(self) -> bool:
        """Whether a token of the teacher begins at the same byte."""
        return self.skip == 0


@dataclass(frozen=True)
class ReadingPlan:
    """How a rollout is read with the teacher's rows."""

    teacher_ids: tuple[int, ...]  # of its lead and the rollout's text; row j comes after j of these
    positions: tuple[Position | None, ...]  # per token of the student; None: it has no score


def plan_of(pair: TokenizerPair, token_ids: Sequence[int]) -> ReadingPlan:
    """Return the plan of the student's completion, with the token that ends its turn, if any."""
    of_id = pair.student.of_id
    length = next((at for at, i in enumerate(token_ids) if of_id[i] is None), len(token_ids))
    written = list(token_ids[:length])
    content = pair.student.bytes_of(written)
    lead = pair.student_lead if content.startswith(pair.student_lead) else b""
    text = whole_characters(content[len(lead) :])[0] or ""
    starts, whole = pair.student.starts(written), len(lead) + len(text.encode())
    reader = _Reader(pair, text)
    words = pair.student.word_starts(lead.decode() + text)
    positions: list[Position | None] = []
    restarts = False
    for at, token in enumerate(token_ids[: length + 1]):
        begin = starts[at] + len(pair.teacher_lead) - len(lead if at else pair.student_lead)
        before = written[at - 1] if at else None
        restarts = restarts and starts[at] not in words
        canonical = at == length or pair.begins_with(before, token)
        is_cut = at < length and starts[at + 1] > whole
        positions.append(
            None if is_cut else reader.position(begin, token, before, not restarts, canonical)
        )
        restarts = restarts or not canonical
    positions += [None] * (len(token_ids) - len(positions))
    return ReadingPlan(reader.teacher_ids, tuple(positions))


class _Reader:
    """Finds the teacher's rows at a byte of what it writes for a text, its lead included."""

    def __init__(self, pair: TokenizerPair, text: str):
        self.pair = pair
        # Without any text nothing is known to follow the lead.
        self.content = pair.teacher_lead + text.encode() if text else b""
        self.teacher_ids = tuple(pair.teacher.encode_all([self.content.decode()])[0])
        self.starts = pair.teacher.starts(self.teacher_ids)
        self.words = sorted(pair.teacher.word_starts(self.content.decode()))
        read = pair.teacher.bytes_of(self.teacher_ids)
        both = enumerate(zip(read, self.content, strict=False))
        same = next((i for i, (a, b) in both if a != b), len(self.content))
        self.readable = max(min(same, len(read)), len(pair.teacher_lead))

    def position(
        self, begin: int, token: int, before: int | None, filtered: bool, canonical: bool
    ) -> Position | None:
        """Return where a token begins; None where it has no score."""
        content = self.content or self.pair.teacher_lead
        inside_character = 0 <= begin < len(content) and content[begin] & 0xC0 == 0x80
        if begin > self.readable or inside_character:
            return None
        if begin < 0:
            return Position(token, before, 0, b"", (), (), filtered, canonical, skip=begin)
        last = bisect_right(self.starts, begin) - 1
        word = self.words[bisect_left(self.words, begin) - 1] if begin else 0
        straddling, off_path = [], []
        for row in range(last, -1, -1):
            if row < last and self.starts[row] < word:
                break
            rest = content[self.starts[row] : begin]
            if not rest:
                continue
            tokens = self.pair.longer_than(rest)
            if tokens.stop > tokens.start:
                straddling.append(Straddling(row, tokens, len(rest)))
            ends = range(1, min(len(rest), self.pair.longest) + 1)
            ids = (self.pair.id_of.get(rest[:end]) for end in ends)
            own = self.teacher_ids[row] if row < len(self.teacher_ids) else None
            off_path.append((row, tuple(i for i in ids if i is not None and i != own)))
        rest = content[self.starts[last] : begin]
        return Position(
            token,
            before,
            last,
            rest,
            tuple(straddling),
            tuple(off_path),
            filtered,
            canonical,
            skip=len(rest),
        )
