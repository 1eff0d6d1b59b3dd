"""Choose and claim the directory of a run: a new one, an earlier start's, or one to continue."""

import errno
import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_composer.cli.formatting import RECIPE_FILE
from prime_composer.local.answers import ANSWERS_FILE
from prime_composer.local.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    remove,
    whole_checkpoint,
)
from prime_composer.local.lock import LOCK_FILE, InUse, RunLock, check_free
from prime_composer.local.tracker import METRICS_FILE, WANDB_ID_FILE
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.recipe.urls import MASK

MAY_CHANGE = re.compile(
    r"(eval|logging|checkpoint|checks|prime_rl)(\..*)?|output_dir"
    r"|(teacher|rollout|teachers\..*)\.(wait|timeout)"
)
"""Keys that a resumed run may change: they do not touch the numbers that it trains on."""

PROVEN = re.compile(r"(?P<table>teacher|teachers\..+|rollout)\.(url|dtype)")
"""Keys of a model on a server that a resumed run may change, for its first answers prove that the
model is the same. A dtype there only says how far answers may be apart."""

REPORT_FILE = "report.png"
TENSORBOARD = "tensorboard"
_WRITTEN_FIRST = {LOCK_FILE, "recipe.tmp"}
_OURS = _WRITTEN_FIRST | {
    RECIPE_FILE,
    METRICS_FILE,
    ANSWERS_FILE,
    "metrics.tmp",
    WANDB_ID_FILE,
    REPORT_FILE,
    "wandb",
    TENSORBOARD,
    CHECKPOINTS,
}
_OUR_CHECKPOINT = re.compile(r"step_[0-9]+(\.(tmp|aside)(-[0-9]+)?)?")
_OUR_EVENTS = re.compile(r"events\.out\.tfevents\..*")


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

    Attributes:
        recipe: the resolved recipe.
        recipe_path: its file; names the directory where nothing else does.
        output_dir: the directory that the user named, or None.
        resume: continue the run that is there.
        step: the checkpoint to continue from; None: the newest.
        overwrite: delete the run that is there.
    """

    recipe: Recipe
    recipe_path: Path
    output_dir: str | None = None
    resume: bool = False
    step: int | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class RunDir:
    """The directory of a run that has not begun.

    Attributes:
        path: the directory, which need not exist.
        checkpoint: where the run continues; None for a new run.
        replaces: the files of an earlier run in it are deleted when this one begins.
        note: a line about it for the user; empty where there is nothing to say.
    """

    path: Path
    checkpoint: Checkpoint | None = None
    replaces: bool = False
    note: str = ""

    def describe(self) -> str:
        """Name the directory, and the step that a resumed run starts after."""
        resumed = f", resuming after step {self.checkpoint.step}" if self.checkpoint else ""
        note = f"\n{self.note}" if self.note else ""
        return f"run directory: {self.path}{resumed}{note}"


def choose_run_dir(wish: Wish) -> RunDir:
    """Return the directory that ``claim_run_dir`` would claim now. Write nothing.

    Raises:
        RecipeError: the directory that the user named is taken, or cannot be resumed.
        InUse: another process trains in it.
        DamagedCheckpoint: the checkpoint is not what was saved.
    """
    run_dir = _choose(wish)
    if run_dir.checkpoint is not None:
        whole_checkpoint(run_dir.path, run_dir.checkpoint.step)
    return run_dir


def _choose(wish: Wish) -> RunDir:
    """Return what ``choose_run_dir`` returns, with a checkpoint that was not read."""
    if wish.output_dir is not None:
        return _look_at(Path(wish.output_dir), wish)
    newest = free = None
    for path in _numbered(wish.recipe_path):
        if not os.path.lexists(path):
            free = path
            break
        newest = path
    assert free is not None
    if newest is None:
        if wish.resume:
            raise RecipeError(
                f"--resume: no run of {wish.recipe_path.stem} under outputs/; "
                "name it with --output-dir"
            )
        return RunDir(free)
    if wish.resume or wish.overwrite:
        return _look_at(newest, wish)
    with suppress(RecipeError, InUse):  # an earlier start that ended before its first checkpoint
        if _names(newest):
            return _look_at(newest, wish)
    return RunDir(free)


@dataclass
class Claim:
    """A run directory that this process holds until the block ends.

    A new directory is removed again where an error ends the run before it wrote anything.

    Attributes:
        run_dir: the directory.
        recipe: the recipe of the run.
        created: this process made the directory.
    """

    run_dir: RunDir
    recipe: Recipe
    created: bool
    _lock: RunLock = field(repr=False)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.run_dir.path

    def begin(self) -> None:
        """Delete what the run replaces, and write its recipe. Every check has passed by now."""
        if self.run_dir.replaces:
            _clear(self.path)
        write_recipe(self.path, self.recipe)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with suppress(OSError):
            if error is not None and _names(self.path) <= _WRITTEN_FIRST | {RECIPE_FILE}:
                if not (self.run_dir.replaces or self.run_dir.checkpoint):
                    for name in (RECIPE_FILE, *_WRITTEN_FIRST):
                        (self.path / name).unlink(missing_ok=True)
                    if self.created:
                        self.path.rmdir()
        self._lock.release()


def claim_run_dir(wish: Wish) -> Claim:
    """Take a directory that no other run has, also if two start at once, with the recipe in it.

    Errors are those of ``choose_run_dir``.
    """
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
                write_recipe(path, wish.recipe)
        except BaseException as error:
            lock.release()
            if numbered and isinstance(error, RecipeError):
                continue
            raise
        return Claim(run_dir, wish.recipe, created, lock)


def _look_at(path: Path, wish: Wish, held: bool = False) -> RunDir:
    """Return what a run in this directory would be. A checkpoint is not read.

    Args:
        path: the directory; need not exist.
        wish: what the user asked for.
        held: this process has the lock.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise _taken(path)
    names = _names(path)
    if not held:
        check_free(path)
    if names and names <= _WRITTEN_FIRST:
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
        return RunDir(
            path, replaces=True, note="--overwrite: the run in it is deleted when this one begins"
        )
    checkpoints = list_checkpoints(path)
    if wish.resume and checkpoints:
        checkpoint = find_checkpoint(path, wish.step)
        return RunDir(path, checkpoint, note=_compare(path, wish.recipe, checkpoint))
    if not checkpoints and RECIPE_FILE in names:
        others = foreign_files(path)
        changed = changed_keys(path, wish.recipe)
        if not others and not changed:
            return RunDir(
                path,
                replaces=True,
                note="an earlier start in it ended before its first checkpoint; starting over",
            )
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


