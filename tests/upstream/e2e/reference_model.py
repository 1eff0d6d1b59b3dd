"""Models in float64, for the reference programs beside it. Imports nothing of this package."""

from pathlib import Path

import torch
from adapters import merge  # beside this program
from experts import in_one_tensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load(path, weights=None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # the default has no float64
    if weights is not None and (Path(weights) / "adapter_config.json").exists():
        merge(model, dict(model.state_dict()), weights)
    elif weights is not None:
        files = list(Path(weights).glob("*.safetensors"))
        assert files, f"no weights in {weights}"
        for file in files:
            unknown = model.load_state_dict(in_one_tensor(load_file(file)), strict=False)
            assert not unknown.unexpected_keys, unknown
    return model
