"""Configs and bound losses: needs, supports, metric types, and what a class may not do."""

from typing import ClassVar

import pytest
import torch

from prime_composer.contract import Count, LossOutputs, PairMean, given
from prime_composer.losses import (
    LOSS_TYPES,
    BoundLoss,
    LossConfig,
    Objective,
    SupportLossConfig,
    SupportRequest,
    WeightedSum,
    parse_loss,
    require,
    setup_loss_fn,
    unmet,
)
from tests.builders import packed_inputs

COMPOSED = {
    "type": "compose",
    "rl": {"weight": 0},
    "distillation": {
        "few": {"weight": 1, "loss": {"type": "topk_reverse_kl", "k": 4}},
        "own": {"weight": 1, "loss": {"type": "self_distillation", "chosen_by": "student"}},
    },
    "replay": {"weight": 1, "loss": {"type": "dpo", "special_tokens": {"ids": [1]}}},
}


def test_overriding_needs_is_refused_and_names_own_needs():
    with pytest.raises(TypeError, match="Wrong overrides `needs`.*Override `own_needs`"):

        class Wrong(LossConfig):
            type: str = "wrong"

            @property
            def needs(self):
                return frozenset()

    with pytest.raises(TypeError, match="Field overrides `needs`"):

        class Field(LossConfig):
            type: str = "field"
            needs: frozenset = frozenset()


def test_a_need_that_does_not_exist_is_refused():
    with pytest.raises(
        TypeError, match="names ref_logprob; a loss may need: ref_logprobs, support"
    ):

        class Wrong(LossConfig):
            type: str = "wrong"
            needs_inputs = frozenset({"ref_logprob"})


def test_needs_are_the_losses_own_and_its_modifiers():
    class Mine(LossConfig):
        type: str = "mine"
        needs_inputs: ClassVar[frozenset[str]] = frozenset({"segment_ids"})

    knobs = {"special_tokens": {"ids": [1]}, "position_weights": {}, "rl_mix": {"kd": 0.5}}
    assert Mine().needs == {"segment_ids"}
    assert Mine(**knobs).needs == {"segment_ids", "token_ids", "ref_logprobs", "advantages"}


def test_an_rl_mix_of_a_sum_reads_the_sampler():
    """Also where none of the sum's own channels does."""
    tail = {"weight": 1, "loss": {"type": "topk_reverse_kl"}}
    table = {"type": "compose", "rl": {"weight": 0}, "distillation": {"tail": tail}}
    assert not parse_loss(table).reads_sampler
    assert parse_loss({**table, "rl_mix": {"kd": 0.5}}).reads_sampler


def test_unmet_names_section_loss_and_need():
    config = parse_loss({"type": "topk_reverse_kl", "rl_mix": {"kd": 0.5}})
    missing = [(m.section, m.loss, m.need) for m in unmet(config, {"token_ids"}, "trainer.loss")]
    assert missing == [
        ("trainer.loss", "topk_reverse_kl", "support"),
        ("trainer.loss.rl_mix.loss", "default", "advantages"),
    ]
    assert unmet(config, {"support", "advantages"}) == []


def test_require_says_who_does_not_provide_it_and_the_remedy():
    config = parse_loss({"type": "topk_reverse_kl"})
    with pytest.raises(ValueError) as error:
        require(config, (), "recipe")
    assert str(error.value) == (
        "[loss] type = 'topk_reverse_kl' needs support, which this recipe does not provide. "
        "Remedy: add a [teacher] table, or several [teachers.*]."
    )
    require(config, {"support"}, "recipe")


