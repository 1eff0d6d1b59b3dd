"""Keep answers in a folder, by content. What is written is whole or absent, and never changed.

Each process writes a file of its own, so that no two write to the same one, on any file system. A
file is a sequence of frames. A frame has the answers of one call, all or none of them:

    magic, size of the index, size of the rest, CRC-32 | index | answers

The index is JSON: key, kind, K, whether there are hidden states, rows, bytes and CRC-32 of each
answer. A frame without answers is a mark: the teacher was still the right one when it was written.
Other processes read what is before a mark. What a killed one left behind its last mark is left out,
and so is an unfinished frame. Folders are joined by copying their files together.

This file imports no torch, so that ``prime-rl tape check`` takes no time.
"""

import json
import os
import struct
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from prime_composer.backends.errors import naming
from prime_composer.backends.scratch import lock

HEADER_FILE = "tape.json"
LOCK_FILE = "lock"
FILES = "answers-*.tape"

MAGIC = b"pctape1\n"
HEAD = struct.Struct("<8sIQI")
"""Magic, bytes of the index, bytes of the answers, CRC-32 of all before and of the index."""


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

    @property
    def full_note(self) -> Note:
        """The note with size and checksum."""
        return self.note._replace(size=len(self.content), crc=zlib.crc32(self.content))


class Place(NamedTuple):
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


class Rest(NamedTuple):
    """What follows the last whole frame of a file."""

    size: int  # its bytes
    is_torn: bool  # whether a writer's end explains it; otherwise the file is damaged there


class Part(NamedTuple):
    """A part of a file."""

    places: list[Place]  # the answers before its last mark
    end: int  # where that mark ends
    unmarked: list[Place]  # the answers behind it
    rest: Rest  # what follows these


def read_frames(path: Path, start: int = 0) -> Part:
    """Return what a file has from a byte on, at which a frame begins."""
    marked: list[Place] = []
    unmarked: list[Place] = []
    end = start
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            frame = _read_index(file, start, size)
            if isinstance(frame, Rest):
                return Part(marked, end, unmarked, frame)
            own = _places(frame.notes, path, start + HEAD.size + frame.index_size)
            start += HEAD.size + frame.index_size + sum(note.size for note in frame.notes)
            unmarked += own
            if not own:
                marked, unmarked, end = marked + unmarked, [], start


def _places(notes: Iterable[Note], path: Path, offset: int) -> list[Place]:
    """Return the places of a frame's answers, the first of which is at an offset."""
    places = []
    for note in notes:
        places.append(Place(note, path, offset))
        offset += note.size
    return places


class _Frame(NamedTuple):
    index_size: int
    notes: list[Note]


def _read_index(file: BinaryIO, start: int, size: int) -> _Frame | Rest:
    """Return the frame that begins at a byte of a file, or what is there instead."""
    left = size - start
    file.seek(start)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return Rest(left, is_torn=head == MAGIC[: len(head)] or head.startswith(MAGIC))
    magic, index_size, body_size, crc = HEAD.unpack(head)
    if magic != MAGIC:
        return Rest(left, is_torn=False)
    if HEAD.size + index_size + body_size > left:
        return Rest(left, is_torn=True)
    index = file.read(index_size)
    if _crc(index, body_size) != crc:
        return Rest(left, is_torn=False)
    return _Frame(index_size, [Note(*fields) for fields in json.loads(index)])


def _crc(index: bytes, body_size: int) -> int:
    """Return the checksum of a frame's head and index."""
    return zlib.crc32(index, zlib.crc32(HEAD.pack(MAGIC, len(index), body_size, 0)))


