"""The weighted sum: its value, its needs, and the sums that are refused."""

import dataclasses

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, require_inputs, setup_loss_fn

compose = LOSS_TYPES["compose"]


def inputs_of(seq=6, k=4) -> LossInputs:
    g = torch.Generator().manual_seed(0)
    log_q, order = (
        torch.randn(seq, 9, generator=g, dtype=torch.float64).log_softmax(-1).sort(descending=True)
    )
    log_p = torch.randn(seq, 9, generator=g, dtype=torch.float64).log_softmax(-1)
    leaf = lambda x: x.clone().requires_grad_()  # noqa: E731
    return LossInputs(
        trainer_logprobs=leaf(log_p[:, 0]),
        inference_logprobs=log_p[:, 0] - 0.1,
        ref_logprobs=log_q[:, 0],
        advantages=torch.randn(seq, generator=g, dtype=torch.float64),
        loss_mask=torch.tensor([True, True, False, True, True, True]),
        support=Support(order[:, :k], log_q[:, :k], leaf(log_p[:, :k])),
        token_ids=torch.arange(seq),
        segment_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
    )


CHANNELS = {
    "distillation": {
        "tail": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 4}},
        "few": {"weight": 0.25, "loss": {"type": "topk_forward_kl", "k": 2}},
    },
}


@pytest.mark.parametrize("rl", ["ipo", "icepop"])
def test_compose_is_the_weighted_sum_of_its_channels(rl):
    inputs = inputs_of()
    out = setup_loss_fn(compose(rl={"weight": 2.0, "loss": {"type": rl}}, **CHANNELS))(inputs)
    alone = lambda name, **knobs: setup_loss_fn(LOSS_TYPES[name](**knobs))(inputs)  # noqa: E731
    parts = {
        "rl": (2.0, alone(rl)),
        "tail": (0.5, alone("topk_reverse_kl", k=4)),
        "few": (0.25, alone("topk_forward_kl", k=2)),
    }
    assert out.loss.item() == pytest.approx(
        sum(w * o.loss.item() for w, o in parts.values()), rel=1e-12
    )
    for name, (_, o) in parts.items():
        for key, value in o.metrics.items():
            assert torch.equal(out.metrics[f"compose/{name}/{key.split('/', 1)[1]}"], value)
        assert out.metrics[f"compose/{name}/loss"].item() == pytest.approx(o.loss.item() / 5)


def test_all_weights_but_the_rl_one_default_to_zero():
    config = compose(distillation={"tail": {"loss": {"type": "topk_reverse_kl"}}})
    assert config.rl.weight == 1 and config.rl.loss.type == "default"
    assert config.needs == {"advantages"} and config.support_size == 0
    out = setup_loss_fn(config)(dataclasses.replace(inputs_of(), support=None, ref_logprobs=None))
    assert out.loss.item() == setup_loss_fn(LOSS_TYPES["default"]())(inputs_of()).loss.item()


def test_needs_are_the_union_and_k_the_largest_of_the_channels():
    config = compose(**CHANNELS)
    assert config.needs == {"advantages", "support"} and config.support_size == 4
    sampled = {"weight": 1, "loss": {"type": "sampled_reverse_kl", "special_tokens": {"ids": [1]}}}
    assert compose(rl={"weight": 0}, distillation={"s": sampled}).needs == {
        "ref_logprobs",
        "token_ids",
    }
    everything = {"weight": 1, "loss": {"type": "generalized_jsd", "k": "full"}}
    both = compose(distillation={"a": everything, "b": CHANNELS["distillation"]["tail"]})
    assert both.support_size == 4 and both.needs == {"advantages", "support", "hidden_states"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rl": {"weight": 0}}, "every channel's weight is 0"),
        (
            {"rl": {"loss": {"type": "sft"}}},
            r"rl.loss: type = 'sft' is not a loss of the rl channel; choose one of default, ipo",
        ),
        (
            {"distillation": {"x": {"loss": {"type": "ipo"}}}},
            r"distillation.x.loss: .* choose one of .*topk_reverse_kl",
        ),
        ({"distillation": {"x": {"loss": {"type": "compose"}}}}, "does not nest"),
        ({"distillation": {"rl": {"loss": {"type": "topk_reverse_kl"}}}}, "choose another name"),
    ],
)
def test_compose_refuses_a_config_that_makes_no_sense(config, message):
    with pytest.raises(ValidationError, match=message):
        compose(**config)


def test_a_channel_keeps_its_own_modifiers():
    tail = {
        "type": "topk_reverse_kl",
        "k": 4,
        "special_tokens": {"ids": [0, 1], "occurrence": "all"},
    }
    config = compose(rl={"weight": 0}, distillation={"a": {"weight": 1, "loss": tail}})
    inputs = inputs_of()
    out = setup_loss_fn(config)(inputs)
    assert out.loss.item() == pytest.approx(
        setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](**tail))(inputs).loss.item()
    )
    assert out.metrics["compose/a/special_tokens/removed"].item() == pytest.approx(2 / 5)


def test_rl_mix_weighs_both_forms():
    inputs = inputs_of()
    rl = setup_loss_fn(LOSS_TYPES["default"]())(inputs).loss.item()
    kd = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=4))(inputs).loss.item()
    for form, weight, expected in (
        ("interpolate", 0.3, 0.7 * rl + 0.3 * kd),
        ("add", 0.3, rl + 0.3 * kd),
    ):
        config = LOSS_TYPES["topk_reverse_kl"](k=4, rl_mix={"form": form, "kd": weight})
        out = setup_loss_fn(config)(inputs)
        assert out.loss.item() == pytest.approx(expected, rel=1e-12)
        assert {"default/is_masked", "topk_reverse_kl/kl"} <= out.metrics.keys()
        assert config.needs == {"support", "advantages"}
    with pytest.raises(ValidationError, match="between 0 and 1"):
        LOSS_TYPES["topk_reverse_kl"](rl_mix={"kd": 1.5})
    with pytest.raises(ValidationError, match="choose one of default, ipo"):
        LOSS_TYPES["topk_reverse_kl"](
            rl_mix={"kd": 0.5, "loss": {"type": "taid", "total_steps": 3}}
        )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("advantages", r"\[loss\.rl\.loss\] type = 'default' needs advantages.*group_size"),
        ("support", r"\[loss\.distillation\.(tail|few)\.loss\] type = .* needs support"),
    ],
)
def test_a_missing_input_names_the_recipe_key_of_its_channel(missing, message):
    loss = setup_loss_fn(compose(**CHANNELS))
    with pytest.raises(ValueError, match=message):
        loss(dataclasses.replace(inputs_of(), **{missing: None}))
    with pytest.raises(ValueError, match=message):
        config = compose(**CHANNELS)
        require_inputs(config, config.needs - {missing}, "call")
