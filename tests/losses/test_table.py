"""The losses' README: its table is generated, and its code runs."""

import re
import textwrap
from pathlib import Path

import pytest

from docs import losses as table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "prime_composer/losses/README.md"


def blocks() -> list[str]:
    """Return the indented code blocks of the page."""
    found = re.findall(r"(?:^    .*\n|(?:^\n)+(?=    ))+", PAGE.read_text(), flags=re.MULTILINE)
    return [textwrap.dedent(block).strip() + "\n" for block in found]


def test_the_table_of_losses_is_current(capsys):
    """Renew it: python -m docs.losses --write prime_composer/losses/README.md"""
    assert table.main(["--check", str(PAGE)]) == 0, capsys.readouterr().err


def test_a_stale_table_is_noticed_and_renewed(tmp_path, capsys):
    page = tmp_path / "README.md"
    stale = PAGE.read_text().replace("(taid.py) |", "(tide.py) |")
    page.write_text(stale)
    assert stale != PAGE.read_text() and table.main(["--check", str(page)]) == 1
    assert f"--write {page}" in capsys.readouterr().err
    assert table.main(["--write", str(page)]) == 0
    assert page.read_text() == PAGE.read_text()
    page.write_text("no markers")
    with pytest.raises(ValueError, match="needs the lines"):
        table.main(["--check", str(page)])


def test_the_readme_shows_the_example_as_it_is():
    assert (ROOT / "tests/examples/my_loss.py").read_text() in blocks()