class Store:
    """The answers of a folder, which other processes may add to at the same time.

    All files together have at most ``limit`` bytes; None: any number. 0: nothing is written.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], limit: int | None = None) -> None:
        self.folder = folder
        self._tell, self._limit = tell, limit
        self._places: dict[str, list[Place]] = {}
        self._ends: dict[Path, int] = {}
        self._file: Any = None
        self._path: Path | None = None
        self._end = 0
        self.is_unmarked = False  # some of what was kept has no mark behind it
        self._is_written = limit != 0
        if self._is_written:
            folder.mkdir(parents=True, exist_ok=True)
        elif not (folder / HEADER_FILE).is_file():
            raise TapeError(
                f"{folder} is no tape: it has no {HEADER_FILE}; make one with `prime-rl tape "
                "make`, or with a run that has a teacher"
            )
        with self._locked():  # nobody writes now, so that what is not whole never will be
            for path, rest in self._look().items():
                tell(
                    f"warning: the last {rest.size} bytes of {path} are no whole answer, and are "
                    f"left out: {'a writer ended there' if rest.is_torn else 'the file is damaged'}"
                )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.glob(FILES))

    @property
    def places(self) -> Iterator[Place]:
        """Every answer."""
        for of_key in self._places.values():
            yield from of_key

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
        return header

    def begin(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tape's header, which is this one unless it has one already."""
        with self._locked():
            found = self.header()
            if found is not None:
                return found
            path = self.folder / HEADER_FILE
            unfinished = path.with_suffix(".tmp")
            with naming(unfinished), unfinished.open("w", encoding="utf-8") as file:
                file.write(json.dumps(header, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # without locks another process was first
                os.replace(unfinished, path)
        return dict(header)

    def get(self, key: str, k: int = 0, hidden: bool = False, exact: bool = False) -> bytes | None:
        """Return the smallest whole answer that has what is asked for; None where there is none."""
        for place in self._fitting(key, k, hidden, exact):
            content = place.read()
            if content is not None:
                return content
            self._places[key].remove(place)
            self._tell(
                f"warning: an answer in {place.path}, at byte {place.offset}, is damaged, and is "
                "left out (prime-rl tape check)"
            )
        return None

    def has(self, note: Note, exact: bool = False) -> bool:
        """Return whether there is an answer with all that this one has."""
        return bool(self._fitting(note.key, note.k, note.hidden, exact))

    def _fitting(self, key: str, k: int, hidden: bool, exact: bool) -> list[Place]:
        found = [
            place
            for place in self._places.get(key, ())
            if (place.note.k == k if exact else place.note.k >= k)
            and (place.note.hidden or not hidden)
        ]
        return sorted(found, key=lambda place: place.note.size)

    def refresh(self) -> None:
        """Look for answers that other processes have added."""
        self._look()

    def _look(self) -> dict[Path, Rest]:
        """Read what the files have more than before, and return what is not whole."""
        rests = {}
        for path in sorted(self.folder.glob(FILES)):
            start = self._ends.get(path, 0)
            if path == self._path or path.stat().st_size <= start:
                continue
            part = read_frames(path, start)
            self._ends[path] = part.end
            self._register(part.places)
            if part.rest.size:
                rests[path] = part.rest
        return rests

    def _register(self, places: Iterable[Place]) -> None:
        for place in places:
            self._places.setdefault(place.note.key, []).append(place)

    def mark(self) -> None:
        """Say that the teacher is the right one still: what was kept may be read by others."""
        if self.is_unmarked and self._write([*_frame([])], []):
            self.is_unmarked = False

    def add(self, records: Sequence[Record], marked: bool = True) -> None:
        """Keep the answers of one call, all or none, without those that are there already.

        Unless they are ``marked``, others read them after the next mark.

        Where the disk is full or the limit is reached, a warning says so once, and nothing more is
        written. No answer that is there is harmed.
        """
        if not self._is_written:
            return
        with self._locked():
            self._look()
            new = {
                record.note: record for record in records if not self.has(record.note, exact=True)
            }
            if not new:
                return
            parts = [*_frame(new.values())]
            notes = [record.full_note for record in new.values()]
            if self._limit is not None and self.size + sum(map(len, parts)) > self._limit:
                self._stop(f"it would be larger than {self._limit / 1e9:g} GB (tape_gb)")
            elif self._write(parts + [*_frame([])] * marked, notes):
                self.is_unmarked |= not marked

    def _write(self, parts: Sequence[bytes], notes: Sequence[Note]) -> bool:
        """Write the parts of frames, of which the first one's answers have these notes."""
        start = self._end
        try:
            self._append(parts)
        except OSError as error:
            self._undo()
            self._stop(error.strerror or str(error))
            return False
        assert self._path is not None
        self._register(_places(notes, self._path, start + len(parts[0])))
        return True

    def _append(self, parts: Iterable[bytes]) -> None:
        if self._file is None:
            self._path = self.folder / FILES.replace("*", uuid.uuid4().hex[:12])
            self._file = self._path.open("xb", buffering=0)
        end = self._end
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                written = self._file.write(rest)
                rest = rest[written:]
            end += len(part)
        self._end = end

    def _undo(self) -> None:
        """Remove half a frame. Where that fails too, readers leave it out."""
        if self._file is not None:
            self._file.seek(self._end)  # a mark may follow, and begins where the half frame did
            with suppress(OSError):
                self._file.truncate()

    def _stop(self, reason: str) -> None:
        if not self._is_written:
            return
        self._is_written = False
        self._tell(
            f"warning: nothing more is kept on the tape {self.folder}: {reason}; the teacher is "
            "asked for what is not on it"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out, where the file system has locks and the folder can be written.

        Without a lock two processes may keep the same answer twice, and nothing else.
        """
        try:
            descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            yield
            return
        try:
            lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Flush what was written to the disk. Closing twice is harmless."""
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file, self._is_written = None, False


def _frame(records: Iterable[Record]) -> Iterator[bytes]:
    """Yield the parts of a frame."""
    kept = [*records]
    index = json.dumps([record.full_note for record in kept]).encode()
    size = sum(len(record.content) for record in kept)
    yield HEAD.pack(MAGIC, len(index), size, _crc(index, size)) + index
    for record in kept:
        yield record.content


class Inspection(NamedTuple):
    """What ``prime-rl tape check`` finds."""

    header: dict[str, Any]
    kinds: dict[tuple[str, int, bool], Counter[str]]  # kind, K, hidden -> answers, rows, bytes
    torn: dict[Path, int]  # bytes that writers left unfinished, by file
    unmarked: dict[Path, int]  # answers of writers that did not ask their teacher again, by file
    damage: list[str]  # a sentence for each damaged answer or file


def inspect(folder: Path) -> Inspection:
    """Read every answer of a tape, and compare it with its checksum."""
    store = Store(folder, lambda text: None, limit=0)
    header = store.header()
    assert header is not None
    found = Inspection(header, {}, {}, {}, [])
    for path in sorted(folder.glob(FILES)):
        part = read_frames(path)
        for place in part.places:
            note = place.note
            totals = found.kinds.setdefault((note.kind, note.k, note.hidden), Counter())
            totals.update(answers=1, rows=note.rows, bytes=note.size)
            if place.read() is None:
                found.damage.append(f"{path}: the answer at byte {place.offset} is not as written")
        if part.unmarked:
            found.unmarked[path] = len(part.unmarked)
        if part.rest.size and part.rest.is_torn:
            found.torn[path] = part.rest.size
        elif part.rest.size:
            found.damage.append(f"{path}: its last {part.rest.size} bytes are no answers")
    return found
