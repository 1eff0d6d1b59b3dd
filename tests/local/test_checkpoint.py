"""Checkpoints: whole or absent, the newest few kept."""

from pathlib import Path
from typing import Any

import pytest

from prime_composer.local import checkpoint as module
from prime_composer.local.checkpoint import list_checkpoints, save_checkpoint


class Model:
    """Writes what a model and a tokenizer would."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "weights").write_text("w")


def plain(function: Any) -> Any:
    """The function below the shape checks that the tests put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def test_the_newest_few_are_kept_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (2, 10, 100):
        plain(save_checkpoint)(tmp_path, step, Model(), Model(), {"optimizer": step}, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [10, 100]
    assert list_checkpoints(tmp_path)[-1].load() == {"optimizer": 100, "step": 100}


def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(save_checkpoint)(tmp_path, 1, Model(), Model(), {}, keep=2)

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        plain(save_checkpoint)(tmp_path, 2, Model(), Model(), {}, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]
    monkeypatch.undo()
    plain(save_checkpoint)(tmp_path, 2, Model(), Model(), {}, keep=2)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_000001",
        "step_000002",
    ]


def test_what_is_half_deleted_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(save_checkpoint)(tmp_path, 1, Model(), Model(), {}, keep=1)
    monkeypatch.setattr(
        module.shutil, "rmtree", lambda path: None
    )  # the process dies before the files are gone
    plain(save_checkpoint)(tmp_path, 2, Model(), Model(), {}, keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2]


def test_a_run_without_checkpoints_lists_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
