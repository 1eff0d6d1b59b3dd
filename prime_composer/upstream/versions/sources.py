"""prime-rl's sources, read with ``ast``: nothing of prime-rl is imported.

prime_rl is one namespace package over several folders, those of ``src`` and of its config package.
"""

import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from prime_composer.upstream.versions.capabilities import Signature

PACKAGE = "prime_rl"
Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_FIELD = re.compile(r"(typing\.)?ClassVar\b|(dataclasses\.)?KW_ONLY$")


def installed() -> list[Path]:
    """Return the folders of the importable ``prime_rl``, nothing where there is none."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # a module without a spec stands for it
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def of_checkout(folder: Path) -> list[Path]:
    """Return the folders of ``prime_rl`` in a checkout, or in a folder that is one of them."""
    folder = folder.resolve()
    if folder.name in ("src", PACKAGE):  # a part of a checkout, whose configs are elsewhere in it
        whole = folder.parent if folder.name == "src" else folder.parent.parent
        folder = whole if any(whole.glob(f"packages/*/src/{PACKAGE}")) else folder
    found = [
        path
        for pattern in (PACKAGE, f"src/{PACKAGE}", f"packages/*/src/{PACKAGE}")
        for path in sorted(folder.glob(pattern))
        if path.is_dir()
    ]
    if not found:
        raise ValueError(f"--source {folder}: there is no src/{PACKAGE}, nor {PACKAGE}")
    return found


def source_texts(folders: Iterable[Path], below: str = "") -> dict[str, str]:
    """Return the text of each source file, or of those ``below``, by path from ``prime_rl`` on."""
    return {
        f"{PACKAGE}/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for folder in folders
        for path in (folder / below).rglob("*.py")
    }


class SourceTree:
    """Signatures of functions and classes, from texts by path (``prime_rl/trainer/model.py``)."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def signature(self, module: str, attribute: str) -> Signature | None:
        """Return a function's parameters without ``self``, or a class's fields.

        A name that comes from another package exists, and has a signature that is not known.
        """
        name, _, method = attribute.partition(".")
        found = self._definition(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.ClassDef):
            if not method:
                return {name: needed for name, (needed, _) in self._fields(where, node).items()}
            for owner in self._and_bases(where, node):
                for member in reversed(list(_flat(owner.body))):
                    if isinstance(member, Function) and member.name == method:
                        return _parameters(member, bound=True)
            return None
        return _parameters(node) if isinstance(node, Function) else {}

    def annotations(self, module: str, name: str) -> dict[str, str]:
        """Return the types of a class's fields as they are written; nothing where it is gone."""
        found = self._definition(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        return {field: text for field, (_, text) in self._fields(found[0], found[1]).items()}

    def is_used(self, attribute: str) -> bool:
        """Return whether any file reads a name, or an attribute of this name."""
        name = attribute.rpartition(".")[2]
        return any(name in text and name in _names(text) for text in self._texts.values())

    def _module(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        text = self._texts.get(f"{path}.py", self._texts.get(f"{path}/__init__.py"))
        return None if text is None else _parsed(text)

    def _definition(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return the statement that defines a name, and its module, by way of imports."""
        tree = self._module(module)
        for node in reversed(list(_flat(tree.body)) if tree else []):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._imported_from(module, node)
                        return self._definition(source, alias.name) or (source, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                if isinstance(node.value, ast.Name) and node.value.id != name:
                    return self._definition(module, node.value.id) or (module, node)
                return module, node
        return None

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = module.split(".")
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._texts
        parent = path[: len(path) - node.level + is_package]
        return ".".join([*parent, *filter(None, [node.module])])

    def _and_bases(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yield a class and those bases of it that are prime-rl's."""
        yield node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._definition(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not node:
                yield from self._and_bases(found[0], found[1])

    def _fields(self, module: str, node: ast.ClassDef) -> dict[str, tuple[bool, str]]:
        """Return whether each field has to be given, and its type as it is written."""
        fields: dict[str, tuple[bool, str]] = {}
        for owner in reversed(list(self._and_bases(module, node))):
            for member in owner.body:
                if not isinstance(member, ast.AnnAssign) or not isinstance(member.target, ast.Name):
                    continue
                annotation = ast.unparse(member.annotation)
                if not NO_FIELD.match(annotation):
                    fields[member.target.id] = not _has_default(member.value), annotation
        return fields


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, with those under ``try`` and ``if``.

    The last one that defines a name counts, so that a fallback stands before what it replaces.
    """
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _flat([*node.orelse, *node.body])
        elif isinstance(node, ast.Try):
            fallbacks = (statement for handler in node.handlers for statement in handler.body)
            yield from _flat([*fallbacks, *node.body, *node.orelse, *node.finalbody])
        else:
            yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(node: Function, bound: bool = False) -> Signature:
    args = node.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    defaults = len(args.defaults)
    required = positional[: len(positional) - defaults]
    signature = {name: name in required for name in positional}
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        signature[arg.arg] = default is None
    for star in filter(None, (args.vararg, args.kwarg)):
        signature[star.arg] = False
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    if bound and not static and positional:
        del signature[positional[0]]
    return signature


def _has_default(value: ast.expr | None) -> bool:
    """Return whether a field may be left out: dataclass, msgspec.Struct, pydantic."""
    if not isinstance(value, ast.Call):
        return value is not None
    function = ast.unparse(value.func).rpartition(".")[2]
    if function not in ("field", "Field"):
        return True
    named = {keyword.arg: keyword.value for keyword in value.keywords}
    if "init" in named and ast.unparse(named["init"]) == "False":
        return True
    return bool({"default", "default_factory"} & set(named)) or (
        bool(value.args) and ast.unparse(value.args[0]) not in ("...", "Ellipsis")
    )


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.Module:
    """Parse a file. What Python warns of in it is not ours to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except SyntaxError as error:
            raise ValueError(
                f"Python {sys.version_info.major}.{sys.version_info.minor} cannot read prime-rl's "
                f"line {error.text!r}: start the command with prime-rl's own interpreter"
            ) from error


@lru_cache(maxsize=4096)
def _names(text: str) -> frozenset[str]:
    """Return the names and attributes that a file reads, and what it imports by another name."""
    found = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            found.add(node.name)
    return frozenset(found)
