"""Name every change of a file below some folders, and fail or die at one of them.

A process calls ``install`` before it does anything else. The environment variable ``VARIABLE``
holds a plan as JSON (``Plan``). From then on each write, creation, flush, rename and deletion below
the plan's folders is counted by what it does and where, as in "rename run/recipe.tmp ->
run/recipe.json #1", and noted in the plan's log.

Python's own calls are wrapped where they reach the system: a buffered file's writes are named as
they leave its buffer. Two libraries write natively (``safetensors`` and ``tokenizers``). Each of
their files is one write. An audit hook notes what went past the wrappers as ``UNWATCHED``.
"""

import builtins
import errno
import functools
import io
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "PRIME_COMPOSER_POINTS"
UNWATCHED = "unwatched"
SIZE = "size"

KILL = "kill"
FULL = "ENOSPC"
BROKEN = "EIO"

NEEDS_ROOM = ("write", "create", "mkdir")
"""What fails on a full disk."""

BUFFER = 2**16
"""Bytes of a buffered file's buffer: fewer writes than with Python's own, for fewer points."""

RANDOM_NAMES = (
    (re.compile(r"(prime_composer_(?:weights|trial)_|unfinished_)\w+"), r"\1*"),
    (re.compile(r"\banswers-[0-9a-f]{12}\b"), "answers-*"),
    (re.compile(r"events\.out\.tfevents\.[^/]*"), "events.out.tfevents.*"),
    (re.compile(r"\.tmp[A-Za-z0-9]{6}\b"), ".tmp*"),
)
"""Names with random letters, host or time, and what they are called here."""


@dataclass
class Plan:
    """What to watch, and where to fail."""

    folders: dict[str, str]  # watched folder -> its name in points
    log: str | None = None  # one JSON object per point is added to this file; None for none
    point: str | None = None  # the name at which to fail; None for none
    # ``KILL``, ``FULL`` (from then on the disk stays full) or ``BROKEN`` (once)
    fault: str | None = None
    # whether the report is drawn, a fifth of a run. Otherwise it is an empty file.
    draws: bool = True

    def variable(self) -> dict[str, str]:
        """Return the environment variable that carries it."""
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass
class Watch:
    """Counts points, and fails at the one of its plan."""

    plan: Plan
    counts: Counter[str] = field(default_factory=Counter)
    is_full: bool = False
    inside: int = 0
    """Wrappers that are calling the system now."""
    log: int | None = None

    def place(self, path: Any, folder: int | None = None) -> str | None:
        """Return the name of a path in points; None outside the watched folders."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fsdecode(path)
        if folder is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        for root, name in self.plan.folders.items():
            if path == root or path.startswith(root + "/"):
                place = name + path[len(root) :]
                for pattern, plain in RANDOM_NAMES:
                    place = pattern.sub(plain, place)
                return re.sub(rf"\.{os.getpid()}\b", ".PID", place)
        return None

    def note(self, name: str, size: int) -> None:
        """Add a line to the log."""
        if self.log is not None:
            _write(self.log, (json.dumps({"name": name, "bytes": size}) + "\n").encode())

    def note_size(self, place: str, file: Any) -> None:
        """Note the size of a file that was created, or written natively."""
        self.note(f"{SIZE} {place}", os.stat(file).st_size)

    def fault_at(self, kind: str, place: str, size: int = 0) -> str | None:
        """Count a point, and return the fault that it has to show."""
        self.counts[f"{kind} {place}"] += 1
        name = f"{kind} {place} #{self.counts[f'{kind} {place}']}"
        self.note(name, size)
        if name == self.plan.point:
            self.is_full = self.plan.fault == FULL
            return self.plan.fault
        return FULL if self.is_full and kind in NEEDS_ROOM else None

    def pass_or_fail(self, kind: str, place: str, *paths: Any) -> None:
        """Count a point that changes nothing before it fails."""
        fault = self.fault_at(kind, place)
        if fault == KILL:
            die()
        if fault is not None:
            raise error_of(fault, *paths)


def error_of(fault: str, *paths: Any) -> OSError:
    """Return the system's error; with the paths that it names."""
    number = getattr(errno, fault)
    names = [os.fspath(path) for path in paths if not isinstance(path, int)]
    match names:
        case [first, second]:
            return OSError(number, os.strerror(number), first, None, second)
        case [first]:
            return OSError(number, os.strerror(number), first)
    return OSError(number, os.strerror(number))


def die() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


_write = os.write
_open = io.open


