"""Models in float64, for the reference programs beside it. Imports nothing of this package."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load(path, weights=None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    if weights is not None:
        files = list(Path(weights).glob("*.safetensors"))
        assert files, f"no weights in {weights}"
        for file in files:
            model.load_state_dict(load_file(file), strict=False)
    return model
