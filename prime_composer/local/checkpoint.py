"""Checkpoints are complete or absent, and are checked before anything is loaded.

One is written beside the older ones, flushed, and renamed. Its last file, ``manifest.json``, has
the SHA-256 of every other file.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch.utils._pytree import tree_leaves

from prime_composer.backends.errors import naming_file, os_error
from prime_composer.backends.hf_model import without_progress_bars
from prime_composer.local.disk import FULL, NoRoom, describe_error, free_bytes

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
TRAINER_FILE = "trainer.pt"

_LOADED = (
    *("*.safetensors", "*.bin", "*.index.json", "*config.json", "*token*", "*.model"),
    *("vocab.*", "merges.txt", "chat_template.*"),
)
"""What transformers and vLLM read from a model's directory without being told to."""


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was saved. The message names the file."""


class StrayFile(DamagedCheckpoint):
    """A checkpoint is whole, and a file that was not saved would be loaded with it."""


class CheckpointNotSaved(ValueError):
    """A checkpoint could not be written. The older ones are as they were."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the model in Hugging Face format, or its adapter, and the trainer's state."""

    path: Path
    step: int  # finished optimizer steps

    def verify(self) -> None:
        """Check that every file is the one that was saved, and that the folder's name is right."""
        manifest = self.path / MANIFEST
        try:
            saved = json.loads(manifest.read_text(encoding="utf-8"))
            step, digests = saved["step"], dict(saved["files"])
            wrong = [name for name, known in digests.items() if _sha256(self.path / name) != known]
        except OSError as error:
            raise DamagedCheckpoint(describe_error(error)) from error
        except (ValueError, LookupError, TypeError, RecursionError):
            raise DamagedCheckpoint(f"{manifest} is not a manifest") from None
        if step != self.step:
            raise DamagedCheckpoint(f"{manifest} is that of step {step}, not of step {self.step}")
        if wrong:
            file = self.path / wrong[0]
            raise DamagedCheckpoint(f"{file} is not what was saved (its SHA-256 differs)")
        for name in sorted(_files_of(self.path).keys() - digests.keys() - {MANIFEST}):
            if _is_loaded(name):
                raise StrayFile(
                    f"{self.path / name} was not saved with this checkpoint and would be loaded "
                    "with it; move it elsewhere"
                )

    def load(self) -> dict[str, Any]:
        """Return the trainer's state that was passed to ``save_checkpoint``, and its "step"."""
        return torch.load(self.path / TRAINER_FILE, map_location="cpu", weights_only=True)


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    state: dict[str, Any],
    keep: int,
    kept: Iterable[int] = (),
) -> Checkpoint:
    """Write the checkpoint of ``step`` atomically, and delete all but the newest ``keep``.

    A crash leaves the older ones, and at most one ``.tmp`` that the next save removes.
    """
    folder = run_dir / CHECKPOINTS
    target, unfinished, renamed = folder / f"step_{step:06d}", None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        if target.exists():
            return Checkpoint(target, step)
        unfinished = _unused(target, ".tmp")
        unfinished.mkdir()
        _write(unfinished, step, model, tokenizer, state)
        os.rename(unfinished, target)
        renamed = True
        _flush(folder)
    except Exception as error:
        cause = os_error(error)
        if cause is None:
            raise
        if unfinished is not None:
            with contextlib.suppress(OSError):
                if renamed:  # its name may not be on the disk: it is none to go on from
                    os.rename(target, unfinished)
            shutil.rmtree(unfinished, ignore_errors=True)
        room = ""
        if cause.errno in FULL:
            free = free_bytes(folder)
            room = f" ({decimal(tensor_bytes([model.state_dict(), state]))} needed"
            room += ")" if free is None else f", {decimal(free)} free)"
        raise CheckpointNotSaved(
            f"the checkpoint of step {step} could not be saved in {folder}{room}: "
            f"{describe_error(cause)}"
        ) from error
    _delete_old(run_dir, keep, kept)
    return Checkpoint(target, step)


def tidy(run_dir: Path, keep: int, kept: Iterable[int] = ()) -> None:
    """Delete what a run left that was killed while it saved, as far as it can be removed."""
    with contextlib.suppress(OSError):
        _remove_unfinished(run_dir / CHECKPOINTS)
    _delete_old(run_dir, keep, kept)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.iterdir():
        if re.fullmatch(r".*\.tmp(-[0-9]+)?", leftover.name):
            # Files that are open elsewhere stay on NFS, and another user's stay anywhere.
            with contextlib.suppress(OSError):
                remove(leftover)


