"""Keep answers in a folder, by content. What is there is whole, and never changed.

The answers of one call are one file: the CRC-32 of an index and the index in JSON, in one line, and
then the answers' bytes. It is written under another name and renamed, so that no reader sees half
of it. An index has key, kind, K, whether there are hidden states, rows, bytes and CRC-32 of each
answer. A file that is named ``.unproven`` waits until its teacher was found to be the right one
(``mark``), and is read by its writer alone. Folders are joined by copying their files together.

This file imports no torch, so that ``prime-rl tape check`` takes no time.
"""

import json
import os
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from prime_composer.backends.errors import naming_file
from prime_composer.backends.scratch import lock

FORMAT = 2  # Raise it when files or the answers of a key are others.

HEADER_FILE = "tape.json"
LOCK_FILE = "lock"
FILES = "answers-*.tape"
UNPROVEN = "answers-*.unproven"
UNFINISHED = "answers-*.tmp"


class TapeError(ValueError):
    """A tape cannot be used. The message names its folder and the remedy."""


class Note(NamedTuple):
    """What an index says of an answer."""

    key: str  # a digest of what was asked, without K and hidden states
    kind: str  # in words, for ``prime-rl tape check``
    k: int  # ids per row. An answer with more ids has the one with fewer in it.
    hidden: bool  # whether it has hidden states
    rows: int  # tokens that it is about
    size: int = 0  # its bytes
    crc: int = 0  # CRC-32 of these


class Record(NamedTuple):
    """An answer to be kept: its note, without size and checksum, and its bytes."""

    note: Note
    content: bytes


