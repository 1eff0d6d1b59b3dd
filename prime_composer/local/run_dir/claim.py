"""Choose and claim the directory of a run: a new one, an earlier start's, or one to continue."""

import errno
import itertools
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prime_composer.local.answers import ANSWERS_FILE
from prime_composer.local.run_dir.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    remove,
    whole_checkpoint,
)
from prime_composer.local.run_dir.lock import HOLDER_FILE, LOCK_FILE, InUse, RunLock, check_free
from prime_composer.local.run_dir.recipe_file import (
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
_FIRST = {HOLDER_FILE, UNFINISHED, LOCK_FILE}  # What is written before the recipe

_INSIDE = {
    CHECKPOINTS: re.compile(r"step_[0-9]+(\.(tmp|aside)(-[0-9]+)?)?"),
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..*"),
}
"""Folder -> the names that a run writes in it."""

_FILES = {RECIPE_FILE, METRICS_FILE, "metrics.tmp", ANSWERS_FILE, WANDB_ID_FILE, REPORT_FILE}
_OURS = {*_FIRST, *_FILES, *_INSIDE, "wandb"}


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    recipe: Recipe
    recipe_path: Path  # names the directory where nothing else does
    output_dir: str | None = None  # that the user named
    resume: bool = False  # continue the run that is there
    step: int | None = None  # of the checkpoint to continue from; None: the newest
    overwrite: bool = False  # delete the run that is there
    island: int | None = None  # its number; None without islands

    @property
    def folder(self) -> str:
        """The run's folder within the directory; "" for the directory itself."""
        return "" if self.island is None else island_folder(self.island)

    @property
    def tables(self) -> Tables:
        return self.recipe.model_dump(mode="json")


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


def choose_run_dir(wish: Wish) -> RunDir:
    """Return the directory that ``claim_run_dir`` would claim now. Write nothing."""
    run_dir = _choose(wish)
    if run_dir.checkpoint is not None:
        whole_checkpoint(run_dir.path, run_dir.checkpoint.step)
    return run_dir


def _choose(wish: Wish) -> RunDir:
    """Return what ``choose_run_dir`` returns, with a checkpoint that was not read."""
    if wish.output_dir is not None:
        return _look_at(Path(wish.output_dir, wish.folder), wish)
    outputs, stem = Path("outputs"), wish.recipe_path.stem
    newest, free = None, outputs / stem
    for number in itertools.count(2):
        if not os.path.lexists(free):
            break
        newest, free = free, outputs / f"{stem}-{number}"
    if newest is None:
        if wish.resume:
            raise RecipeError(
                f"--resume: no run of {stem} under outputs/; name it with --output-dir"
            )
        return RunDir(free / wish.folder)
    if wish.resume or wish.overwrite:
        return _look_at(newest / wish.folder, wish)
    with suppress(RecipeError, InUse):  # an earlier start that ended before its first checkpoint
        if _names(newest / wish.folder):
            return _look_at(newest / wish.folder, wish)
    return RunDir(free / wish.folder)


@dataclass
class Claim:
    """A run directory that this process holds until the block ends."""

    run_dir: RunDir  # the directory
    tables: Tables  # the recipe of the run
    created: bool  # this process made the directory
    _lock: RunLock = field(repr=False)

    @property
    def path(self) -> Path:
        return self.run_dir.path

    def begin(self) -> None:
        """Delete what the run replaces, and write its recipe. Every check has passed by now."""
        if self.run_dir.replaces:
            _clear(self.path)
        write_recipe(self.path, self.tables)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with suppress(OSError):
            begun = self.run_dir.replaces or self.run_dir.checkpoint is not None
            if error is not None and not begun and _names(self.path) <= _FIRST | {RECIPE_FILE}:
                # The lock goes last: whoever then takes the directory finds nothing of this run.
                for name in (RECIPE_FILE, HOLDER_FILE, UNFINISHED, LOCK_FILE):
                    (self.path / name).unlink(missing_ok=True)
                if self.created:
                    self.path.rmdir()
        self._lock.release()


def claim_run_dir(wish: Wish) -> Claim:
    """Take a directory that no other run has, also if two start at once, with the recipe in it."""
    numbered = wish.output_dir is None and not wish.resume
    while True:
        path = _choose(wish).path
        created = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=not (created and numbered))
            lock = RunLock(path)
        except (FileExistsError, InUse):  # another run was faster
            if numbered:
                continue
            raise
        try:
            run_dir = _look_at(path, wish, held=True)
            if run_dir.checkpoint is not None:
                whole_checkpoint(path, run_dir.checkpoint.step)
            if not (run_dir.replaces or run_dir.checkpoint):
                write_recipe(path, wish.tables)
        except BaseException as error:
            lock.release()
            if numbered and isinstance(error, RecipeError):
                continue
            raise
        return Claim(run_dir, wish.tables, created, lock)


def _look_at(path: Path, wish: Wish, held: bool = False) -> RunDir:
    """Return what a run in this directory would be. A checkpoint is not read."""
    if os.path.lexists(path) and not path.is_dir():
        raise _taken(path)
    names = _names(path)
    if not held:
        check_free(path)
    if names and names <= _FIRST:
        return RunDir(path)
    if not names:
        if wish.resume:
            raise _no_checkpoint(path)
        _check_writable(path)
        return RunDir(path)
    if wish.overwrite:
        if RECIPE_FILE not in names:
            raise RecipeError(
                f"--overwrite: {path} holds no {RECIPE_FILE}, so it is no run; nothing was "
                "touched. Name another --output-dir"
            )
        read_recipe(path)
        note = "--overwrite: the run in it is deleted when this one begins"
        return RunDir(path, replaces=True, note=note)
    checkpoints = list_checkpoints(path)
    if wish.resume and checkpoints:
        checkpoint = find_checkpoint(path, wish.step)
        return RunDir(path, checkpoint, note=check_continues(path, wish.tables, checkpoint.step))
    if not checkpoints and RECIPE_FILE in names:
        others = foreign_files(path)
        changed = changed_keys(read_recipe(path), wish.tables)
        if not others and not changed:
            note = "an earlier start in it ended before its first checkpoint; starting over"
            return RunDir(path, replaces=True, note=note)
        if wish.resume:
            reasons = [f"it was started with other values of {', '.join(changed)}"] * bool(changed)
            reasons += [f"it holds other files ({', '.join(others[:3])})"] * bool(others)
            raise _no_checkpoint(path, f", and {' and '.join(reasons)}")
    raise _no_checkpoint(path) if wish.resume else _taken(path)


def _check_writable(path: Path) -> None:
    """Refuse a directory that cannot be made or written, before anything is prepared."""
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def foreign_files(run_dir: Path) -> list[str]:
    """Name what a run does not write: other files, and links in the place of its own."""
    foreign = []
    for path in sorted(run_dir.iterdir()):
        if path.name not in _OURS or path.is_symlink():
            foreign.append(path.name)
        elif path.name in _INSIDE and path.is_dir():
            ours = _INSIDE[path.name]
            foreign += [
                f"{path.name}/{inner.name}"
                for inner in sorted(path.iterdir())
                if not ours.fullmatch(inner.name)
            ]
    return foreign


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