def install() -> None:
    """Watch from now on, if the environment says so."""
    if VARIABLE not in os.environ:
        return
    tempfile.tempdir = os.environ.get("TMPDIR")  # a fork has its parent's
    watch = Watch(Plan(**json.loads(os.environ[VARIABLE])))
    if watch.plan.log is not None:
        watch.log = os.open(watch.plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _watch_paths(watch)
    _watch_descriptors(watch)
    _watch_files(watch)
    _watch_safetensors(watch)
    _watch_tokenizers(watch)
    if not watch.plan.draws:
        _draw_nothing()
    sys.addaudithook(functools.partial(_note_unwatched, watch))


def _wrap(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of a module by ``wrapper(original, ...)``."""
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(module, name, wrapped)


def _watch_paths(watch: Watch) -> None:
    """Watch what the system does to names."""

    def called(original: Any, *args: Any, **kwargs: Any) -> Any:
        watch.inside += 1
        try:
            return original(*args, **kwargs)
        finally:
            watch.inside -= 1

    def one(kind: str, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        place = watch.place(path, kwargs.get("dir_fd"))
        if place and not (kind == "mkdir" and os.path.lexists(path)):  # which changes nothing
            watch.pass_or_fail(kind, place, path)
        return called(original, path, *args, **kwargs)

    def two(kind: str, original: Any, first: Any, second: Any, **kwargs: Any) -> Any:
        places = watch.place(first), watch.place(second)
        if any(places):
            watch.pass_or_fail(kind, " -> ".join(str(place) for place in places), first, second)
        return called(original, first, second, **kwargs)

    for name in ("unlink", "remove", "rmdir", "mkdir", "chmod", "truncate"):
        kind = "unlink" if name == "remove" else name
        _wrap(os, name, functools.partial(one, kind))
    for name in ("rename", "replace", "link", "symlink"):
        _wrap(os, name, functools.partial(two, "rename" if name == "replace" else name))

    def opened(original: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        place = watch.place(path, kwargs.get("dir_fd"))
        if place and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            watch.pass_or_fail("create", place, path)
        descriptor = called(original, path, flags, *args, **kwargs)
        if place and flags & os.O_CREAT:
            watch.note_size(place, descriptor)
        return descriptor

    _wrap(os, "open", opened)


def _watch_descriptors(watch: Watch) -> None:
    """Watch what the system does to open files."""

    def change(kind: str, original: Any, descriptor: Any, *args: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if place := watch.place(number):
            watch.pass_or_fail(kind, place)
        return original(descriptor, *args)

    for name in ("fsync", "fdatasync", "ftruncate"):
        _wrap(os, name, functools.partial(change, name))

    def written(original: Any, descriptor: int, data: Any, *args: Any) -> int:
        if place := watch.place(descriptor):

            def write(part: memoryview) -> int:
                return original(descriptor, part, *args)

            return _torn(watch, place, memoryview(data), write)
        return original(descriptor, data, *args)

    for name in ("write", "pwrite"):
        _wrap(os, name, written)


def _torn(
    watch: Watch, place: str, data: memoryview, write: Callable[[memoryview], int | None]
) -> int:
    """Write data, or half of it before this process dies or the disk is full."""
    was_full = watch.is_full
    fault = watch.fault_at("write", place, data.nbytes)
    half = data.cast("B")[: data.nbytes // 2]
    if fault == KILL:
        write(half)
        die()
    if fault == FULL and not was_full and len(half):
        return write(half) or 0  # the next write gets the error
    if fault is not None:
        raise error_of(fault)
    return write(data) or 0


def _watch_files(watch: Watch) -> None:
    """Watch Python's own files, below their buffers."""

    class WatchedFile(io.FileIO):
        place: str

        def write(self, data: Any) -> int:
            return _torn(watch, self.place, memoryview(data), super().write)

        def truncate(self, size: int | None = None) -> int:
            watch.pass_or_fail("truncate", self.place)
            return super().truncate(size)

    def opened(
        original: Any,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        place = None if isinstance(file, int) else watch.place(file)
        if place is None or not set(mode) & set("wax+"):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        watch.pass_or_fail("create", place, file)
        watch.inside += 1
        try:
            raw = WatchedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        finally:
            watch.inside -= 1
        raw.place = place
        watch.note_size(place, raw.fileno())
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else BUFFER
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffered = kind(raw, size)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    wrapped = functools.wraps(_open)(functools.partial(opened, _open))
    io.open = builtins.open = wrapped  # type: ignore[assignment]


def _natively(watch: Watch, path: Any, write: Callable[[str], Any], error: type[Exception]) -> Any:
    """Let a library write a whole file, which is one point."""
    place = watch.place(path)
    if place is None:
        return write(os.fspath(path))
    fault = watch.fault_at("write", place)
    if fault == KILL:
        # safetensors writes under another name and renames; what is left has a random one.
        torn = os.path.join(os.path.dirname(path), ".tmpAbCd12")
        write(torn)
        os.truncate(torn, os.path.getsize(torn) // 2)
        die()
    if fault is not None:
        number = getattr(errno, fault)
        raise error(f"I/O error: {os.strerror(number)} (os error {number})")
    result = write(os.fspath(path))
    watch.note_size(place, path)
    return result


def _watch_safetensors(watch: Watch) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    def saved(original: Any, tensors: Any, filename: Any, metadata: Any = None) -> Any:
        return _natively(
            watch,
            filename,
            lambda path: original(tensors, path, metadata=metadata),
            SafetensorError,
        )

    _wrap(safetensors.torch, "serialize_file", saved)


def _watch_tokenizers(watch: Watch) -> None:
    import tokenizers

    save = tokenizers.Tokenizer.save

    def saved(self: Any, path: Any, pretty: bool = True) -> None:
        _natively(watch, path, lambda name: save(self, name, pretty), Exception)

    tokenizers.Tokenizer.save = saved


def _draw_nothing() -> None:
    from matplotlib.figure import Figure

    def saved(self: Any, path: Any, **settings: Any) -> None:
        Path(path).touch()

    Figure.savefig = saved


EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}


def _note_unwatched(watch: Watch, event: str, args: tuple[Any, ...]) -> None:
    """Note a change of a watched file that no wrapper has counted."""
    if watch.inside or not (event == "open" or event in EVENTS) or isinstance(args[0], int):
        return
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if args[0] is not None and (place := watch.place(args[0])):
        watch.note(f"{UNWATCHED} {event} {place}", 0)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return what a watched process noted, in order."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
