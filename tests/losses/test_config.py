"""Configs and objectives: needs, supports and metric types."""

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from prime_composer.contract import LossInputs, Mean
from prime_composer.losses import (
    LOSS_TYPES,
    LossConfig,
    SupportRequest,
    parse_loss,
    setup_loss_fn,
)
from prime_composer.losses.needs import NEEDS
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.trl.objective import read_loss
from tests.builders import packed_inputs

PACKAGE = Path(__file__).parents[2] / "prime_composer"
COMPOSED = {
    "type": "compose",
    "rl": {"weight": 0},
    "distillation": {
        "few": {"weight": 1, "loss": {"type": "topk_reverse_kl", "k": 4}},
        "own": {"weight": 1, "loss": {"type": "self_distillation", "chosen_by": "student"}},
    },
}


# Needs, and who provides them.


def test_needs_are_the_losses_own_and_its_modifiers():
    class Mine(LossConfig):
        type: str = "mine"
        needs_inputs: ClassVar[frozenset[str]] = frozenset({"stops"})

    knobs = {"special_tokens": {"ids": [1]}, "position_weights": {}, "balance": {}}
    assert Mine().needs == {"stops"}
    mixed = Mine(**knobs, rl_mix={"kd": 0.5})
    own = {"stops", "token_ids", "ref_logprobs", "balance"}
    assert mixed.needs == own | {"advantages"}
    sections = {section: needs for section, (_, needs) in mixed.needs_by_section().items()}
    assert sections == {"loss": own, "loss.rl_mix.loss": {"advantages"}}


def test_an_rl_mix_of_a_sum_reads_the_sampler():
    """Also where none of the sum's own channels does."""
    tail = {"weight": 1, "loss": {"type": "topk_reverse_kl"}}
    table = {"type": "compose", "rl": {"weight": 0}, "distillation": {"tail": tail}}
    assert not parse_loss(table).reads_sampler
    assert parse_loss({**table, "rl_mix": {"kd": 0.5}}).reads_sampler


TEACHER = {"model": "t"}


def of_recipe(**tables) -> set[str]:
    raw = {"student": {"model": "s"}, "data": {}, "trainer": {"steps": 1}, "loss": {"type": "sft"}}
    return parse_recipe({**raw, **tables}).provided_inputs


def test_every_optional_input_has_a_row():
    hints = typing.get_type_hints(LossInputs)
    optional = {
        field.name
        for field in dataclasses.fields(LossInputs)
        if types.NoneType in typing.get_args(hints[field.name])
    }
    assert set(NEEDS) == optional - {"loss_weights", "segment_ids", "untempered_logprobs"}
    page = (PACKAGE / "losses/README.md").read_text()
    assert all(f"`{name}`" in page for name in NEEDS)


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
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if rule.search(line) and "divergence" not in line
    ]
    assert not found


@pytest.mark.parametrize(
    ("table", "compares", "request_", "size"),
    [
        ({"type": "sft"}, False, None, 0),
        ({"type": "topk_reverse_kl", "k": 4}, True, SupportRequest(4), 4),
        ({"type": "topk_reverse_kl", "k": "full"}, True, None, 0),
        (
            {"type": "self_distillation", "k": 4, "chosen_by": "student"},
            True,
            SupportRequest(4, "student"),
            "full",
        ),
        ({"type": "self_distillation", "divergence": "sampled_reverse_kl"}, True, None, 0),
        (
            {"type": "sampled_reverse_kl", "stops": {"ids": [1]}, "k": 6},
            True,
            SupportRequest(6),
            6,
        ),
        (COMPOSED, True, SupportRequest("full"), "full"),
        ({"type": "compose"}, False, None, 0),
    ],
)
def test_a_config_says_which_support_it_reads(table, compares, request_, size):
    config = parse_loss(table)
    assert config.compares_with_teacher is compares
    assert config.support == request_ and config.support_size == size


# Metrics.


def test_a_mean_is_a_plain_tensor_in_arithmetic():
    value = torch.tensor(3.0, requires_grad=True) * 2
    metric = Mean(value, torch.tensor(4))
    assert type(metric) is Mean and not metric.requires_grad and metric.item() == 6.0
    assert type(metric * 2) is torch.Tensor and float(metric) == 6.0 and metric.count == 4
    assert torch.equal(torch.stack([metric, metric]), torch.tensor([6.0, 6.0]))


def test_a_sum_of_sums_names_every_metric_once():
    """A channel with an RL mix of its own keeps the channel's prefix."""
    channel = {"weight": 1, "loss": {"type": "sft", "rl_mix": {"kd": 0.5}}}
    config = parse_loss({"type": "compose", "distillation": {"a": channel}})
    metrics = setup_loss_fn(config)(packed_inputs(config)).metrics
    assert {"compose/a/nll", "compose/a/default/is_masked", "compose/a/loss"} <= metrics.keys()
    assert "compose/rl/is_masked" in metrics


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"needs": property(lambda self: frozenset())}, "overrides `needs`.*`own_needs`"),
        ({"__annotations__": {"needs": frozenset}}, "overrides `needs`.*`own_needs`"),
        (
            {"needs_inputs": frozenset({"planted"})},
            r"names planted; a loss may need: ref_logprobs, support.*losses\.needs\.NEEDS",
        ),
    ],
)
def test_class_that_says_its_needs_wrong_is_refused(body, message):
    with pytest.raises(TypeError, match=f"Wrong.*{message}"):
        types.new_class("Wrong", (LossConfig,), exec_body=lambda namespace: namespace.update(body))
