"""The files of a tape: half written, damaged, full, and written by several processes at once."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from prime_composer.teachers.tape import store as store_module
from prime_composer.teachers.tape.store import (
    FILES,
    HEADER_FILE,
    Note,
    Record,
    Store,
    TapeError,
    inspect,
)
from tests.fork_server import ForkServer

HEADER = {"model": "a/model"}


def record(key: str, content: bytes = b"", k: int = 4) -> Record:
    return Record(Note(key, "top K", k, False, 3), content or f"answer {key} {k}".encode())


@contextmanager
def opened(
    folder: Path, told: list[str] | None = None, limit: int | None = None
) -> Iterator[Store]:
    store = Store(folder, (lambda text: None) if told is None else told.append, limit)
    store.begin(HEADER)
    yield store


def file_of(folder: Path) -> Path:
    (path,) = folder.glob(FILES)
    return path


def test_store_gives_back_what_was_kept(tmp_path: Path) -> None:
    """The smallest answer that has enough ids; without a copy of one that is there."""
    with opened(tmp_path) as store:
        store.add([record("a", b"four"), record("a", b"sixteen ids", 16), record("b", b"")])
        store.add([record("a", b"other bytes, same question")])
        assert store.get("a") == store.get("a", 4) == b"four"
        assert store.get("a", 5) == b"sixteen ids" and store.get("a", 17) is None
        assert store.get("a", 5, exact=True) is None and store.get("a", hidden=True) is None
    with opened(tmp_path) as again:
        assert again.get("a", 4) == b"four" and len(list(again.answers)) == 3
        assert again.size == file_of(tmp_path).stat().st_size
    assert inspect(tmp_path).kinds[("top K", 4, False)]["answers"] == 2


def test_store_half_written_file_is_no_answer(tmp_path: Path) -> None:
    """Of a writer that was killed: it is not read, and the next one removes it without a word."""
    with opened(tmp_path) as store:
        store.add([record("a")])
        (tmp_path / "answers-0.tmp").write_bytes(file_of(tmp_path).read_bytes()[:-1])
        store.refresh()
        assert len([*store.answers]) == 1
    told: list[str] = []
    with opened(tmp_path, told) as again:
        assert len([*again.answers]) == 1 and told == []
    assert not [*tmp_path.glob("*.tmp")] and inspect(tmp_path).damage == []


def test_store_answers_without_a_mark_are_not_read(tmp_path: Path) -> None:
    """By others: the teacher may have been another one. The mark is that of all before it."""
    with opened(tmp_path) as writer, opened(tmp_path) as reader:
        writer.add([record("a")], marked=False)
        writer.add([record("b")], marked=False)
        reader.refresh()
        assert writer.get("a") == b"answer a 4" and reader.get("a") is reader.get("b") is None
        assert sum(inspect(tmp_path).unmarked.values()) == 2 and inspect(tmp_path).kinds == {}
        writer.mark()
        writer.add([record("c")], marked=False)
        reader.refresh()
        assert reader.get("a") and reader.get("b") and reader.get("c") is None
        assert writer.get("a") == b"answer a 4" and writer.get("c") and writer.is_unmarked
        writer.mark()
        assert not writer.is_unmarked
    with opened(tmp_path) as store:
        assert {one.note.key for one in store.answers} == set("abc")


@pytest.mark.parametrize("cut", [False, True], ids=["changed", "cut"])
def test_store_damaged_answer_is_never_read(cut: bool, tmp_path: Path) -> None:
    """Any byte of a file changed, or its end lost: an answer is right or left out, and is seen."""
    right = {"a": b"x" * 40, "b": b"y" * 40}
    with opened(tmp_path) as store:
        store.add([record(key, content) for key, content in right.items()])
        whole = file_of(tmp_path).read_bytes()
    draw = random.Random(5)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        file_of(tmp_path).write_bytes(whole[:place] if cut else changed)
        told: list[str] = []
        with opened(tmp_path, told) as store:
            read = {key: store.get(key) for key in right}
        lost = {key for key, content in read.items() if content is None}
        assert lost and told and inspect(tmp_path).damage
        assert all(read[key] == right[key] for key in right.keys() - lost)


WRITER = """
import sys, time
from pathlib import Path
from unittest.mock import Mock
from prime_composer.teachers.tape.store import Note, Record, Store
folder, own = Path(sys.argv[1]), sys.argv[2]
store = Store(folder, print)
store.begin({})
(folder / f"ready {own}").touch()
while len(list(folder.glob("ready *"))) < 2:  # both have looked at the empty folder
    time.sleep(0.01)
