"""Checkpoints are complete or absent, checked before they are loaded; the newest few are kept."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from prime_composer.backends import errors
from prime_composer.local import checkpoint as module
from prime_composer.local import disk
from prime_composer.local.checkpoint import (
    CheckpointNotSaved,
    DamagedCheckpoint,
    check_room,
    list_checkpoints,
    save_checkpoint,
    set_newer_aside,
    whole_checkpoint,
)
from prime_composer.local.disk import NoRoom

WEIGHTS = "model.safetensors"


class Model:
    """Writes what a model would; ``number`` tells its weights from those of others."""

    def __init__(self, number: int = 0):
        self.number = number

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((3,), float(self.number))}

    def save_pretrained(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / WEIGHTS)
        (folder / "config.json").write_text("{}")


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def save(run_dir: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save_checkpoint(run_dir, step, Model(step), Tokenizer(), {"optimizer": step}, keep)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def steps_of(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run_dir)]


def test_manifest_has_every_files_sha256_and_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash while a file is flushed leaves no manifest, and so no checkpoint.

    The digest of ``{}`` is the one that ``printf {} | sha256sum`` prints.
    """
    seen: list[str] = []
    flush = module._flush
    monkeypatch.setattr(module, "_flush", lambda path: seen.append(path.name) or flush(path))
    save(tmp_path, 3)
    files = {WEIGHTS, "config.json", "tokenizer.json", "trainer.pt"}
    assert seen[-3:] == ["manifest.json", "step_000003.tmp", "checkpoints"]
    assert set(seen[:-3]) == files
    manifest = json.loads((folder_of(tmp_path, 3) / "manifest.json").read_text())
    assert manifest["step"] == 3 and set(manifest["files"]) == files
    assert manifest["files"]["config.json"] == (
        "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "trainer.pt", "manifest.json"])
def test_damaged_file_is_named_with_the_newest_whole_step(
    name: str, damage: str, tmp_path: Path
) -> None:
    save(tmp_path, 1, 2, 3, keep=3)
    DAMAGES[damage](folder_of(tmp_path, 3) / name)
    with pytest.raises(DamagedCheckpoint) as caught:
        whole_checkpoint(tmp_path)
    if (name, damage) != ("manifest.json", "flipped"):  # which of two files is wrong is open then
        assert f"step_000003/{name}" in str(caught.value)
    assert "step 2 is the newest that is whole" in str(caught.value)
    assert "--resume --step 2" in str(caught.value)
    assert whole_checkpoint(tmp_path, 2).step == 2


def flip_weights(run_dir: Path) -> None:
    for step in (1, 2):
        flip(folder_of(run_dir, step) / WEIGHTS)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "every checkpoint damaged": (flip_weights, "no other checkpoint of this run is whole"),
    # Weights of one step in the folder of another have the right size, and are not its own.
    "files of two steps": (
        lambda run_dir: shutil.copy(folder_of(run_dir, 1) / WEIGHTS, folder_of(run_dir, 2)),
        r"model\.safetensors is not what was saved",
    ),
    "renamed": (
        lambda run_dir: folder_of(run_dir, 2).rename(folder_of(run_dir, 99)),
        "that of step 2, not of step 99.*--step 1",
    ),
    **{
        f"manifest {text[:30]}": (
            lambda run_dir, text=text: (folder_of(run_dir, 2) / "manifest.json").write_text(text),
            "step_000002/manifest.json is not a manifest",
        )
        for text in ("[]", '{"step": 3}', '{"step": 3, "files": [1]}', '{"files": 1}', 9999 * "[")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_checkpoint_that_is_not_its_own_is_refused(case: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    change, words = REFUSED[case]
    change(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=words):
        whole_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "stray",
    [
        "adapter_config.json",
        "model-00002-of-00002.safetensors",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_file_that_was_not_saved_is_refused(stray: str, tmp_path: Path) -> None:
    """transformers would read such a file. Moved elsewhere, it is no reason for a new run."""
    save(tmp_path, 1, 2)
    (folder_of(tmp_path, 2) / stray).parent.mkdir(exist_ok=True)
    (folder_of(tmp_path, 2) / stray).write_text("{}")
    with pytest.raises(DamagedCheckpoint, match=f"000002/{stray} was not saved.*move it elsewhere"):
        whole_checkpoint(tmp_path)
    flip(folder_of(tmp_path, 1) / WEIGHTS)
    with pytest.raises(DamagedCheckpoint, match="move it elsewhere.* with --resume --step 2"):
        whole_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("name", ["eval_results.json", "plots/x.safetensors"])
def test_file_that_is_not_loaded_is_ignored(name: str, tmp_path: Path) -> None:
    """People leave notes and results beside the weights."""
    save(tmp_path, 2)
    (folder_of(tmp_path, 2) / name).parent.mkdir(exist_ok=True)
    (folder_of(tmp_path, 2) / name).write_text("x")
    assert whole_checkpoint(tmp_path).step == 2


def test_save_checkpoint_keeps_the_newest_verified_one(tmp_path: Path) -> None:
    """That up to each step that is asked for, whatever ``keep`` is; tidying does the same."""
    save(tmp_path, 1, 2, 3, keep=9)
    shutil.copytree(folder_of(tmp_path, 3), folder_of(tmp_path, 1).with_name("step_000001.tmp"))
    module.tidy(tmp_path, keep=1, kept=[1])  # a killed save left one too many, and half of one
    assert steps_of(tmp_path) == [1, 3] and len(list((tmp_path / "checkpoints").iterdir())) == 2
    module.tidy(tmp_path / "none", keep=1)
    for step in (4, 5):  # a third demand is in nobody's way
        save_checkpoint(tmp_path, step, Model(step), Tokenizer(), {}, 1, kept=[3, 1, 0])
    assert steps_of(tmp_path) == [1, 3, 5]
    save(tmp_path, 10, 100, keep=2)
    assert steps_of(tmp_path) == [10, 100]
    assert list_checkpoints(tmp_path)[-1].load() == {"optimizer": 100, "step": 100}


def test_list_checkpoints_ignores_what_we_do_not_write(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    save(tmp_path, 2)
    for name in ("step_2", "step_0000003", "step_²", "step_000004.aside", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step_000009").write_text("a file")
    assert steps_of(tmp_path) == [2]


def test_newer_checkpoints_are_set_aside_and_replaced(tmp_path: Path) -> None:
    """A run that continues from step 2 does not keep a stray step 99 as its newest."""
    save(tmp_path, 2, 99)
    assert set_newer_aside(tmp_path, 2) == [tmp_path / "checkpoints" / "step_000099.aside"]
    save(tmp_path, 99)
    assert [path.name for path in set_newer_aside(tmp_path, 2)] == ["step_000099.aside-2"]
    assert steps_of(tmp_path) == [2]


def test_save_checkpoint_that_fails_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is missing, and nothing of the new checkpoint takes up room."""
    save(tmp_path, 1)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 2, 7))
    with pytest.raises(CheckpointNotSaved) as caught:
        save(tmp_path, 2)
    assert "the checkpoint of step 2 could not be saved" in str(caught.value)
    assert "(12 bytes needed, 7 bytes free): No space left on device; free some" in str(
        caught.value
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    monkeypatch.undo()
    save(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the kernel refuse larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["model", "trainer"])
def test_save_checkpoint_beyond_a_file_size_limit_says_so(what: str, tmp_path: Path) -> None:
    """safetensors and torch each wrap the kernel's refusal in their own error."""
    save(tmp_path, 1)
    model, big = Model(2), {"w": torch.zeros(10_000)}
    if what == "model":
        model.state_dict = lambda: big  # type: ignore[method-assign]
    with pytest.raises(CheckpointNotSaved) as caught, files_of_at_most(20_000):
        save_checkpoint(tmp_path, 2, model, Tokenizer(), {"optimizer": big}, 2)
    assert "File too large" in str(caught.value) and "ulimit -f" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_leftover_tmp_of_any_kind_is_removed(kind: str, tmp_path: Path) -> None:
    """A link is removed, and not what it points to."""
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    (run_dir / "checkpoints").mkdir(parents=True)
    outside.mkdir()
    (outside / "thesis.txt").write_text("mine")
    leftover = run_dir / "checkpoints" / "step_000001.tmp"
    if kind == "link":
        leftover.symlink_to(outside)
    else:
        leftover.write_text("x")
    save(run_dir, 1)
    assert steps_of(run_dir) == [1] and not leftover.exists()
    assert (outside / "thesis.txt").read_text() == "mine"


def test_leftover_that_cannot_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder, or a file that is open elsewhere on NFS: the save has another name."""
    leftovers = {"step_000002.tmp", "step_000002.tmp-2", "step_000001.tmp"}
    for name in leftovers:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    save(tmp_path, 1, 2, keep=1)
    assert steps_of(tmp_path) == [2]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == leftovers | {"step_000002", "step_000001.tmp-2"}
    monkeypatch.undo()
    save(tmp_path, 3)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step_000002", "step_000003"
    }  # fmt: skip


def test_check_room_counts_the_checkpoints_that_will_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 bytes are free and 40 in steps 1 and 3 each. A run from step 1 sets step 3 aside."""
    for step in (1, 3):
        folder_of(tmp_path, step).mkdir(parents=True)
        (folder_of(tmp_path, step) / "w").write_bytes(bytes(40))
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(999, 1, 250)
    )
    for resumed, size in ((1, 145), (3, 165), (None, 165)):
        check_room(tmp_path, size, 2, resumed)
        with pytest.raises(
            NoRoom, match=rf"need {2 * size + 2} bytes .* room for {2 * size} bytes"
        ):
            check_room(tmp_path, size + 1, 2, resumed)


def test_naming_names_the_file_of_an_open_one() -> None:
    """An error of a write or a flush names no file; one that names its own keeps it."""
    library = SafetensorError("Error while serializing: I/O error: broken (os error 5)")
    both = (OSError(5, "broken"), "mine"), (OSError(5, "broken", "own"), "own")
    for error, named in (*both, (library, "mine")):
        with pytest.raises(OSError) as caught, errors.naming_file(Path("mine")):
            raise error
        assert (caught.value.errno, caught.value.filename) == (5, named)


def test_save_checkpoint_whose_name_is_not_flushed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that says "not saved" never names the step as safe."""
    save(tmp_path, 1)
    flush = module._flush

    def fail(path: Path) -> None:
        if path.name == "checkpoints":
            raise OSError(errno.EIO, "Input/output error", str(path))
        flush(path)

    monkeypatch.setattr(module, "_flush", fail)
    with pytest.raises(CheckpointNotSaved, match="the checkpoint of step 2 could not be saved"):
        save(tmp_path, 2)
    assert steps_of(tmp_path) == [1] and len(list((tmp_path / "checkpoints").iterdir())) == 1
