"""Weights that are sent to an engine have the names and shapes of the model's checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from prime_composer.backends.hf_model import load_model
from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.lora.views import weights_to_load
from prime_composer.recipe.model import LoraConfig
from tests.studies.architecture_models import make_model, write_model

FUSED = ["Qwen2-MoE", "Mixtral", "DeepSeek-V3", "Qwen3-Next"]
"""Those whose experts transformers joins."""

OTHERS = ["gpt-oss", "Gemma-2", "Falcon-H1"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_weights_are_sent_as_the_checkpoint_has_them(name: str, tmp_path: Path):
    """Without the head of Gemma 2, which vLLM has not. ``state_dict`` names joined experts."""
    right = stored(write_model(name, tmp_path))
    model = load_model(tmp_path)
    sent = dict(weights_to_load(model))
    assert sent.keys() == right.keys()
    assert name not in FUSED or model.state_dict().keys() != right.keys()
    assert all(torch.equal(sent[key], value) for key, value in right.items())


def test_experts_of_a_new_model_are_sent_apart_too(tmp_path: Path):
    """A model that was made in memory has no record of a load."""
    right = stored(write_model("Qwen3-MoE", tmp_path))
    assert dict(weights_to_load(make_model("Qwen3-MoE", 0))).keys() == right.keys()


def test_merged_adapter_is_sent_beside_its_experts(tmp_path: Path):
    """Adapted layers are merged, experts taken apart, and no name of an adapter is left."""
    pytest.importorskip("peft")
    right = stored(write_model("Qwen3-MoE", tmp_path))
    model = load_model(tmp_path)
    LoraAdapter.of_model(model, LoraConfig(rank=2, alpha=2), tmp_path, seed=0)
    assert dict(weights_to_load(model)).keys() == right.keys()


def test_tied_head_of_a_plain_model_is_sent(tmp_path: Path):
    """Every entry of the state is there, a tied head too, and none is copied."""
    write_model("Qwen3", tmp_path)
    model = load_model(tmp_path)
    sent = dict(weights_to_load(model))
    assert sent.keys() == model.state_dict().keys() and "lm_head.weight" in sent
