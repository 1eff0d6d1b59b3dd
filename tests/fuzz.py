"""What the fuzz tests share: bounds of time and memory, odd values, and how a tree is damaged."""

import copy
import datetime
import math
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MEGABYTES = 300
"""What one fuzz test may add to the largest memory of the process."""

EXAMPLES = [
    pytest.param(100, id="some"),
    pytest.param(1000, id="many", marks=pytest.mark.slow),
]
"""Numbers of examples: in every run of the tests, and in long ones."""


def bounded(examples: int) -> settings:
    """Return settings: the same examples every time, ten seconds for the slowest one."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=datetime.timedelta(seconds=10),
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Check that the block adds little to the largest memory of the process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert added < MEGABYTES


def survives(examples: int, check: Callable[..., object], *drawn: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with what is drawn, within the bounds of time and memory."""

    @bounded(examples)
    @given(st.tuples(*drawn))
    def damage(values: tuple[Any, ...]) -> None:
        check(*values)

    with bounded_memory():
        damage()


ODD_NUMBERS = (
    0, 1, -1, 2, 0.5, -0.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, -1e300, 10**11, 2**31,
    2**63 - 1, -(2**63), 260, 100_001,
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "full", "vllm", "../..", "a" * 5000, "\u2028\u202e", "😀", "[b]", "{question}",
    "http://me:secret@host", "http://[::1", "-1", "nan", "m:f", "os:system", "~", "/dev/null",
)  # fmt: skip
ODD: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.sampled_from(ODD_NUMBERS),
        st.sampled_from(ODD_TEXTS),
        st.booleans(),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
    ),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.dictionaries(st.sampled_from(("a", "type", "model", "k", "x" * 300)), child, max_size=3),
    ),
    max_leaves=6,
)
"""Values that hardly any key means."""


def damaged(tree: Any, values: list[Any], seed: int) -> Any:
    """Return a copy of nested dictionaries and lists with some values replaced, added or removed.

    A key may also get the name of another one, which a table of names takes for a name. One of the
    values is put somewhere per change.
    """
    chance = random.Random(seed)
    tree = copy.deepcopy(tree)
    for value in values:
        places = list(_places(tree))
        parent, key = chance.choice(places)
        action = chance.randrange(5)
        if action == 0:
            del parent[key]
            if not tree:
                return tree
        elif action == 4 and isinstance(parent, dict):
            names = [name for table, name in places if isinstance(table, dict)]
            parent[chance.choice(names)] = parent.pop(key)
        elif action == 1 and isinstance(parent, dict):
            parent[chance.choice(("model", "steps", "typ", "url", "k", "prepare"))] = value
        else:
            parent[key] = value
    return tree


def odd_values(tree: Any) -> st.SearchStrategy[Any]:
    """Return a strategy: the tree with one to three values that hardly any key means."""
    values = st.lists(ODD, min_size=1, max_size=3)
    return st.builds(lambda some, seed: damaged(tree, some, seed), values, st.integers(0, 10**6))


def damaged_bytes(content: bytes, pieces: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy: the content with up to 20 bytes replaced by one piece, often repeated.

    A piece is one of ``pieces``, or random bytes.
    """
    return st.builds(
        lambda start, length, piece, times: (
            content[:start] + piece * times + content[start + length :]
        ),
        st.integers(0, len(content)),
        st.integers(0, 20),
        st.one_of(st.binary(max_size=6), st.sampled_from(pieces)),
        st.integers(1, 3000),
    )


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in list(children):
        yield tree, key
        if isinstance(child, dict | list):
            yield from _places(child)
