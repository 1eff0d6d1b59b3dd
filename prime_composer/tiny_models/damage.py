"""Damage an existing model: remove decoder layers, round weights. Distillation repairs the copy."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from prime_composer.backends.hf_model import load_model, load_tokenizer, without_progress_bars
from prime_composer.recipe.prepare import DamagedConfig, check_dropped
from prime_composer.tiny_models.rounding import round_model

PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
"""Keys of a config that have one entry per layer, where a model has them."""


def damage_model(config: DamagedConfig, folder: Path) -> dict[str, int]:
    """Write a damaged copy of a model, and its tokenizer, into ``folder``.

    Returns how many weights were rounded, and how many weights and decoder layers are left.
    """
    model: Any = load_model(config.source, device="cpu")
    sizes = model.config.get_text_config()
    if config.drop_layers:
        drop_layers(model, config.drop_layers, config.source)
    rounded = 0 if config.quantize is None else round_model(model, config.quantize)
    tokenizer = load_tokenizer(config.source)
    with without_progress_bars():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    weights = sum(weight.numel() for weight in model.parameters())
    return {"rounded": rounded, "weights": weights, "layers": sizes.num_hidden_layers}


def drop_layers(model: nn.Module, dropped: Collection[int], source: str) -> None:
    """Remove decoder layers from a causal language model and its config, in place.

    It is for saving: its layers' own numbers, where a cache finds them, are those of the next load.
    """
    net: Any = model
    config = net.config.get_text_config()
    count = config.num_hidden_layers
    check_dropped(dropped, count, source)
    lists = (one for one in net.modules() if isinstance(one, nn.ModuleList) and len(one) == count)
    layers = next(lists, None)
    if layers is None:
        raise ValueError(f"drop_layers: {source} has no list of its {count} decoder layers to cut")
    for index in sorted(dropped, reverse=True):
        del layers[index]
    config.num_hidden_layers = len(layers)
    for key in PER_LAYER:
        if (values := getattr(config, key, None)) is not None:
            left = [value for index, value in enumerate(values) if index not in dropped]
            setattr(config, key, left)
