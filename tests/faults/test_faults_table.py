"""The table of faults in README.md of this folder: every row names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def rows() -> list[str]:
    """Return the rows of the tables before "Campaign"."""
    text = (TESTS / "faults" / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^# Faults\n(.*?)^## Campaign", text, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("| fault |")]


def test_faults_row_names_a_test_that_exists() -> None:
    """A row has three cells: fault, what happens, and its tests."""
    tests = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), flags=re.MULTILINE)
    }
    assert len(rows()) > 30
    for row in rows():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        named = re.findall(r"`(test_\w+)`", cells[2])
        assert len(cells) == 3 and all(cells) and named, row
        assert set(named) <= tests, row