def _delete_old(run_dir: Path, keep: int, kept: Iterable[int]) -> None:
    checkpoints = list_checkpoints(run_dir)
    right = {max((one.step for one in checkpoints if one.step <= step), default=0) for step in kept}
    for old in checkpoints[:-keep]:
        if old.step in right:
            continue
        with contextlib.suppress(OSError):
            # Renamed first, so that a half-deleted checkpoint does not look complete.
            remove(old.path.rename(_unused(old.path, ".tmp")))


def _write(folder: Path, step: int, model: Any, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write all files of a checkpoint and flush them, the manifest last."""
    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Through a file of Python's, an error keeps the operating system's reason.
    with open(folder / TRAINER_FILE, "wb") as file:
        torch.save({**state, "step": step}, file)
    files = _files_of(folder)
    for path in (*files.values(), *({one.parent for one in files.values()} - {folder})):
        _flush(path)
    digests = {name: _sha256(path) for name, path in sorted(files.items())}
    path, manifest = folder / MANIFEST, {"step": step, "files": digests}
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _flush(path)
    _flush(folder)


def tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists. A shared tensor counts once."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def check_room(run_dir: Path, size: int, count: int, resumed: int | None = None) -> None:
    """Refuse a disk without room for ``count`` checkpoints of ``size`` bytes.

    The run's own will be deleted, and count as free; those after ``resumed`` stay.
    """
    free = free_bytes(run_dir)
    if free is None:
        return
    own = [one for one in list_checkpoints(run_dir) if resumed is None or one.step <= resumed]
    files = (path for one in own for path in one.path.rglob("*") if not path.is_dir())
    room = free + sum(path.lstat().st_size for path in files)
    if room < size * count:
        raise NoRoom(
            f"{run_dir}: the checkpoints of this run need {decimal(size * count)} "
            f"({count} of {decimal(size)} at once), and the disk has room for "
            f"{decimal(room)}; free some, name an --output-dir on another disk, or lower "
            "checkpoint.keep"
        )


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first, whole or damaged."""
    checkpoints = [
        Checkpoint(path, int(path.name.removeprefix("step_")))
        for path in (Path(run_dir) / CHECKPOINTS).glob("step_*")
        if re.fullmatch("step_([0-9]{6}|[1-9][0-9]{6,})", path.name) and path.is_dir()
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def whole_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Return a checkpoint that is as it was saved."""
    chosen = find_checkpoint(run_dir, step)
    try:
        chosen.verify()
    except StrayFile:  # whose sentence has its remedy
        raise
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; {_newest_whole(run_dir, chosen)}") from error
    return chosen


def find_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """Return a checkpoint, the newest unless a step is named, without reading it."""
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in reversed(checkpoints):
        if step in (None, checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    raise DamagedCheckpoint(f"{run_dir} has no checkpoint of step {step}; it has {steps}")


def _newest_whole(run_dir: Path, damaged: Checkpoint) -> str:
    """Return the remedy for a damaged checkpoint: another one."""
    others = [one for one in list_checkpoints(run_dir) if one != damaged]
    for checkpoint in reversed(others):
        go_on = f"continue from it with --resume --step {checkpoint.step}"
        try:
            checkpoint.verify()
            return f"step {checkpoint.step} is the newest that is whole: {go_on}"
        except StrayFile as error:
            return f"{error}, and {go_on}"
        except DamagedCheckpoint:
            continue
    return "no other checkpoint of this run is whole; start a new run"


def set_newer_aside(run_dir: Path, step: int) -> list[Path]:
    """Rename the checkpoints after ``step``, which the run replaces; return their new names."""
    newer = [one.path for one in list_checkpoints(run_dir) if one.step > step]
    return [path.rename(_unused(path, ".aside")) for path in newer]


def remove(path: Path) -> None:
    """Delete a file, a directory, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unused(path: Path, suffix: str) -> Path:
    """Return ``path`` with a suffix, and with a number after it where that name is taken."""
    number, candidate = 1, path.with_name(f"{path.name}{suffix}")
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}{suffix}-{number}")
    return candidate


def _files_of(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }


def _is_loaded(name: str) -> bool:
    """Return whether a file of this name in a model's directory is loaded with the model."""
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == "additional_chat_templates"
    return not file.startswith(".") and any(fnmatch.fnmatchcase(file, like) for like in _LOADED)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
