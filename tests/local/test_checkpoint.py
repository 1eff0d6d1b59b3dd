"""Checkpoints are complete or absent, and the newest few are kept."""

from pathlib import Path
from typing import Any

import pytest

from prime_composer.local import checkpoint as module
from prime_composer.local.checkpoint import (
    CheckpointNotSaved,
    list_checkpoints,
    save_checkpoint,
)


class Model:
    """Writes what a model and a tokenizer would."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "weights").write_text("w")


def test_save_checkpoint_keeps_the_newest_few(tmp_path: Path) -> None:
    for step in (2, 10, 100):
        save_checkpoint(tmp_path, step, Model(), Model(), {"optimizer": step}, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [10, 100]
    assert list_checkpoints(tmp_path)[-1].load() == {"optimizer": 100, "step": 100}


def test_save_checkpoint_that_fails_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, Model(), Model(), {}, keep=2)

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(CheckpointNotSaved, match="No space left"):
        save_checkpoint(tmp_path, 2, Model(), Model(), {}, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, Model(), Model(), {}, keep=2)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_000001",
        "step_000002",
    ]


def test_half_deleted_checkpoint_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, Model(), Model(), {}, keep=1)
    monkeypatch.setattr(
        module.shutil, "rmtree", lambda path: None
    )  # the process dies before the files are gone
    save_checkpoint(tmp_path, 2, Model(), Model(), {}, keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2]


def test_list_checkpoints_of_a_new_run_is_empty(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
