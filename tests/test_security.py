"""SECURITY.md: what it says of the package's sources, and that the files it names exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prime_composer"
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a module with the name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def dangers(source: str) -> list[str]:
    """Return what a module does with data that could run code."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        names = [alias.name for alias in getattr(node, "names", [])]
        names.append(getattr(node, "module", None) or "")
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += sorted({"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(names))
    for name, call in calls(tree):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("eval", "exec", "os.system", "os.popen", "yaml.load", "numpy.load", "np.load"):
            found.append(name)
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(name)
        if "trust_remote_code" in keywords or keywords.get("shell") == "True":
            found.append(f"{name}({', '.join(keywords)})")
    return found


def test_package_runs_no_code_from_data() -> None:
    """No pickle, eval, exec or shell; torch.load reads weights alone."""
    found = {
        str(path.relative_to(PACKAGE)): dangers(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval(text)", "exec(text)",
        "torch.load(path)", "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
    ],
)  # fmt: skip
def test_code_from_data_is_seen(source: str) -> None:
    assert dangers(source)


def test_only_trl_passes_trust_remote_code_on() -> None:
    """Its config has the key; nothing else of the package names it."""
    named = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "trust_remote_code" in path.read_text(encoding="utf-8")
    ]
    assert named == ["trl/teacher.py"]


def test_files_that_the_page_names_exist() -> None:
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", TEXT)
    assert len(set(named)) > 12
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_tests_that_the_page_names_exist() -> None:
    (name,) = set(re.findall(r"`(test_\w+)`", TEXT))
    assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
