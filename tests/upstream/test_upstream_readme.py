"""Check that the pages of the prime-rl room quote messages that exist."""

import ast
import re

from tests.prime_rl_checkout import REPO

ROOM = REPO / "prime_composer" / "upstream"
README = (ROOM / "README.md").read_text()
TROUBLES = (ROOM / "troubleshooting.md").read_text()


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


def test_readme_messages_exist_in_the_code():
    """``require`` puts the name of the input in: "needs support, which"."""
    messages = [re.sub(r"^needs \w+, which", "needs {}, which", one) for one in fragments()]
    assert len(messages) >= 50
    texts = literals()
    assert [one for one in messages if not any(one in text for text in texts)] == []
