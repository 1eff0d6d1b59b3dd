"""Measure the house: lines per room, and what does not grow with features.

    python -m tests.measures

``test_measures.py`` asserts the second part. Line totals are printed and never asserted.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "prime_composer"
NESTS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Function:
    """A function and its size.

    Attributes:
        name: module and qualified name.
        body: lines from the first statement after the docstring to the last.
        nesting: deepest block, 0 for none. An ``elif`` is no deeper than its ``if``.
        takes_recipe: whether a parameter is annotated as ``Recipe``.
    """

    name: str
    body: int
    nesting: int
    takes_recipe: bool


def sources() -> Iterator[Path]:
    """Yield the files of the package."""
    return iter(sorted(PACKAGE.rglob("*.py")))


def functions() -> list[Function]:
    """Return every function of the package, nested ones too."""
    found = []
    for path in sources():
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_measured(module, node))
    return found


def _measured(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    takes_recipe = any(
        one.annotation is not None and ast.unparse(one.annotation) == "Recipe" for one in arguments
    )
    return Function(f"{module}.{node.name}", lines, max(map(_depth, body), default=0), takes_recipe)


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


def file_lines() -> dict[str, int]:
    """Return the lines of every file."""
    return {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in sources()}


def modules_per_folder() -> Counter[str]:
    """Return the modules of every folder, without ``__init__`` and ``__main__``."""
    return Counter(
        str(path.parent.relative_to(PACKAGE))
        for path in sources()
        if not path.name.startswith("__")
    )


def comparisons_of_backends() -> list[str]:
    """Return the places outside the registry that compare a backend with a name."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        if path.parent.name != "samplers" or path.name != "registry.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left).rpartition(".")[2] == "backend"
        and any(isinstance(part, ast.Constant) and part.value for part in node.comparators)
    ]


def containers_of_scores() -> list[str]:
    """Return the classes with a field for a teacher's log-probs of a support."""
    return [
        f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}.{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "teacher_logprobs"
            for part in node.body
        )
    ]


def code_lines(path: Path) -> int:
    """Return the lines that hold more than a comment, a docstring or nothing."""
    text = path.read_text()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def main() -> None:
    """Print the tables."""
    rooms: dict[str, list[int]] = {}
    for path in sources():
        room = path.relative_to(PACKAGE).parts[0]
        totals = rooms.setdefault(room.removesuffix(".py"), [0, 0, 0])
        for place, count in enumerate((1, path.read_text().count("\n"), code_lines(path))):
            totals[place] += count
    print(f"{'room':<18}{'files':>6}{'lines':>8}{'code':>8}")
    for room, totals in sorted(rooms.items(), key=lambda item: -item[1][1]):
        print(f"{room:<18}{totals[0]:>6}{totals[1]:>8}{totals[2]:>8}")
    everything = [sum(column) for column in zip(*rooms.values(), strict=True)]
    print(f"{'all':<18}{everything[0]:>6}{everything[1]:>8}{everything[2]:>8}")
    print()
    long = sorted(file_lines().items(), key=lambda item: -item[1])
    found = functions()
    print("files over 500 lines:", [f"{name} {count}" for name, count in long if count > 500])
    print("modules in one folder:", modules_per_folder().most_common(4))
    print("longest bodies:", [(f.name, f.body) for f in sorted(found, key=lambda f: -f.body)[:6]])
    print("deepest:", [(f.name, f.nesting) for f in sorted(found, key=lambda f: -f.nesting)[:6]])
    print("containers of a teacher's scores:", containers_of_scores())
    print("backends compared with a name:", comparisons_of_backends())
    print("functions that take a Recipe:", sum(f.takes_recipe for f in found))


if __name__ == "__main__":
    main()
