"""Annotations of the package are checked while its tests run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.contract import Support
from tests.annotations import checked

ONE, TWO = torch.zeros(1), torch.zeros(2)


@checked
def added(a: Float[Tensor, " n"], b: Float[Tensor, " n"], **more: Any) -> Float[Tensor, " n"]:
    return more.get("result", a + b)


@checked
def named(values: "list[int]", other: "Nowhere | None" = None) -> Iterator[int]:  # noqa: F821
    yield from values


@checked
@dataclass
class Pair:
    ids: Int[Tensor, " n"]
    values: Float[Tensor, " n"]
    name: str = ""


@pytest.mark.parametrize(
    "call",
    [
        lambda: added(ONE, TWO),
        lambda: added(ONE, ONE, result=TWO),
        lambda: added(ONE, 1.0),
        lambda: [*named("text")],
        lambda: Pair(ONE.long(), TWO),
        # Of the package: those of a class and of a method.
        lambda: Support(torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2, 4)),
        lambda: Support(*[torch.zeros(2, 3)] * 3),
    ],
)
def test_call_that_breaks_its_annotations_is_refused(call: Any) -> None:
    with pytest.raises(TypeError, match="violates type hint"):
        call()


def test_call_that_keeps_its_annotations_has_its_value() -> None:
    """A size is one within a call, and another one in the next; names for mypy are anything."""
    for values in (ONE, TWO):
        assert torch.equal(added(values, values), values)
    assert [*named([1, 2], other=3)] == [1, 2]
    assert Pair(ONE.long(), ONE).name == ""
