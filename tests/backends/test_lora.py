"""A model with an adapter, read as plain models; by brute force in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prime_composer.backends.hf_model import ModelUnavailable, check_head, linear_layers
from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.lora.views import base_of, frozen_copy, is_adapted, weights_of
from prime_composer.local.weight_sync import perturbed
from prime_composer.recipe.model import LoraConfig
from tests.tiny_qwen import make_model

CONFIG = LoraConfig(rank=3, alpha=7, targets=("k_proj", "down_proj"))
IDS = torch.arange(2, 12)[None]


def adapted(tied: bool = True, **changes: Any) -> tuple[nn.Module, nn.Module, LoraAdapter]:
    """Return a model, itself with an adapter that is not zero, and the adapter."""
    plain = make_model(tied, seed=0, **changes)
    model = copy.deepcopy(plain)
    adapter = LoraAdapter.of_model(model, CONFIG, "a/base", seed=0)
    for index, (name, value) in enumerate(adapter.weights.items()):
        if "lora_B" in name:
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(index))
    return plain, model, adapter


def merged_by_hand(plain: nn.Module, model: nn.Module) -> nn.Module:
    """Return the plain model in float64, with W + 7/3 B A in its adapted layers."""
    expected = copy.deepcopy(plain).double()
    found = [name for name, layer in model.named_modules() if is_adapted(layer)]
    assert len(found) == 4
    with torch.no_grad():
        for name in found:
            a, b = (
                model.get_parameter(f"{name}.lora_{side}.default.weight").double() for side in "AB"
            )
            expected.get_submodule(name).weight += 7 / 3 * (b @ a)
    return expected


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


@pytest.mark.parametrize("tied", [True, False])
def test_served_weights_are_those_of_the_merged_matrices(tied: bool) -> None:
    """By the plain model's names and in its order, lm_head.weight included."""
    plain, model, _ = adapted(tied)
    expected = merged_by_hand(plain, model)
    served = dict(weights_of(model))
    assert [*served] == [*plain.state_dict()]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(served[name].double(), value, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits_of(model).double(), logits_of(expected), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(logits_of(model), logits_of(plain), atol=0.1)


def test_biases_are_served_once() -> None:
    """Those of an adapted layer, under the plain name."""
    plain, model, _ = adapted(attention_bias=True)
    with torch.no_grad():
        for name, layer in linear_layers(plain):
            if layer.bias is not None:
                layer.bias.fill_(0.5)
                other = model.get_submodule(name)
                getattr(other, "base_layer", other).bias.fill_(0.5)
    served = dict(weights_of(model))
    assert [*served] == [*plain.state_dict()]
    assert float(served["model.layers.0.self_attn.k_proj.bias"].mean()) == 0.5


def test_base_has_the_very_weights_and_no_adapter() -> None:
    plain, model, adapter = adapted()
    base = base_of(model)
    assert torch.equal(logits_of(base), logits_of(plain))
    assert not any(is_adapted(layer) for layer in base.modules())
    assert any(is_adapted(layer) for layer in model.modules())
    own = {one.data_ptr() for one in model.parameters()}
    assert {one.data_ptr() for one in base.parameters()} < own
    for value in adapter.weights.values():
        value.add_(1)
    assert torch.equal(logits_of(base), logits_of(plain))
    check_head(base)


def test_frozen_copy_is_merged_and_apart() -> None:
    plain, model, adapter = adapted()
    expected = logits_of(merged_by_hand(plain, model))
    frozen = frozen_copy(model)
    for value in adapter.weights.values():
        value.add_(1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2)
    torch.testing.assert_close(logits_of(frozen).double(), expected, atol=1e-3, rtol=1e-3)
    assert not any(one.requires_grad for one in frozen.parameters())
    assert len([*frozen.parameters()]) == len([*plain.parameters()])
    own: Any = frozen
    assert own.get_output_embeddings().weight is own.get_input_embeddings().weight


def test_model_without_an_adapter_is_its_own_merged_model() -> None:
    plain = make_model(tied=True, seed=0)
    for served in (dict(weights_of(plain)), frozen_copy(plain).state_dict()):
        state = plain.state_dict()
        assert [*served] == [*state]
        assert all(torch.equal(served[name], state[name]) for name in state)
    assert torch.equal(logits_of(base_of(plain)), logits_of(plain))
    assert not any(one.requires_grad for one in frozen_copy(plain).parameters())
    assert all(one.requires_grad for one in plain.parameters())


def test_check_of_a_sync_moves_an_adapter_that_is_zero() -> None:
    """Otherwise a sampler without it would agree; all is restored."""
    model = make_model(tied=True, seed=0)
    LoraAdapter.of_model(model, CONFIG, "a/base", seed=0)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with perturbed(model):
        of_base = dict(weights_of(base_of(model)))
        served = dict(weights_of(model))
        moved = [name for name in served if not torch.equal(served[name], of_base[name])]
        assert len(moved) == 4
        for name in moved:
            moved_by = (served[name] - of_base[name]).detach().norm()
            assert float(moved_by) > 0.01 * float(of_base[name].detach().norm())
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_all_linear_layers_are_adapted_but_the_head() -> None:
    model = make_model(tied=False, seed=0)
    LoraAdapter.of_model(model, LoraConfig(rank=2), "a/base", seed=0)
    found = [name for name, layer in model.named_modules() if is_adapted(layer)]
    assert len(found) == 14 and not any("lm_head" in name or "embed" in name for name in found)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 28 and all("lora_" in name for name in trained)


def test_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """By the hash in its file. One that says nothing is taken, as one that peft has written."""
    from safetensors.torch import load_file, save_file

    _, _, adapter = adapted()
    adapter.save_pretrained(tmp_path)
    other = LoraAdapter.of_model(make_model(tied=True, seed=1), CONFIG, "another/base", seed=0)
    with pytest.raises(ModelUnavailable, match="an adapter of another model than another/base"):
        other.load(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})
    other.load(tmp_path)
    stored = load_file(file)
    assert all(torch.equal(value, stored[name]) for name, value in other.weights.items())
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ModelUnavailable, match=r"adapter_model.safetensors: "):
        other.load(tmp_path)
