"""Signatures by ``ast``: the same that ``inspect`` gives of the same code, over several files."""

import shutil
import sys
import types

import pytest

from prime_composer.upstream.versions.capabilities import signature_of
from prime_composer.upstream.versions.sources import (
    SourceTree,
    installed,
    of_checkout,
    source_texts,
)

FUNCTIONS = """
def plain(a, b, c=1): ...
def stars(a, *rest, **more): ...
def keywords(a, *, b, c=2): ...
def positional(a, /, b=3): ...
async def waited(openai, model, token_ids): ...
def decorated(a): ...
def decorated(a, b=None): ...
"""
CLASSES = """
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar
import msgspec
import pydantic
from pydantic import Field

@dataclass
class Inputs:
    kind: ClassVar[str]
    a: int
    b: list = field(default_factory=list)
    c: Any = field(default=None)
    d: Any = None

@dataclass
class Computed:
    a: int
    b: int = field(init=False)
    c: int = field(kw_only=True)

@dataclass
class Keywords(Generic[TypeVar("T")]):
    a: int
    _: KW_ONLY
    b: int

@dataclass
class Narrower(Keywords[int]):
    c: int = 0

class Wire(msgspec.Struct):
    a: bytes
    b: list[int] | None = None

class Base(pydantic.BaseModel):
    x: int = Field(1, ge=0)
    y: int = Field(..., ge=0)
    z: list = Field(default_factory=list)

class Config(Base):
    y: int = 4
    w: str
    v: int = Field(ge=1)
"""


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "stars", "keywords", "positional", "waited", "decorated"),
        *("Inputs", "Keywords", "Narrower", "Wire", "Base", "Config"),
    ],
)
def test_signature_is_that_of_inspect(name, monkeypatch):
    """The last definition counts; fields of dataclasses, structs and models, also of bases."""
    module = types.ModuleType("definitions_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(FUNCTIONS + CLASSES, module.__dict__)
    read = SourceTree({"prime_rl/a.py": FUNCTIONS + CLASSES}).signature("prime_rl.a", name)
    assert read == signature_of(getattr(module, name))


def test_signature_of_a_computed_field_asks_for_nothing():
    """A field that the constructor does not take is there, and need not be given."""
    computed = SourceTree({"prime_rl/a.py": CLASSES}).signature("prime_rl.a", "Computed")
    assert computed == {"a": True, "b": False, "c": True}


def test_signature_of_a_method_comes_from_its_bases():
    sources = SourceTree(
        {
            "prime_rl/algo/__init__.py": "from .base import Algorithm as Exported\n",
            "prime_rl/algo/base.py": "class Algorithm:\n"
            "    def score(self, episodes): ...\n"
            "    @staticmethod\n    def of(config, more=None): ...\n"
            "    @property\n    def name(self): ...\n"
            "    @typing.overload\n    def one(self, a, b): ...\n    def one(self, a): ...\n",
            "prime_rl/algo/opd.py": "import typing\n"
            "from prime_rl.algo import Exported\n"
            "class OPD(Exported, typing.Generic):\n    def score_one(self, episode): ...\n",
        }
    )
    assert sources.signature("prime_rl.algo.opd", "OPD.score_one") == {"episode": True}
    assert sources.signature("prime_rl.algo.opd", "OPD.score") == {"episodes": True}
    assert sources.signature("prime_rl.algo.opd", "OPD.of") == {"config": True, "more": False}
    assert sources.signature("prime_rl.algo.opd", "OPD.name") == {}
    assert sources.signature("prime_rl.algo.opd", "OPD.one") == {"a": True}
    assert sources.signature("prime_rl.algo.opd", "OPD.gone") is None
    assert sources.signature("prime_rl.algo.opd", "Gone.score") is None
    assert sources.signature("prime_rl.gone", "score") is None


def test_signature_follows_what_a_module_has_at_run_time():
    """Imports count, also under ``try`` and before its fallback; those for type checkers do not."""
    sources = SourceTree(
        {
            "prime_rl/a.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from prime_rl.b import hidden\n"
            "else:\n    pass\n"
            "try:\n    from prime_rl.b import f as g\nexcept ImportError:\n    g = None\n"
            "from pydantic_config import cli\nother = g\n",
            "prime_rl/b.py": "def f(x): ...\ndef hidden(): ...\n",
        }
    )
    assert sources.signature("prime_rl.a", "hidden") is None
    for module, name in ("b", "f"), ("a", "g"), ("a", "other"):
        assert sources.signature(f"prime_rl.{module}", name) == {"x": True}
    assert sources.signature("prime_rl.a", "cli") == {}


def test_is_used_needs_more_than_a_definition_or_a_word():
    texts = {"prime_rl/a.py": '"""f is described here."""\ndef f(): ...\n'}
    assert not SourceTree(texts).is_used("f")
    assert SourceTree({**texts, "prime_rl/b.py": "from prime_rl.a import f\nf()\n"}).is_used("f")
    assert SourceTree({**texts, "prime_rl/b.py": "loader.f()\n"}).is_used("DataLoader.f")
    renamed = "from prime_rl.a import f as own\nown()\n"
    assert SourceTree({**texts, "prime_rl/b.py": renamed}).is_used("f")


def test_of_checkout_reads_both_folders_of_the_package(tmp_path):
    """prime_rl is one package over src and the config package; a folder of neither is refused."""
    for path in ("src/prime_rl/a.py", "packages/prime-rl-configs/src/prime_rl/configs/b.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("x = 1\n")
    assert set(source_texts(of_checkout(tmp_path))) == {"prime_rl/a.py", "prime_rl/configs/b.py"}
    assert source_texts(of_checkout(tmp_path / "src")) == source_texts(of_checkout(tmp_path))
    shutil.rmtree(tmp_path / "packages/prime-rl-configs")
    assert set(source_texts(of_checkout(tmp_path / "src"))) == {"prime_rl/a.py"}
    with pytest.raises(ValueError, match="there is no src/prime_rl, nor prime_rl"):
        of_checkout(tmp_path / "packages")


def test_installed_finds_the_package_and_imports_nothing(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder / "prime_rl").mkdir(parents=True)
        (tmp_path / folder / "prime_rl" / f"{folder}.py").write_text("raise SystemExit\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert set(source_texts(installed())) == {"prime_rl/one.py", "prime_rl/two.py"}
    assert "prime_rl" not in sys.modules
    monkeypatch.setitem(sys.modules, "prime_rl", types.ModuleType("prime_rl"))
    assert installed() == []  # a stand-in without a spec


def test_sources_of_another_python_are_refused_by_their_line():
    """A warning about a line of prime-rl's is not shown: nobody can mend it here."""
    odd = SourceTree({"prime_rl/a.py": 'def f(a):\n    """A \\ sign."""\n'})
    assert odd.signature("prime_rl.a", "f") == {"a": True}
    newer = SourceTree({"prime_rl/a.py": "def f(a) -> ???: ...\n"})
    with pytest.raises(ValueError, match=r"cannot read prime-rl's line 'def f\(a\) -> \?\?\?"):
        newer.signature("prime_rl.a", "f")
