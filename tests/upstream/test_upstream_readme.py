"""Check that the README of the prime-rl room quotes messages and commands that exist."""

import ast
import functools
import re

import pytest

from prime_composer.upstream.versions.records import VERSIONS
from tests.prime_rl_checkout import REPO

ROOM = REPO / "prime_composer" / "upstream"
README = (ROOM / "README.md").read_text()


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


def section(title):
    """Return the text of one section of the README."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def fragments():
    """Return the message fragments of the troubleshooting table."""
    rows = [line for line in section("Troubleshooting").splitlines() if line.startswith("| `")]
    return [text for row in rows for text in re.findall(r"`([^`]*)`", row.split(" | ")[0])]


@pytest.mark.parametrize("fragment", fragments())
def test_readme_message_exists_in_the_code(fragment):
    """``require`` puts the name of the input in: "needs support, which"."""
    message = re.sub(r"^needs \w+, which", "needs {}, which", fragment)
    assert any(message in text for text in literals())


def test_readme_has_a_troubleshooting_table():
    assert len(fragments()) >= 20


def test_readme_compatibility_has_a_column_per_version():
    header = section("Compatibility").strip().splitlines()[0]
    columns = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert [column.split()[0] for column in columns] == list(VERSIONS)
    by_name = dict(zip(VERSIONS, columns, strict=True))
    assert VERSIONS["head"].commit[:8] in by_name["head"]
    read = [name for name, column in by_name.items() if column.endswith("(read)")]
    assert read == [name for name, version in VERSIONS.items() if version.commit is None]


def test_readme_compatibility_claims_no_run_of_what_was_read():
    """The columns of versions that nobody has run say "as read", never "run"."""
    rows = section("Compatibility").strip().splitlines()[2:]
    table = [row.strip("|").split(" | ") for row in rows if row.startswith("|")]
    assert len(table) >= 15 and all(len(row) == len(VERSIONS) + 1 for row in table)
    unrun = [i for i, version in enumerate(VERSIONS.values(), 1) if version.commit is None]
    assert not [row for row in table for i in unrun if re.search(r"\brun\b", row[i])]


def test_readme_paths_exist():
    paths = re.findall(r"`?((?:tests|recipes)/[\w/.]+\.(?:py|toml))\b", README)
    assert paths
    for path in paths:
        assert (REPO / path).exists(), path