for number in range(60):
    for key in (f"both {number}", f"{own} {number}"):
        store.add([Record(Note(key, "top K", 4, False, 1), f"{own} says {key}".encode() * 50)])
print(" ".join(store.get(f"both {number}").decode()[0] for number in range(60)))
"""


def test_two_writers_keep_each_answer_once(torch_forks: ForkServer, tmp_path: Path) -> None:
    """At the same time: nothing is there twice, and both read the same."""
    writers = [torch_forks.start("-c", WRITER, tmp_path, own) for own in "AB"]
    said = [writer.communicate(timeout=120)[0] for writer in writers]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert said[0] == said[1] and "says" not in said[0]
    found = inspect(tmp_path)
    assert found.kinds[("top K", 4, False)]["answers"] == 180
    assert found.damage == [] and not [*tmp_path.glob("*.tmp")]


def test_store_without_locks_reads_two_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without them two writers may keep one answer twice, and no more happens."""
    monkeypatch.setattr(store_module, "lock", lambda descriptor, wait: False)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        monkeypatch.setattr(second, "refresh", lambda: None)  # it looked a moment too early
        first.add([record("a")])
        second.add([record("a")])
    with opened(tmp_path) as store:
        assert len(list(store.answers)) == 2 and store.get("a") == b"answer a 4"


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Within the block a write that would make a file larger stops in its middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_store_on_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    """The limit on a file's size stops a write in its middle: one line, and nothing is left of it.

    What was kept before is others' to read.
    """
    told: list[str] = []
    with opened(tmp_path, told) as store:
        store.add([record("a")], marked=False)
        with no_file_beyond(500):
            store.add([record("b", b"b" * 2000)])
        store.add([record("d")])
        assert store.get("a") == b"answer a 4" and store.get("b") is store.get("d") is None
        store.mark()
    assert len(told) == 1 and "nothing more is kept" in told[0] and "File too large" in told[0]
    assert not [*tmp_path.glob("*.tmp")] and inspect(tmp_path).damage == []
    with opened(tmp_path, told) as again:
        assert again.get("a") == b"answer a 4" and len(told) == 1


def test_store_mark_that_fails_stays_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        store.add([record("a")], marked=False)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", Mock(side_effect=OSError))
            store.mark()
        assert store.is_unmarked and store.get("a")
        store.mark()
        assert not store.is_unmarked
    with opened(tmp_path) as again:
        assert again.get("a") == b"answer a 4"


def test_store_stops_at_its_limit(tmp_path: Path) -> None:
    """Of all files together; what is there is read."""
    with opened(tmp_path) as store:
        store.add([record("a", b"a" * 500)])
        size = store.size
    told: list[str] = []
    with opened(tmp_path, told, limit=size + 400) as store:
        store.add([record("b", b"b" * 100)])
        store.add([record("c", b"c" * 500)])
        store.add([record("d", b"d")])
        assert store.get("a") and store.get("b") and not store.get("c") and not store.get("d")
    assert len(told) == 1 and "tape_gb" in told[0]


def test_store_counts_what_killed_writers_left(tmp_path: Path) -> None:
    """Answers without a mark are nobody's, and take room as the others do."""
    told: list[str] = []
    for key in "abc":  # each of a run that ends before it has asked its teacher again
        with opened(tmp_path, told, limit=900) as store:
            store.add([record(key, key.encode() * 500)], marked=False)
    assert len(told) == 2 and all("tape_gb" in text for text in told)
    assert len([*tmp_path.glob("answers-*")]) == 1


def test_store_of_another_format_is_refused(tmp_path: Path) -> None:
    """As of an older version, whose files it could not read."""
    (tmp_path / HEADER_FILE).write_text('{"format": 1}')
    for limit in (None, 0):
        with pytest.raises(TapeError, match=r"format 1, .*make it again") as error:
            Store(tmp_path, print, limit)
        assert str(tmp_path) in str(error.value)
