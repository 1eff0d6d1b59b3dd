"""Find code by its structure and replace it: the machinery of the mutants.

A pattern is Python source. A name that begins with an underscore and a capital letter (``_X``)
matches any expression, the same one wherever the name occurs again. Formatting, comments and
docstrings do not matter.
"""

import ast
import copy
import re
from dataclasses import dataclass

METAVARIABLE = re.compile(r"_[A-Z]\w*")


@dataclass(frozen=True)
class Edit:
    """One replacement in one function."""

    find: str  # pattern of an expression or of one statement
    replace: str  # what is written there instead, with the same metavariables


def parse(pattern: str) -> ast.AST:
    """Return an expression where the pattern is one, else its only statement."""
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern: object, node: object, bound: dict[str, ast.AST]) -> bool:
    """Return whether a node has the pattern's structure. ``bound`` receives the metavariables."""
    if isinstance(pattern, ast.Name) and METAVARIABLE.fullmatch(pattern.id):
        if not isinstance(node, ast.expr):
            return False
        previous = bound.setdefault(pattern.id, node)
        return ast.dump(previous) == ast.dump(node)
    if isinstance(pattern, ast.expr_context):
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        return all(
            matches(getattr(pattern, field), getattr(node, field), bound)
            for field in pattern._fields
        )
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(
            matches(p, n, bound) for p, n in zip(pattern, node, strict=True)
        )
    return pattern == node


class _Fill(ast.NodeTransformer):
    def __init__(self, bound: dict[str, ast.AST]):
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.bound[node.id]) if node.id in self.bound else node


class _Replace(ast.NodeTransformer):
    """Replace every node that matches one of the edits, and count the places of each edit."""

    def __init__(self, edits: tuple[Edit, ...]):
        self.edits = [(parse(edit.find), edit.replace) for edit in edits]
        self.places = [0] * len(edits)

    def visit(self, node: ast.AST) -> ast.AST:
        for i, (pattern, replacement) in enumerate(self.edits):
            bound: dict[str, ast.AST] = {}
            if matches(pattern, node, bound):
                self.places[i] += 1
                return _Fill(bound).visit(parse(replacement))
        return self.generic_visit(node)


def function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return a function by its qualified name, ``Class.method`` for a method."""
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == part
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} definitions of {part} in {name}, not one.")
        body = found[0].body
    assert not isinstance(found[0], ast.ClassDef), f"{name} is not a function"
    return found[0]


def mutated(source: str, name: str, edits: tuple[Edit, ...]) -> str:
    """Return the source with the edits in one function, as ``ast.unparse`` writes it."""
    tree = ast.parse(source)
    target = function(tree, name)
    before = ast.dump(target)
    replace = _Replace(edits)
    replace.generic_visit(target)
    for edit, places in zip(edits, replace.places, strict=True):
        if places != 1:
            raise LookupError(f"{edit.find!r} matches {places} places of {name}, not one.")
    if ast.dump(target) == before:
        raise ValueError(f"{edits} leave {name} as it is.")
    return ast.unparse(ast.fix_missing_locations(tree))
