"""The arrows between the rooms of prime_composer: lower rooms never import higher ones.

Every kind of import counts: at module level, inside a function, under TYPE_CHECKING, and modules
named in a string (importlib, ``__import__``, ``sys.modules``, "module:function").
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "prime_composer"
MATHS = ["contract", "fused", "divergences", "lm_head", "full_vocabulary"]
"""The lowest first. Each may import those before it, and the first one nothing of ours."""

ROOMS = [
    *(
        "losses",
        "recipe",
        "scoring",
        "cross_tokenizer",
        "backends",
        "step",
        "samplers",
        "teachers",
        "tiny_models",
    ),
    *("environments", "local", "cli"),
]
"""The lowest first. Each may import ``MATHS``, the rooms before it, and problems."""

ALLOWED = {
    **{room: {room, "problems", *MATHS, *ROOMS[:i]} for i, room in enumerate(ROOMS)},
    **{module: {module, *MATHS[:i]} for i, module in enumerate(MATHS)},
    "losses": {"losses", *MATHS},
    "problems": {"problems"},
    "scoring": {"scoring", "contract", "lm_head"},
    "cross_tokenizer": {"cross_tokenizer", "contract"},
    "upstream": {
        *("upstream", "problems", "recipe", "losses", "contract", "full_vocabulary", "backends"),
        *("scoring", "cross_tokenizer", "teachers", "step"),
    },
    "trl": {"trl", "problems", *MATHS, *ROOMS[: ROOMS.index("environments")]},
    "__init__": {"losses", *MATHS},
    "__main__": {"cli"},
}
ALLOWED["cli"] |= {"upstream"}
for room_of_tables in ("problems", "losses", *ROOMS, "upstream", "trl"):
    ALLOWED[room_of_tables] |= {"tables", "extras", "removed"}
ALLOWED["tables"] = ALLOWED["extras"] = ALLOWED["removed"] = set()
OF_UPSTREAM = {
    "backends": {
        *("alignment", "answers", "errors", "hf_model", "model_files", "protocols"),
        "transformers",
        "vllm_logprobs",
    },
    "teachers": {
        *("client", "compatibility", "mixture", "own_prompt", "own_tokenizer", "server"),
        *("tokenizer_pair", "watch"),
    },
    "step": {"states"},
}
"""The modules of these rooms that upstream may import."""
NAME_OF_A_MODULE = re.compile(r"prime_composer(\.\w+)+(:\w+)?")
DYNAMIC = {"import_module", "__import__"}
NAMES_A_PARAMETER = {
    "prime_composer.__init__", "prime_composer.cli.commands", "prime_composer.tables",
    "prime_composer.upstream.autoload",
    "prime_composer.upstream.versions.config_fields", "prime_composer.upstream.trainer.adapter",
    "prime_composer.upstream.orchestrator.hooks",
}  # fmt: skip
"""Modules that import what a table, a recipe or prime-rl names; their tables are strings."""
IN_OTHER_PROCESSES = {
    "prime_composer.upstream.keys": "prime_composer.upstream.loss_fn",
    "prime_composer.cli.study": "prime_composer.cli",
    "prime_composer.cli.islands": "prime_composer.cli",
}
"""Module -> a string in it that another process imports: a program, or a name for prime-rl."""


def package_sources() -> dict[str, str]:
    """Return the source of every module by its dotted name; a package is named by its __init__."""
    return {
        ".".join(("prime_composer", *path.relative_to(PACKAGE).with_suffix("").parts)): (
            path.read_text()
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(module_name: str, source: str) -> Iterator[str]:
    """Yield the dotted names that a source imports, ``module.name`` for ``from module import``.

    A name that is computed cannot be followed: it counts as an import of the package itself.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, "a relative import"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if NAME_OF_A_MODULE.fullmatch(text):
                if text != IN_OTHER_PROCESSES.get(module_name):
                    yield text.partition(":")[0]
            case ast.Call(func=function, args=[argument, *_]) if called(function) in DYNAMIC:
                constant = isinstance(argument, ast.Constant)
                if constant and argument.value == "prime_composer":
                    yield "prime_composer"
                elif not constant and module_name not in NAMES_A_PARAMETER:
                    yield "prime_composer"