def _compare(path: Path, recipe: Recipe, checkpoint: Checkpoint) -> str:
    """Refuse to continue a run with another recipe. Return a note on what is allowed to differ."""
    changed = changed_keys(path, recipe)
    notes = []
    if not checkpoint.has_manifest:
        notes.append(
            f"warning: {checkpoint.path} is of a version without checksums, so that a changed "
            "byte in it is not noticed"
        )
    elif moved := [key for key in changed if _is_proven(key, path, recipe)]:
        changed = [key for key in changed if key not in moved]
        notes.append(
            f"{', '.join(moved)}: other values than at the run's start; the same model has to "
            "answer there"
        )
    if "trainer.steps" in changed:
        before = read_recipe(path)["trainer"]["steps"]
        refusal = _why_not_other_steps(before, recipe, checkpoint)
        if changed == ["trainer.steps"] and refusal:
            raise RecipeError(f"--resume: {refusal}")
        if not refusal:
            changed.remove("trainer.steps")
            notes.append(f"trainer.steps is {recipe.trainer.steps} now; it was {before}")
    if changed:
        raise RecipeError(
            f"--resume: {path} was started with other values of {', '.join(changed)}; "
            "give the same ones, or start a new run without --resume"
        )
    return "\n".join(notes)


def _is_proven(key: str, path: Path, recipe: Recipe) -> bool:
    """Return whether a changed key is one of a server's, before and now."""
    match = PROVEN.fullmatch(key)
    if match is None:
        return False
    for table in (read_recipe(path), recipe.model_dump(mode="json")):
        for name in match["table"].split(".", 1):
            table = table[name]
        if table.get("url") is None:
            return False
    return True


