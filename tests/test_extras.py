"""The pip line of an optional part works where the package came from: checkout, folder, index."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_composer import extras
from tests.fork_server import REPO


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the package's sources, which a shell has to quote."""
    folder = tmp_path / "a copy"
    folder.mkdir()
    shutil.copy(REPO / "pyproject.toml", folder)
    return folder


def test_line_of_a_checkout_is_that_of_an_editable_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the checkout's folder as the documents have it, elsewhere with the folder."""
    monkeypatch.setattr(extras, "PACKAGE", folder / "prime_composer")
    monkeypatch.chdir(folder)
    assert extras.pip_install("local") == "pip install -e '.[local]'"
    monkeypatch.chdir(tmp_path)
    assert extras.pip_install("local") == f"pip install -e '{folder}[local]'"


@pytest.mark.parametrize("note", ['{{"url": "{url}", "dir_info": {{}}}}', None, '{{"vcs": 1}}'])
def test_line_of_an_installed_copy_names_where_it_came_from(
    note: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder, by pip's note (PEP 610), or the project of an index.

    What no index has would not be found by its name; a folder that is gone would not either.
    """
    written = note and note.format(url=folder.as_uri())
    distribution = SimpleNamespace(read_text={"direct_url.json": written}.get)
    monkeypatch.setattr(extras.metadata, "distribution", {extras.NAME: distribution}.get)
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "site" / "prime_composer")
    named = f"'{folder}[local]'" if note and "url" in note else "'prime-composer[local]'"
    assert extras.pip_install("local") == f"pip install {named}"
    shutil.rmtree(folder)
    assert extras.pip_install("local") == "pip install 'prime-composer[local]'"


def test_requirement_is_the_same_in_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
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
