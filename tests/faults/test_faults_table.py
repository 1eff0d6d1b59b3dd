"""The table of faults in README.md of this folder: every row names a test that exists."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def rows() -> list[str]:
    """Return the rows of the tables before "Campaign"."""
    text = (TESTS / "faults" / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^# Faults\n(.*?)^## Campaign", text, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("| fault |")]


@functools.cache
def names_of_tests() -> set[str]:
    """Return the name of every test of the repository."""
    return {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), flags=re.MULTILINE)
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_faults_row_names_a_test_that_exists(row: str) -> None:
    """A row has three cells: fault, what happens, and its tests."""
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    named = re.findall(r"`(test_\w+)`", cells[2])
    assert len(cells) == 3 and all(cells) and named
    assert set(named) <= names_of_tests()


def test_faults_table_is_long_enough_to_be_one() -> None:
    """The rows are found at all."""
    assert len(rows()) > 30
