"""The pip line of an optional part works where the package came from: checkout, folder, index."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prime_composer import extras
from tests.fork_server import REPO

ASK = "from prime_composer.extras import pip_install; print(pip_install('local'))"
NAMED = ("pyproject.toml", "README.md", "LICENSE", "prime_composer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package's sources, in a folder that a shell has to quote."""
    folder = tmp_path / "a copy"
    folder.mkdir()
    for name in NAMED:
        path = REPO / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / name)
    return folder


def asked_in(cwd: Path, imported_from: Path) -> str:
    """Return the pip line that a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(imported_from), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "-q", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_line_of_a_checkout_is_that_of_an_editable_install(folder: Path, tmp_path: Path) -> None:
    """In the checkout's folder as the documents have it, elsewhere with the folder."""
    assert asked_in(folder, imported_from=folder) == "pip install -e '.[local]'"
    assert asked_in(tmp_path, imported_from=folder) == f"pip install -e '{folder}[local]'"


def test_line_of_an_installed_folder_names_the_folder(folder: Path, tmp_path: Path) -> None:
    """What no index has would not be found by its name; a folder that is gone would not either."""
    installed = tmp_path / "site"
    pip("install", "--no-deps", "--no-build-isolation", "--target", installed, folder)
    assert asked_in(tmp_path, imported_from=installed) == f"pip install '{folder}[local]'"
    shutil.rmtree(folder)
    assert asked_in(tmp_path, imported_from=installed) == "pip install 'prime-composer[local]'"


def test_line_of_a_wheel_from_an_index_names_the_project(folder: Path, tmp_path: Path) -> None:
    wheels, installed = tmp_path / "wheels", tmp_path / "site"
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, folder)
    index = ("--no-index", "--find-links", wheels)
    pip("install", "--no-deps", *index, "--target", installed, "prime-composer")
    assert asked_in(tmp_path, imported_from=installed) == "pip install 'prime-composer[local]'"


def test_requirement_is_the_same_in_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes into files and messages that are read elsewhere."""
    monkeypatch.chdir(REPO)
    assert extras.requirement("engine") == f"-e '{REPO}[engine]'"
    assert extras.requirement().startswith("-e ") and "[" not in extras.requirement()


def test_no_message_names_an_extra_of_the_index() -> None:
    """Every module takes the line from ``extras``."""
    found = [
        path.name
        for path in (REPO / "prime_composer").rglob("*.py")
        if "prime-composer[" in path.read_text()
    ]
    assert found == []
