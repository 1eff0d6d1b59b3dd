"""Fixtures of the command line's tests."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import main
from tests.command import toml

Raw = Callable[..., dict[str, Any]]
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tiny_file(tiny_recipe: Raw, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(toml(tiny_recipe()))
    return path


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line within this process, in ``tmp_path``, which saves seconds for each."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, printed.out, printed.err)

    return call
