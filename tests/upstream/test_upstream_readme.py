"""Check that the README of the prime-rl room quotes messages and commands that exist."""

import ast
import re

import pytest

from prime_composer.upstream.versions import VERSIONS
from tests.prime_rl_checkout import REPO

ROOM = REPO / "prime_composer" / "upstream"
README = (ROOM / "README.md").read_text()


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


LITERALS = literals()


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
    assert any(message in text for text in LITERALS)


def test_readme_has_a_troubleshooting_table():
    assert len(fragments()) >= 20


def test_readme_compatibility_has_a_column_per_version():
    header = section("Compatibility").strip().splitlines()[0]
    columns = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert [column.split()[0] for column in columns] == list(VERSIONS)
    assert VERSIONS["head"].commit[:8] in columns[-1]


def test_readme_paths_exist():
    paths = re.findall(r"`?((?:tests|recipes)/[\w/.]+\.(?:py|toml))\b", README)
    assert paths
    for path in paths:
        assert (REPO / path).exists(), path
