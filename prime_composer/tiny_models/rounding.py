"""Round the weights of an existing model to few bits: a student that distillation repairs.

A group of weights w has 2^bits levels, j = 0 ... 2^bits - 1, and each weight becomes the nearest:

    level_j = min(w) + j (max(w) - min(w)) / (2^bits - 1)

This is asymmetric round-to-nearest, without calibration data. The result is stored in float32, for
the student trains every weight.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prime_composer.recipe.prepare import QuantizeConfig


def round_layers(model: nn.Module, config: QuantizeConfig, source: str) -> int:
    """Round the linear layers of a model in place. ``source`` is its name in messages.

    Returns:
        The number of rounded weights.

    Raises:
        ValueError: there are no linear layers, or a group divides none of their inputs.
    """
    layers = dict(linear_layers(model))
    if not layers:
        raise ValueError(f"{source} has no linear layers whose weights could be rounded")
    for name, layer in layers.items():
        if layer.in_features % config.group:
            raise ValueError(
                f"quantize.group = {config.group} does not divide the {layer.in_features} inputs "
                f"of {name} in {source}; choose a divisor of them"
            )
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.copy_(round_to_nearest(layer.weight, config.bits, config.group))
    return sum(layer.weight.numel() for layer in layers.values())


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a causal language model by name, without its output head."""
    net: Any = model
    head = net.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def round_to_nearest(
    weight: Float[Tensor, "rows columns"], bits: int, group: int
) -> Float[Tensor, "rows columns"]:
    """Return weights rounded to ``bits``, in groups of ``group`` along the columns (the inputs)."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    # A group of equal weights has one level.
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(weight.dtype).tiny)
    return (((grouped - low) / step).round() * step + low).flatten(1)
