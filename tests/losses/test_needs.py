"""The table of needs: one row for each input, with a remedy for every host that may lack it."""

import dataclasses
import itertools
import re
import types
import typing
from pathlib import Path
from typing import ClassVar

import pytest

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, LossConfig, parse_loss, require
from prime_composer.losses.needs import NEEDS, PROVIDERS, Host
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.trl.objective import AVAILABLE, read_loss
from prime_composer.upstream.versions.records import LOSS_V0_6, LOSS_V0_7

PAGE = Path(__file__).parents[2] / "prime_composer/losses/README.md"
TEACHER = {"model": "t"}
SIBLINGS = {"group_size": 2}
RECIPES = [
    {},
    {"teacher": TEACHER, "rollout": SIBLINGS},
    {"teacher": {"policy": {"hint": "reference"}}, "rollout": SIBLINGS},
    {
        "teacher": TEACHER,
        "rollout": {"other_source": "teacher", "student_fraction": 0.5},
        "replay": {"source": "jsonl", "path": "pairs.jsonl"},
    },
]


def of_recipe(**tables) -> set[str]:
    raw = {"student": {"model": "s"}, "data": {}, "trainer": {"steps": 1}, "loss": {"type": "sft"}}
    return parse_recipe({**raw, **tables}).provided_inputs


def of_prime_rl() -> list[frozenset[str]]:
    losses = [parse_loss({"type": name}) for name in ("sampled_reverse_kl", "default")]
    contracts = (LOSS_V0_6, LOSS_V0_7)
    return [
        contract.provides(loss, adapter)
        for contract, loss, adapter in itertools.product(contracts, losses, (False, True))
    ]


PROVIDED = {
    "call": lambda: [set(), set(NEEDS)],
    "recipe": lambda: [of_recipe(**tables) for tables in RECIPES],
    "prime_rl": of_prime_rl,
    "trl": lambda: [AVAILABLE],
}
"""What each host provides, in the cases that differ."""


def optional_inputs() -> set[str]:
    hints = typing.get_type_hints(LossInputs)
    return {
        field.name
        for field in dataclasses.fields(LossInputs)
        if types.NoneType in typing.get_args(hints[field.name])
    }


def test_every_optional_input_has_a_row():
    assert set(NEEDS) == optional_inputs() - {"loss_weights", "sampled", "untempered_logprobs"}
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in NEEDS)


@pytest.mark.parametrize("host", typing.get_args(Host))
def test_a_need_has_a_remedy_for_every_host_that_may_lack_it(host):
    provided = PROVIDED[host]()
    assert set().union(*provided) <= NEEDS.keys()
    lacking = NEEDS.keys() - set(NEEDS).intersection(*provided)
    assert {name for name, remedies in NEEDS.items() if host in remedies} == lacking


@pytest.mark.parametrize("host", typing.get_args(Host))
def test_a_new_need_is_a_row_and_nothing_else(monkeypatch, host):
    """A loss names it, and the hosts that do not provide it say so with the row's remedy."""
    monkeypatch.setitem(NEEDS, "planted", {host: "Plant it."})

    class Planted(LossConfig):
        type: str = "planted"
        needs_inputs: ClassVar[frozenset[str]] = frozenset({"planted"})

    message = f"[loss] type = 'planted' needs planted, which {PROVIDERS[host]} does not provide. "
    for provided in PROVIDED[host]():
        if "planted" not in provided:
            with pytest.raises(ValueError, match=re.escape(f"{message}Plant it.")):
                require(Planted(), provided, host)
    require(Planted(), {"planted"}, host)


def test_a_need_without_a_row_is_an_error_that_names_the_table():
    class Sometimes(LossConfig):
        type: str = "sometimes"

        @property
        def own_needs(self) -> frozenset[str]:
            return frozenset({"planted"})

    table = r"names planted; a loss may need: .*prime_composer.losses.needs.NEEDS"
    with pytest.raises(ValueError, match=rf"\[loss\] type = 'sometimes' {table}"):
        require(Sometimes(), (), "call")
    with pytest.raises(ValueError, match=f"what this recipe provides {table}"):
        require(parse_loss({"type": "sft"}), {"planted"}, "recipe")
    with pytest.raises(TypeError, match=f"Always.needs_inputs {table}"):

        class Always(LossConfig):
            type: str = "always"
            needs_inputs: ClassVar[frozenset[str]] = frozenset({"planted"})


def test_a_loss_from_outside_says_the_same_of_itself():
    """It takes ``[reference]``, or is refused on the student's own samples, as built-in ones."""

    class Mine(LossConfig):
        type: str = "mine"
        needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})

    class Extrapolated(Mine):
        takes_reference: ClassVar[bool] = True

    class Imitation(Mine):
        on_given_text: ClassVar[bool] = True

    tables = {"teacher": TEACHER, "reference": {"model": "r"}}
    assert of_recipe(**tables, loss=Extrapolated()) >= {"ref_logprobs"}
    with pytest.raises(RecipeError, match="type = 'mine' reads more than that"):
        of_recipe(**tables, loss=Mine())
    assert read_loss(Mine()) == Mine()
    with pytest.raises(ValueError, match="type = 'mine' on the student's own samples"):
        read_loss(Imitation())


def test_rules_read_what_a_loss_says_of_itself():
    """No module outside losses/ knows a built-in loss by its name."""
    names = "|".join(name for name in LOSS_TYPES if ":" not in name and name != "default")
    rule = re.compile(rf'[!=]= "({names})"|"({names})" (not )?in|in \("({names})"')
    package = PAGE.parents[1]
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text().splitlines()
        if rule.search(line) and "divergence" not in line
    ]
    assert not found
