"""Merge LoRA adapters, as prime-rl's trainer sends them. Imports nothing of this package."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def scale_of(folder):
    """Return the scale of what an adapter adds."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    return config["lora_alpha"] / config["r"]


def pairs(folder):
    """Return by name of a weight the two factors of what its adapter adds, the scale in the left.

    They are [rows, rank] and [rank, columns], in float64.
    """
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    scale, found = scale_of(folder), {}
    for name, right in tensors.items():
        module, is_right, _ = name.partition(".lora_A.")
        if is_right:
            left = tensors[name.replace(".lora_A.", ".lora_B.")]
            weight = module.removeprefix("base_model.model.") + ".weight"
            found[weight] = scale * left.double(), right.double()
    return found


@torch.no_grad()
def merge(model, base, folder):
    """Set the weights of a model to those of ``base``, a state dict, plus an adapter's."""
    for name, (left, right) in pairs(folder).items():
        weight = model.get_parameter(name)
        weight.copy_((base[name].double() + left @ right).to(weight.dtype))
