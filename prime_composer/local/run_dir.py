"""The directory of a run: a new one, an earlier start's, or one to continue. One process has it."""

import errno
import itertools
import os
import re
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from prime_composer.backends.errors import naming_file
from prime_composer.local.answers import ANSWERS_FILE
from prime_composer.local.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    remove,
    whole_checkpoint,
)
from prime_composer.local.recipe_file import (
    RECIPE_FILE,
    UNFINISHED,
    Tables,
    changed_keys,
    check_continues,
    read_recipe,
    write_recipe,
)
from prime_composer.local.tracker import METRICS_FILE, WANDB_ID_FILE
from prime_composer.recipe.diloco import island_folder
from prime_composer.recipe.schema import Recipe, RecipeError

REPORT_FILE = "report.png"
TENSORBOARD = "tensorboard"
LOCK_FILE = ".lock"
HOLDER_FILE = ".holder"  # Host and process of the run that is or was the last one here

WAIT_SECONDS = 0.2  # ``check_free`` may hold the lock briefly

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
_FIRST = {HOLDER_FILE, UNFINISHED, LOCK_FILE}  # What is written before the recipe

_INSIDE = {
    CHECKPOINTS: re.compile(r"step_[0-9]+(\.(tmp|aside)(-[0-9]+)?)?"),
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..*"),
}
"""Folder -> the names that a run writes in it."""

_FILES = {RECIPE_FILE, METRICS_FILE, "metrics.tmp", ANSWERS_FILE, WANDB_ID_FILE, REPORT_FILE}


class InUse(ValueError):
    """Another process holds the run directory. The message names it."""


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for."""

    recipe: Recipe
    recipe_path: Path  # names the directory where nothing else does
    output_dir: str | None = None  # that the user named
    resume: bool = False  # continue the run that is there
    step: int | None = None  # of the checkpoint to continue from; None: the newest
    overwrite: bool = False  # delete the run that is there
    island: int | None = None  # its number; None without islands
    command: str = ""  # the words that name the run again: recipe, engine, changes

    @property
    def folder(self) -> str:
        """The run's folder within the directory; "" for the directory itself."""
        return "" if self.island is None else island_folder(self.island)

    @property
    def tables(self) -> Tables:
        return self.recipe.model_dump(mode="json")

    def how_to_continue(
        self, run_dir: Path, step: int | None = None, verified: int | None = None
    ) -> str:
        """Say what of a run that ended early is saved, and the line to paste that continues it.

        ``step`` is that of a checkpoint, the newest where it is None; ``verified`` one before it.
        """
        saved = [one.step for one in list_checkpoints(run_dir)]
        if not saved:
            return "nothing is saved yet; the same command starts over"
        step = saved[-1] if step is None else step
        named = run_dir.parent if self.folder else run_dir  # of all islands, where it has them
        line = f"{self.command} --output-dir {shlex.quote(str(named))} --resume"
        line += "" if step == saved[-1] else f" --step {step}"
        choice = "" if verified is None else f" (from a verified step: --step {verified})"
        return f"step {step} is saved; continue{choice} with\n    {line}"


@dataclass(frozen=True)
class RunDir:
    """The directory of a run that has not begun."""

    path: Path  # need not exist
    checkpoint: Checkpoint | None = None  # where the run continues; None for a new run
    replaces: bool = False  # an earlier run's files are deleted when this one begins
    note: str = ""  # a line about it for the user

    def describe(self) -> str:
        """Name the directory, and the step that a resumed run starts after."""
        resumed = f", resuming after step {self.checkpoint.step}" if self.checkpoint else ""
        note = f"\n{self.note}" if self.note else ""
        return f"run directory: {self.path}{resumed}{note}"


def choose_run_dir(request: RunRequest) -> RunDir:
    """Return the directory that ``claim_run_dir`` would claim now. Write nothing."""
    run_dir = _choose(request)
    if run_dir.checkpoint is not None:
        whole_checkpoint(run_dir.path, run_dir.checkpoint.step)
    return run_dir


def _choose(request: RunRequest) -> RunDir:
    """Return what ``choose_run_dir`` returns, with a checkpoint that was not read."""
    if request.output_dir is not None:
        return _look_at(Path(request.output_dir, request.folder), request)
    outputs, stem = Path("outputs"), request.recipe_path.stem
    newest, free = None, outputs / stem
    for number in itertools.count(2):
        if not os.path.lexists(free):
            break
        newest, free = free, outputs / f"{stem}-{number}"
    if newest is None:
        if request.resume:
            raise RecipeError(
                f"--resume: no run of {stem} under outputs/; name it with --output-dir"
            )
        return RunDir(free / request.folder)
    if request.resume or request.overwrite:
        return _look_at(newest / request.folder, request)
    with suppress(RecipeError, InUse):  # an earlier start that ended before its first checkpoint
        if _names(newest / request.folder):
            return _look_at(newest / request.folder, request)
    return RunDir(free / request.folder)


