"""Signatures by ``ast``: the same that ``inspect`` gives of the same code, over several files."""

import sys
import types

import pytest

from prime_composer.upstream.versions.capabilities import signature_of
from prime_composer.upstream.versions.sources import (
    SourceTree,
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


def test_sources_of_another_python_are_refused_by_their_line():
    """A warning about a line of prime-rl's is not shown: nobody can mend it here."""
    odd = SourceTree({"prime_rl/a.py": 'def f(a):\n    """A \\ sign."""\n'})
    assert odd.signature("prime_rl.a", "f") == {"a": True}
    newer = SourceTree({"prime_rl/a.py": "def f(a) -> ???: ...\n"})
    with pytest.raises(ValueError, match=r"cannot read prime-rl's line 'def f\(a\) -> \?\?\?"):
        newer.signature("prime_rl.a", "f")
