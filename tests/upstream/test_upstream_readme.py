"""Check that the README of the prime-rl room quotes messages and commands that exist."""

import ast
import functools
import re

import pytest

from prime_composer.upstream.versions.records import VERSIONS
from tests.prime_rl_checkout import REPO

ROOM = REPO / "prime_composer" / "upstream"
README = (ROOM / "README.md").read_text()
TROUBLES = (ROOM / "troubleshooting.md").read_text()


@functools.cache
def literals():
    """Return all string literals of the package, placeholders of f-strings as ``{}``."""
    texts = []
    for path in sorted((REPO / "prime_composer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
                ]
                texts.append("".join(parts))
    return texts


def rows(text):
    """Return the cells of a Markdown table's rows, its header among them."""
    found = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]


def fragments():
    """Return the message fragments of the troubleshooting tables."""
    tables = [*rows(TROUBLES)[2:], *rows(README.partition("\n## Troubleshooting\n")[2])[2:]]
    return [text for row in tables for text in re.findall(r"`([^`]*)`", row[0])]


@pytest.mark.parametrize("fragment", fragments())
def test_readme_message_exists_in_the_code(fragment):
    """``require`` puts the name of the input in: "needs support, which"."""
    message = re.sub(r"^needs \w+, which", "needs {}, which", fragment)
    assert any(message in text for text in literals())


def test_readme_has_a_troubleshooting_table():
    assert len(fragments()) >= 50


def test_versions_that_differ_have_a_column_each():
    """A version is named by its release or commit; those that nobody has run never say "ran"."""
    table = rows(README.partition("Three things differ:")[2].partition("Nowhere:")[0])
    commits = {name: (version.commit or name)[:8] for name, version in VERSIONS.items()}
    assert table[0][1:] == [commits["head"], *(name for name in VERSIONS if name != "head")]
    assert len(table) == 2 + 3
    assert not [cell for row in table[2:] for cell in row[2:] if re.search(r"\b(run|ran)\b", cell)]


def test_readme_paths_exist():
    paths = re.findall(r"`?((?:tests|recipes)/[\w/.]+\.(?:py|toml))\b", README)
    assert paths
    for path in paths:
        assert (REPO / path).exists(), path