def called(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return, for every module, the modules of ours that it imports."""
    edges = {}
    for module, source in sources.items():
        targets = set()
        for name in imports(module, source):
            if name.split(".")[0] != "prime_composer":
                continue
            parent = name.rpartition(".")[0]
            candidates = (name, f"{name}.__init__", parent, f"{parent}.__init__")
            targets.add(next((c for c in candidates if c in sources), name))
        edges[module] = targets - {module}
    return edges


def room(module: str) -> str:
    return module.split(".")[1]


def violations(sources: dict[str, str]) -> list[str]:
    """Return every import that the arrows forbid, and every circle."""
    edges, wrong = graph(sources), []
    for module, targets in edges.items():
        for target in sorted(targets):
            own_init = f"{module.rpartition('.')[0]}.__init__"
            inside = module.count(".") > 1
            if target in ("prime_composer", "prime_composer.__init__"):
                wrong.append(f"{module} imports the package itself")
            elif inside and target == own_init:
                wrong.append(f"{module} imports its own room's __init__")
            elif room(target) not in ALLOWED.get(room(module), set()):
                wrong.append(f"{module} imports {target}")
            elif room(module) == "upstream" and room(target) in OF_UPSTREAM:
                if target.split(".")[2] not in OF_UPSTREAM[room(target)]:
                    wrong.append(f"{module} imports {target}")
    return wrong + [f"a circle: {circle}" for circle in circles(edges)]


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the shortest circle through each module that imports itself over others, once."""
    found = {}
    for start in sorted(edges):
        paths, queue = {start: [start]}, [start]
        for module in queue:
            for target in sorted(edges.get(module, ())):
                if target == start:
                    found.setdefault(frozenset(paths[module]), " -> ".join([*paths[module], start]))
                elif target not in paths:
                    paths[target] = [*paths[module], target]
                    queue.append(target)
    return sorted(found.values())


def test_arrows_point_down_and_nothing_is_circular():
    wrong = violations(package_sources())
    assert not wrong, "\n".join(wrong)


def test_no_backend_is_told_from_the_others_by_its_name():
    """What a backend is like is in the registry (``recipe.backends``), where an outside one is."""
    compared = re.compile(
        r"\bbackends?\b (==|!=|not in |in [({[])|[\"'](vllm|server)[\"'] in \w*backend"
    )
    found = [name for name, source in package_sources().items() if compared.search(source)]
    assert found == []


def test_every_name_of_the_package_is_on_its_map():
    names = {path.stem for path in PACKAGE.iterdir()} - {"__pycache__", "py", "__init__"}
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or ""
    on_the_map = [line for line in docstring.splitlines() if line.startswith(("- ", "  "))]
    assert names == {name for line in on_the_map for name in re.findall(r"``(\w+)``", line)} - {
        "prime"
    }


LOSS = "prime_composer.losses.a"
PLANTED = {
    "maths of heads from the contract": (
        {"prime_composer.contract": "from prime_composer.full_vocabulary.heads import check"},
        "prime_composer.contract imports prime_composer.full_vocabulary",
    ),
    "a higher room": ({LOSS: "from prime_composer.recipe.b import x"}, "imports"),
    "a lazy import": ({LOSS: "def f():\n    import prime_composer.cli.b"}, "imports"),
    "sys.modules": ({LOSS: "import sys\nsys.modules.get('prime_composer.upstream.b')"}, "imports"),
    "a bare importlib": (
        {LOSS: "importlib.import_module('prime_composer').x"}, "the package itself"
    ),
    "a computed name": ({LOSS: "import_module(f'prime_composer.{x}')"}, "the package itself"),
    "the package": ({LOSS: "from prime_composer import LossInputs"}, "the package itself"),
    "its own __init__": (
        {LOSS: "from prime_composer.losses import x", "prime_composer.losses.__init__": "x = 1"},
        "its own room's __init__",
    ),
    "a circle within a room": (
        {
            LOSS: "from prime_composer.losses.b import x",
            "prime_composer.losses.b": "def f():\n    from prime_composer.losses.a import y",
        },
        "a circle: prime_composer.losses.a -> prime_composer.losses.b -> prime_composer.losses.a",
    ),
    "vLLM from upstream": (
        {"prime_composer.upstream.a": "from prime_composer.backends.vllm import x"}, "imports"
    ),
}  # fmt: skip


@pytest.mark.parametrize("violation", PLANTED)
def test_a_planted_violation_is_found(violation):
    planted, message = PLANTED[violation]
    found = violations({"prime_composer.__init__": "", **planted})
    assert len(found) >= 1 and message in found[0]


def test_arrows_that_are_allowed_are_not_reported():
    sources = {
        "prime_composer.losses.a": "from prime_composer.contract import LossInputs",
        "prime_composer.contract": "import torch",
        "prime_composer.cli.a": "from prime_composer.upstream.b import c",
        "prime_composer.upstream.b": "from prime_composer.teachers.mixture import mix",
        "prime_composer.teachers.mixture": "from prime_composer.recipe.routing import Routing",
        "prime_composer.recipe.routing": "import collections",
    }
    assert violations(sources) == []
