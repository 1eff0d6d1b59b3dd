"""Read a model with a LoRA adapter as plain models: the merged one, and its base.

An adapted layer computes y = x W^T + (alpha / rank) x A^T B^T. It is the plain layer of weight

    W + (alpha / rank) B A

in exact arithmetic. In the float32 of a student that trains, a merged weight is rounded once, by
6e-8 of its size. A model without an adapter is its own merged model. Nothing here needs peft.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prime_composer.backends.four_bits import four_bit_layers, plain_weight

ADAPTER = "default"  # What peft calls the only adapter of a model


def is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


@torch.no_grad()
def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model as it is served, by its name in transformers' model.

    A merged weight is made when it is asked for, so that a caller who takes one after the other
    holds one at a time.
    """
    four_bits = four_bit_layers(model)
    for name, value in model.state_dict().items():
        owner, _, state = name.partition(".weight")
        if owner in four_bits:
            if state:
                continue
            value = plain_weight(four_bits[owner])
        layer_name, base, parameter = name.rpartition("base_layer.")
        layer: Any = model.get_submodule(layer_name.rstrip(".")) if base else None
        if base and is_adapted(layer):
            merges = parameter == "weight"
            merged = value + layer.get_delta_weight(ADAPTER) if merges else value
            yield layer_name + parameter, merged
        elif ".lora_" not in name:
            yield name, value


WITHOUT_HEAD = ("Gemma2ForCausalLM", "Gemma3nForCausalLM")
"""vLLM multiplies with the embeddings of these, which are their heads, and takes no other."""


def weights_to_load(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return every weight of a model as it is served, as its checkpoint has them.

    transformers joins the experts of a layer into one tensor, for example. A model without such a
    conversion gives ``weights_of``, one at a time.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    net: Any = model
    weights = weights_of(model)
    if type(model).__name__ in WITHOUT_HEAD:
        weights = ((name, weight) for name, weight in weights if name != "lm_head.weight")
    if not (getattr(net, "_weight_conversions", None) or get_model_conversion_mapping(net)):
        return weights
    return revert_weight_conversion(net, dict(weights)).items()


def base_of(model: nn.Module) -> nn.Module:
    """Return a model without its adapter. It has the very weights of ``model``, and copies none."""
    if is_adapted(model):
        layer: Any = model
        return layer.base_layer
    view = copy.copy(model)
    children = {
        name: None if child is None else base_of(child) for name, child in model._modules.items()
    }
    view.__dict__["_modules"] = children
    return view


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a plain model of the weights that ``model`` is served with, which does not train."""
    plain = copy.deepcopy(base_of(model)).requires_grad_(False)
    plain.load_state_dict(dict(weights_of(model)))
    return plain
