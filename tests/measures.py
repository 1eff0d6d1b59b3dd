"""Measure the house: lines per room, and what does not grow with features.

    python -m tests.measures [--lower]

``test_measures.py`` asserts both: lines and words against ``budgets.toml``. ``--lower`` writes what
is measured there where that is less. Nothing raises a budget but an editor, in a commit that says
what the lines bought.
"""

import argparse
import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "prime_composer"
BUDGETS = PROJECT / "tests" / "budgets.toml"
GENERATED = ("recipes/reference", "recipes/metrics", "recipes/architectures", "tests/mutation")
NESTS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Function:
    """A function and its size."""

    name: str  # module and qualified name
    body: int  # lines from the first statement after the docstring to the last
    nesting: int  # deepest block, 0 for none. An ``elif`` is no deeper than its ``if``


def sources() -> Iterator[Path]:
    """Yield the files of the package."""
    return iter(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(path.read_text())


def functions() -> list[Function]:
    """Return every function of the package, nested ones too."""
    found = []
    for path in sources():
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_measured(module, node))
    return found


def _measured(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
    return Function(f"{module}.{node.name}", lines, max(map(_depth, body), default=0))


def _depth(node: ast.AST) -> int:
    """Return how deep blocks nest in a statement, without functions that it defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return 0
    if isinstance(node, ast.If):
        inside = max(map(_depth, node.body), default=0)
        other = node.orelse
        chained = len(other) == 1 and isinstance(other[0], ast.If)
        behind = max(map(_depth, other), default=0)
        return max(1 + inside, behind if chained else 1 + behind)
    deepest = max(map(_depth, ast.iter_child_nodes(node)), default=0)
    return deepest + isinstance(node, NESTS)


def totals() -> dict[str, Counter[str]]:
    """Return lines and code of the package by room, lines of the tests, words of the documents."""
    found: dict[str, Counter[str]] = {name: Counter() for name in ("lines", "code", "outside")}
    for path in sources():
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "top_level"
        found["lines"].update({key: path.read_text().count("\n") for key in (room, "package")})
        found["code"].update({key: code_lines(path) for key in (room, "package")})
    for path in sorted(PROJECT.rglob("*.py")):
        if path.relative_to(PROJECT).parts[0] == "tests":
            found["outside"]["test_lines"] += path.read_text().count("\n")
    found["outside"]["words_of_documents"] = sum(words_of_documents().values())
    return found


def words_of_documents() -> dict[str, int]:
    """Return the words of each page, without pages and tables that a command writes."""
    found = {}
    for path in sorted(PROJECT.rglob("*.md")):
        name = path.relative_to(PROJECT).as_posix()
        if not name.startswith((".", "outputs", *GENERATED)):
            text = re.sub(r"(?s)<!-- (\w+): begin.*?<!-- \1: end -->", "", path.read_text())
            found[name] = len(text.split())
    return found


def budgets() -> dict[str, dict[str, int]]:
    """Return what ``totals`` may be at most."""
    return tomllib.loads(BUDGETS.read_text())


def lower() -> None:
    """Write what is measured as the budget, where it is less, and drop rooms that are gone."""
    known, blocks = budgets(), []
    for table, counts in totals().items():
        items = {key: min(count, known[table].get(key, 0)) for key, count in counts.items()}
        blocks.append("\n".join([f"[{table}]", *(f"{k} = {v}" for k, v in sorted(items.items()))]))
    BUDGETS.write_text("\n\n".join(blocks) + "\n")


def code_lines(path: Path) -> int:
    """Return the lines that hold more than a comment, a docstring or nothing."""
    text = path.read_text().splitlines()
    lines = {at for at, line in enumerate(text, 1) if line.strip() and line.lstrip()[0] != "#"}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lower", action="store_true", help="lower the budgets to what there is")
    if parser.parse_args().lower:
        lower()
    found, allowed = totals(), budgets()
    for table, counts in found.items():
        print(f"{table:<22}{'now':>8}{'budget':>8}")
        for key, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"  {key:<20}{count:>8}{allowed[table].get(key, 0):>8}")
    print("words:", sorted(words_of_documents().items(), key=lambda item: -item[1]))
    each = functions()
    print("longest bodies:", [(f.name, f.body) for f in sorted(each, key=lambda f: -f.body)[:6]])
    print("deepest:", [(f.name, f.nesting) for f in sorted(each, key=lambda f: -f.nesting)[:6]])


if __name__ == "__main__":
    main()