def _why_not_other_steps(before: int, recipe: Recipe, checkpoint: Checkpoint) -> str:
    """Say what another number of steps would change in the steps that are done; "" for nothing."""
    from prime_composer.local.train import lr_factor

    done, config = checkpoint.step, recipe.trainer
    if config.steps < done:
        return f"trainer.steps = {config.steps}, and {done} steps are done already"
    was = config.model_copy(update={"steps": before})
    for step in range(1, done + 1):
        old, new = (config.lr * lr_factor(trainer, step) for trainer in (was, config))
        if old != new:
            return (
                f"trainer.steps = {config.steps} instead of {before} would change steps that are "
                f"done: trainer.schedule = {config.schedule!r} spreads the learning rate over all "
                f"steps, and that of step {step} was {old:.3g} and would be {new:.3g}. Only "
                "trainer.schedule = 'constant' can be continued for longer; start a new run"
            )
    return ""


def changed_keys(run_dir: Path, recipe: Recipe) -> list[str]:
    """Name the keys whose values differ from those that a run was started with.

    Keys that a resumed run may change are left out.

    Raises:
        RecipeError: the run's recipe cannot be read.
    """
    before, now = read_recipe(run_dir), recipe.model_dump(mode="json")
    keys = [
        key
        for section in sorted(before.keys() | now.keys())
        for key in _differences(section, before.get(section), now.get(section))
    ]
    return [key for key in keys if not MAY_CHANGE.fullmatch(key)]


def read_recipe(run_dir: Path) -> dict[str, Any]:
    """Return the recipe that a run was started with, with defaults for keys that are new since.

    Raises:
        RecipeError: there is none, or it cannot be read.
    """
    path = run_dir / RECIPE_FILE
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text)
        if not isinstance(tables, dict) or "trainer" not in tables:
            raise ValueError
    except FileNotFoundError:
        raise RecipeError(f"{run_dir} holds no {RECIPE_FILE}; is it a run directory?") from None
    except (ValueError, RecursionError):
        raise RecipeError(f"{path} is not a run's recipe; restore it, or start a new run") from None
    try:
        # The mask of a password is no URL; both sides of a comparison have it.
        unmasked = json.loads(text.replace(f"://{MASK}@", "://user@"))
        for data in (unmasked.get("data"), *unmasked.get("environments", {}).values()):
            if data and "answer_check" in data:  # a run that began before the key was renamed
                data["metric"] = data.pop("answer_check")
        return parse_recipe(unmasked).model_dump(mode="json")
    except (ValueError, TypeError, AttributeError):  # of another version
        return tables


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe of a run, at once and on the disk."""
    unfinished = run_dir / "recipe.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(recipe.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, run_dir / RECIPE_FILE)


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


_INSIDE = {CHECKPOINTS: _OUR_CHECKPOINT, TENSORBOARD: _OUR_EVENTS}


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
    for name in _OURS - _INSIDE.keys() - {"wandb", LOCK_FILE}:
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


def _numbered(recipe_path: Path) -> Iterator[Path]:
    """Yield outputs/<recipe>, outputs/<recipe>-2, outputs/<recipe>-3, ..."""
    yield Path("outputs") / recipe_path.stem
    for number in itertools.count(2):
        yield Path("outputs") / f"{recipe_path.stem}-{number}"


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """Name the keys, from ``name`` down, whose values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            key
            for inner in sorted(before.keys() | now.keys())
            for key in _differences(f"{name}.{inner}", before.get(inner), now.get(inner))
        ]
    return [] if before == now else [name]
