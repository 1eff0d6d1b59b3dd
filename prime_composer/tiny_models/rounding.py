"""Round the weights of a model to few bits: once, or again after every step of the optimizer.

A group of weights w has 2^bits levels, j = 0 ... 2^bits - 1, and each weight becomes the nearest:

    level_j = min(w) + j (max(w) - min(w)) / (2^bits - 1)

This is asymmetric round-to-nearest, without calibration data. The smallest and the largest weight
of a group stay exactly what they are. So rounded weights have the same levels again, and rounding
them once more changes no bit. The result is stored in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prime_composer.backends.hf_model import linear_layers
from prime_composer.recipe.prepare import QuantizeConfig


class Rounded(NamedTuple):
    """How much of a model was rounded."""

    rounded: int  # weights of the linear layers
    weights: int  # weights of the whole model


@dataclass
class LatentWeights:
    """The float32 weights behind a model whose linear layers stay rounded while it learns.

    The model always has the rounded weights, so that all who read it see the model as served:
    forward pass, sampler, checks and checkpoint. A step of quantization-aware training is

        gradient of the loss at round(latent); optimizer's step on latent; model = round(latent)

    This is the straight-through estimator, which takes the derivative of rounding for 1
    (https://arxiv.org/abs/1308.3432). Embeddings, output head and norms train as ever.
    """

    config: QuantizeConfig  # bits and groups
    layers: Mapping[str, nn.Linear]  # the model's linear layers by name
    weights: Mapping[str, nn.Parameter]  # the latent weight of each

    @classmethod
    @torch.no_grad()
    def of_model(cls, model: nn.Module, config: QuantizeConfig) -> "LatentWeights":
        """Keep a model's weights as the latent ones, and round the model."""
        layers = layers_to_round(model, config)
        latent = cls(
            config,
            layers,
            {name: nn.Parameter(layer.weight.clone()) for name, layer in layers.items()},
        )
        latent.round()
        return latent

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's parameters, with the latent weights in the places of rounded ones."""
        latent = {id(layer.weight): self.weights[name] for name, layer in self.layers.items()}
        return [latent.get(id(parameter), parameter) for parameter in model.parameters()]

    def share(self, model: nn.Module) -> Rounded:
        """Return how much of a model is rounded. A tied weight counts once."""
        weights = sum(weight.numel() for weight in model.parameters())
        return Rounded(size_of(self.layers), weights)

    def take_gradients(self) -> None:
        """Move the gradients at the rounded weights to the latent ones."""
        for name, layer in self.layers.items():
            self.weights[name].grad, layer.weight.grad = layer.weight.grad, None

    @torch.no_grad()
    def round(self) -> None:
        """Give the model its weights, rounded."""
        bits, group = self.config.bits, self.config.group
        for name, layer in self.layers.items():
            layer.weight.copy_(round_to_nearest(self.weights[name], bits, group))

    def state_dict(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take latent weights, which round to the weights of the model."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])


@torch.no_grad()
def round_model(model: nn.Module, config: QuantizeConfig) -> int:
    """Round the linear layers of a model in place, and return how many weights they have."""
    layers = layers_to_round(model, config)
    for layer in layers.values():
        layer.weight.copy_(round_to_nearest(layer.weight, config.bits, config.group))
    return size_of(layers)


def size_of(layers: Mapping[str, nn.Linear]) -> int:
    return sum(layer.weight.numel() for layer in layers.values())


def layers_to_round(model: nn.Module, config: QuantizeConfig) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name, after a check that the groups fit them."""
    source: Any = model
    layers = dict(linear_layers(model))
    if not layers:
        raise ValueError(
            f"{source.name_or_path} has no linear layers whose weights could be rounded"
        )
    for name, layer in layers.items():
        if layer.in_features % config.group:
            raise ValueError(
                f"quantize.group = {config.group} does not divide the {layer.in_features} inputs "
                f"of {name} in {source.name_or_path}; choose a divisor of them"
            )
    return layers


def round_to_nearest(
    weight: Float[Tensor, "rows columns"], bits: int, group: int
) -> Float[Tensor, "rows columns"]:
    """Return weights rounded to ``bits``, in groups of ``group`` along the columns (the inputs).

    The result has the weights' dtype. Rounding it again gives the same, bit for bit, in float16,
    bfloat16 and float32.
    """
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    # Half precision has too few digits for what lies between.
    wide = torch.promote_types(weight.dtype, torch.float32)
    # A tensor on the device, for a GPU would multiply by the reciprocal of a Python number.
    last = torch.tensor(2**bits - 1, dtype=wide, device=weight.device)
    step = (high.to(wide) - low.to(wide)).div_(last)
    tiny = torch.finfo(wide).tiny
    # A group of equal weights has one level.
    index = (grouped.to(wide) - low).div_(step.clamp_min(tiny)).round_()
    is_last = index == last
    # The last level is off by a rounding, and a group's maximum must not be.
    rounded = torch.where(is_last, high, index.mul_(step).add_(low).to(weight.dtype))
    subnormal = (step < tiny).squeeze(-1) & (low < high).squeeze(-1)
    if subnormal.any() and wide != torch.float64:
        exact = grouped[subnormal].double()
        rounded[subnormal] = round_to_nearest(exact, bits, group).to(weight.dtype)
    return rounded.flatten(1)