@dataclass(frozen=True, kw_only=True)
class HeldRunDir(RunDir):
    """A run directory that this process holds until the block ends."""

    tables: Tables  # the recipe of the run
    created: bool  # this process made the directory
    lock: FileLock

    def begin(self) -> None:
        """Delete what the run replaces, and write its recipe. Every check has passed by now."""
        if self.replaces:
            _clear(self.path)
        write_recipe(self.path, self.tables)

    def __enter__(self) -> "HeldRunDir":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with suppress(OSError):
            begun = self.replaces or self.checkpoint is not None
            if error is not None and not begun and _names(self.path) <= _FIRST | {RECIPE_FILE}:
                # The lock goes last: whoever then takes the directory finds nothing of this run.
                for name in (RECIPE_FILE, HOLDER_FILE, UNFINISHED, LOCK_FILE):
                    (self.path / name).unlink(missing_ok=True)
                if self.created:
                    self.path.rmdir()
        self.lock.release()


def claim_run_dir(request: RunRequest) -> HeldRunDir:
    """Take a directory that no other run has, also if two start at once, with the recipe in it."""
    numbered = request.output_dir is None and not request.resume
    while True:
        path = _choose(request).path
        created = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=not (created and numbered))
            lock = lock_run_dir(path)
        except (FileExistsError, InUse):  # another run was faster
            if numbered:
                continue
            raise
        try:
            run_dir = _look_at(path, request, held=True)
            if run_dir.checkpoint is not None:
                whole_checkpoint(path, run_dir.checkpoint.step)
            if not (run_dir.replaces or run_dir.checkpoint):
                write_recipe(path, request.tables)
        except BaseException as error:
            lock.release()
            if numbered and isinstance(error, RecipeError):
                continue
            raise
        return HeldRunDir(**vars(run_dir), tables=request.tables, created=created, lock=lock)


def _look_at(path: Path, request: RunRequest, held: bool = False) -> RunDir:
    """Return what a run in this directory would be. A checkpoint is not read."""
    if os.path.lexists(path) and not path.is_dir():
        raise _taken(path)
    names = _names(path)
    if not held:
        check_free(path)
    if names <= _FIRST:
        if request.resume and not names:
            raise _no_checkpoint(path)
        return RunDir(path)
    if request.overwrite:
        if RECIPE_FILE not in names:
            raise RecipeError(
                f"--overwrite: {path} holds no {RECIPE_FILE}, so it is no run; nothing was "
                "touched. Name another --output-dir"
            )
        read_recipe(path)
        note = "--overwrite: the run in it is deleted when this one begins"
        return RunDir(path, replaces=True, note=note)
    checkpoints = list_checkpoints(path)
    if request.resume and checkpoints:
        checkpoint = find_checkpoint(path, request.step)
        return RunDir(path, checkpoint, note=check_continues(path, request.tables, checkpoint.step))
    if not checkpoints and RECIPE_FILE in names:
        changed = changed_keys(read_recipe(path), request.tables)
        if not changed:
            note = "an earlier start in it ended before its first checkpoint; starting over"
            return RunDir(path, replaces=True, note=note)
        if request.resume:
            raise _no_checkpoint(
                path, f", and it was started with other values of {', '.join(changed)}"
            )
    raise _no_checkpoint(path) if request.resume else _taken(path)


def _clear(run_dir: Path) -> None:
    """Delete what an earlier run wrote, and nothing else. W&B's own folder stays for its upload."""
    for name, ours in _INSIDE.items():
        folder = run_dir / name
        if folder.is_dir():
            for path in folder.iterdir():
                if ours.fullmatch(path.name):
                    remove(path)
            with suppress(OSError):  # it is a link, or somebody else's files are in it
                folder.rmdir()
    for name in _FILES | {UNFINISHED}:
        remove(run_dir / name)


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} if path.is_dir() else set()


def _no_checkpoint(path: Path, reason: str = "") -> RecipeError:
    return RecipeError(
        f"--resume: {path} holds no complete checkpoint{reason}; start without --resume, "
        "in another --output-dir if files are there"
    )


def _taken(path: Path) -> RecipeError:
    remedy = ", or continue that run with --resume"
    if (path / RECIPE_FILE).is_file():
        remedy = ", continue that run with --resume, or replace it with --overwrite"
    return RecipeError(
        f"{path} exists and is not empty; nothing was touched. Name another --output-dir{remedy}"
    )


def lock_run_dir(run_dir: Path) -> FileLock:
    """Take the kernel's lock on a run directory, which ends with this process however that dies."""
    lock = _acquired(run_dir)
    # Beside the lock: over NFS, closing the lock file a second time would release it.
    holder = run_dir / HOLDER_FILE
    try:
        with naming_file(holder):
            holder.write_text(f"{socket.gethostname()} {os.getpid()}\n", encoding="utf-8")
    except BaseException:
        lock.release()
        raise
    return lock


def check_free(run_dir: Path) -> None:
    """Check that no process holds a run directory. Write nothing."""
    if os.access(run_dir / LOCK_FILE, os.W_OK):
        _acquired(run_dir).release()


def _acquired(run_dir: Path) -> FileLock:
    """Return the lock of a directory, which is free on a file system that knows no locks."""
    lock = FileLock(run_dir / LOCK_FILE, timeout=WAIT_SECONDS, thread_local=False)
    try:
        lock.acquire(poll_interval=WAIT_SECONDS / 10)
    except (Timeout, FileNotFoundError):  # its owner may just have deleted the directory
        raise InUse(
            f"{run_dir} is in use by {_holder(run_dir)}; wait for that run, stop it, or name "
            "another --output-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return lock


def _holder(run_dir: Path) -> str:
    try:
        host, process = (run_dir / HOLDER_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "another process"
    return f"process {process} on {host}"