@pytest.mark.parametrize(
    ("table", "compares", "request_", "size"),
    [
        ({"type": "sft"}, False, None, 0),
        ({"type": "sampled_reverse_kl"}, True, None, 0),
        ({"type": "topk_reverse_kl", "k": 4}, True, SupportRequest(4), 4),
        ({"type": "topk_reverse_kl", "k": "full"}, True, None, 0),
        ({"type": "adaptive_kl", "k": "full"}, True, None, 0),
        (
            {"type": "self_distillation", "k": 4, "chosen_by": "student"},
            True,
            SupportRequest(4, "student"),
            "full",
        ),
        (
            {"type": "self_distillation", "divergence": "sampled_reverse_kl"},
            True,
            None,
            0,
        ),
        (
            {"type": "sampled_reverse_kl", "mode": "signed", "baseline": "topk_kl", "k": 6},
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


def test_a_support_without_its_size_is_refused():
    """At class creation where the class says so, else when the size is read."""
    with pytest.raises(TypeError, match="Sizeless needs the support.*SupportLossConfig"):

        class Sizeless(LossConfig):
            type: str = "sizeless"
            needs_inputs: ClassVar[frozenset[str]] = frozenset({"support"})

    class Sometimes(LossConfig):
        type: str = "sometimes"

        @property
        def own_needs(self) -> frozenset[str]:
            return frozenset({"support"})

    with pytest.raises(ValueError, match="Sometimes needs the support.*SupportLossConfig"):
        _ = Sometimes().support_size


def test_the_six_support_losses_share_their_knobs():
    names = [name for name, cls in LOSS_TYPES.items() if issubclass(cls, SupportLossConfig)]
    assert {
        "topk_reverse_kl",
        "topk_forward_kl",
        "generalized_jsd",
        "taid",
        "entropy_aware_opd",
        "self_distillation",
    } <= set(names)
    for name in names:
        default = LOSS_TYPES[name].model_fields["k"].default
        assert default == (64 if name == "topk_forward_kl" else 32)


def test_metric_types_are_plain_tensors_in_arithmetic():
    value = torch.tensor(3.0, requires_grad=True) * 2
    for cls in (PairMean, Count):
        metric = cls(value)
        assert type(metric) is cls and not metric.requires_grad and metric.item() == 6.0
        assert type(metric * 2) is torch.Tensor and float(metric) == 6.0
        assert torch.equal(torch.stack([metric, metric]), torch.tensor([6.0, 6.0]))


def test_metrics_of_pairs_are_averaged_by_pairs():
    """All of them within a sum, also what a modifier reports on the pairs' tokens."""
    config = parse_loss(COMPOSED)
    metrics = setup_loss_fn(config)(packed_inputs(config)).metrics
    pairs = {name for name, value in metrics.items() if isinstance(value, PairMean)}
    counts = {name for name, value in metrics.items() if isinstance(value, Count)}
    assert counts == {"compose/replay/pairs"}
    assert pairs | counts == {name for name in metrics if name.startswith("compose/replay/")}
    assert "compose/replay/special_tokens/removed" in pairs


def test_both_kinds_of_bound_losses_are_objectives():
    for table, kind in (({"type": "sft"}, BoundLoss), (COMPOSED, WeightedSum)):
        loss = setup_loss_fn(parse_loss(table), "trainer.loss")
        assert isinstance(loss, kind) and isinstance(loss, Objective)
        assert loss.section == "trainer.loss" and loss.stateful is False
        assert loss.state_dict() == {}


def test_a_sum_of_sums_names_every_metric_once():
    """A channel with an RL mix of its own keeps the channel's prefix."""
    channel = {"weight": 1, "loss": {"type": "sft", "rl_mix": {"kd": 0.5}}}
    config = parse_loss({"type": "compose", "distillation": {"a": channel}})
    metrics = setup_loss_fn(config)(packed_inputs(config)).metrics
    assert {"compose/a/nll", "compose/a/default/is_masked", "compose/a/loss"} <= metrics.keys()
    assert "compose/rl/is_masked" in metrics


def test_an_input_that_needs_do_not_name_is_noticed():
    """A loss function that reads more than its config declares is an error of the loss."""
    inputs = packed_inputs(LOSS_TYPES["sft"]())
    inputs.ref_logprobs = None

    def careless(inputs, config) -> LossOutputs:
        return LossOutputs(given(inputs.ref_logprobs).sum(), {})

    with pytest.raises(AssertionError, match="an input that its needs do not name"):
        BoundLoss(LOSS_TYPES["sft"](), careless)(inputs)