class StoredAnswer(NamedTuple):
    """Where an answer is: its note, its file, and its first byte there."""

    note: Note
    path: Path
    offset: int

    def read(self) -> bytes | None:
        """Return its bytes; None where they are not those that were written."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                content = file.read(self.note.size)
        except OSError:
            return None
        right = len(content) == self.note.size and zlib.crc32(content) == self.note.crc
        return content if right else None


def answers_of(path: Path) -> list[StoredAnswer] | None:
    """Return the answers of a file; None where its index is not as it was written."""
    with path.open("rb") as file:
        line = file.readline()
    checksum, _, index = line.partition(b" ")
    if checksum != _checksum(index):
        return None
    answers, offset = [], len(line)
    for fields in json.loads(index):
        answers.append(StoredAnswer(Note(*fields), path, offset))
        offset += answers[-1].note.size
    return answers


def _parts_of(records: Iterable[Record]) -> list[bytes]:
    """Return a file with these answers, in parts."""
    notes, contents = [], []
    for note, content in records:
        notes.append(note._replace(size=len(content), crc=zlib.crc32(content)))
        contents.append(content)
    index = json.dumps(notes).encode() + b"\n"
    return [_checksum(index), b" ", index, *contents]


def _checksum(index: bytes) -> bytes:
    return b"%08x" % zlib.crc32(index)


class Store:
    """The answers of a folder, which other processes may add to at the same time.

    All files together have at most ``limit`` bytes; None: any number. 0: nothing is written.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], limit: int | None = None) -> None:
        self.folder = folder
        self._tell, self._limit = tell, limit
        self._answers: dict[str, list[StoredAnswer]] = {}
        self._sizes: dict[Path, int] = {}
        self._unproven: dict[Path, set[str]] = {}  # the keys of its answers, by file
        self._is_written = limit != 0
        if self._is_written:
            folder.mkdir(parents=True, exist_ok=True)
        elif not (folder / HEADER_FILE).is_file():
            raise TapeError(
                f"{folder} is no tape: it has no {HEADER_FILE}; make one with `prime-rl tape "
                "make`, or with a run that has a teacher"
            )
        self.header()
        with self._locked() as nobody_else_writes:
            for path in folder.glob(UNFINISHED) if nobody_else_writes else ():
                path.unlink(missing_ok=True)  # its writer was killed
            self.refresh()

    @property
    def size(self) -> int:
        """Bytes of all files, also of those that another writer has not marked."""
        size = sum(self._sizes.values())
        for path in {*self.folder.glob(UNPROVEN)} - self._sizes.keys():
            with suppress(FileNotFoundError):  # its writer has just marked it
                size += path.stat().st_size
        return size

    @property
    def answers(self) -> Iterator[StoredAnswer]:
        for of_key in self._answers.values():
            yield from of_key

    @property
    def is_unmarked(self) -> bool:
        """Whether some of what was kept waits for ``mark``."""
        return bool(self._unproven)

    def header(self) -> dict[str, Any] | None:
        """Return what was said of the tape when it was begun; None where it was not."""
        path = self.folder / HEADER_FILE
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise TapeError(f"{path} is no header of a tape; restore it, or name another folder")
        if header.get("format") != FORMAT:
            raise TapeError(
                f"the tape {self.folder} was made by another version of this package (format "
                f"{header.get('format')}, and this one reads {FORMAT}): delete it, or name another "
                "folder, and make it again"
            )
        return header

    def begin(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tape's header, which is this one unless it has one already."""
        with self._locked():
            found = self.header()
            if found is not None:
                return found
            header = {"format": FORMAT, **header}
            parts = [json.dumps(header, indent=2).encode(), b"\n"]
            with suppress(FileNotFoundError):  # without locks another process was first
                _write_whole(self.folder / HEADER_FILE, parts)
        return dict(header)

    def get(self, key: str, k: int = 0, hidden: bool = False, exact: bool = False) -> bytes | None:
        """Return the smallest whole answer that has what is asked for; None where there is none."""
        for one in self._fitting(key, k, hidden, exact):
            content = one.read()
            if content is not None:
                return content
            self._answers[key].remove(one)
            self._tell(
                f"warning: an answer in {one.path}, at byte {one.offset}, is damaged, and is "
                "left out (prime-rl tape check)"
            )
        return None

    def has(self, note: Note, exact: bool = False) -> bool:
        """Return whether there is an answer with all that this one has."""
        return bool(self._fitting(note.key, note.k, note.hidden, exact))

    def _fitting(self, key: str, k: int, hidden: bool, exact: bool) -> list[StoredAnswer]:
        found = [
            one
            for one in self._answers.get(key, ())
            if (one.note.k == k if exact else one.note.k >= k) and (one.note.hidden or not hidden)
        ]
        return sorted(found, key=lambda one: one.note.size)

    def refresh(self) -> None:
        """Look for answers that other processes have added."""
        for path in sorted({*self.folder.glob(FILES)} - self._sizes.keys()):
            self._register(path)

    def _register(self, path: Path) -> None:
        answers = answers_of(path)
        self._sizes[path] = path.stat().st_size
        if answers is None:
            self._tell(
                f"warning: {path} is damaged, and its answers are left out (prime-rl tape check)"
            )
        for one in answers or ():
            self._answers.setdefault(one.note.key, []).append(one)

    def mark(self) -> None:
        """Say that the teacher is the right one still: what was kept may be read by others."""
        for path, keys in [*self._unproven.items()]:
            with suppress(OSError):  # it stays due
                proven = path.rename(path.with_suffix(".tape"))
                self._unproven.pop(path)
                self._sizes[proven] = self._sizes.pop(path)
                for key in keys:
                    self._answers[key] = [
                        one._replace(path=proven) if one.path == path else one
                        for one in self._answers[key]
                    ]

    def add(self, records: Sequence[Record], marked: bool = True) -> None:
        """Keep the answers of one call, all or none, without those that are there already.

        Unless they are ``marked``, others read them after the next mark.

        Where the disk is full or the limit is reached, a warning says so once, and nothing more is
        written. No answer that is there is harmed.
        """
        if not self._is_written:
            return
        with self._locked():
            self.refresh()
            new = {
                record.note: record for record in records if not self.has(record.note, exact=True)
            }
            if not new:
                return
            parts = _parts_of(new.values())
            if self._limit is not None and self.size + sum(map(len, parts)) > self._limit:
                self._stop(f"it would be larger than {self._limit / 1e9:g} GB (tape_gb)")
                return
            name = (FILES if marked else UNPROVEN).replace("*", uuid.uuid4().hex[:12])
            path = self.folder / name
            try:
                _write_whole(path, parts)
            except OSError as error:
                self._stop(error.strerror or str(error))
                return
            if not marked:
                self._unproven[path] = {note.key for note in new}
            self._register(path)

    def _stop(self, reason: str) -> None:
        self._is_written = False
        self._tell(
            f"warning: nothing more is kept on the tape {self.folder}: {reason}; the teacher is "
            "asked for what is not on it"
        )

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other writers out, where the file system has locks and the folder can be written.

        Yield whether they are. Without a lock two processes may keep the same answer twice, and
        nothing else.
        """
        try:
            descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            yield lock(descriptor, wait=True)
        finally:
            os.close(descriptor)


def _write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that is whole or absent."""
    unfinished = path.with_suffix(".tmp")
    try:
        with naming_file(unfinished), unfinished.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


class Inspection(NamedTuple):
    """What ``prime-rl tape check`` finds."""

    header: dict[str, Any]
    kinds: dict[tuple[str, int, bool], Counter[str]]  # kind, K, hidden -> answers, rows, bytes
    unmarked: dict[Path, int]  # answers of writers that did not ask their teacher again, by file
    damage: list[str]  # a sentence for each damaged answer or file


def inspect(folder: Path) -> Inspection:
    """Read every answer of a tape, and compare it with its checksum."""
    header = Store(folder, lambda text: None, limit=0).header()
    assert header is not None
    unmarked = {path: len(answers_of(path) or ()) for path in sorted(folder.glob(UNPROVEN))}
    found = Inspection(header, {}, unmarked, [])
    for path in sorted(folder.glob(FILES)):
        answers = answers_of(path)
        if answers is None:
            found.damage.append(f"{path}: its index is not as written")
        for one in answers or ():
            note = one.note
            totals = found.kinds.setdefault((note.kind, note.k, note.hidden), Counter())
            totals.update(answers=1, rows=note.rows, bytes=note.size)
            if one.read() is None:
                found.damage.append(f"{path}: the answer at byte {one.offset} is not as written")
    return found
