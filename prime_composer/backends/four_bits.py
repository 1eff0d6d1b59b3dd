"""Linear layers whose frozen weights have 4 bits, NF4, by bitsandbytes (QLoRA)."""

from typing import Any

import torch
from torch import Tensor, nn

from prime_composer.extras import pip_install


def import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise ImportError(
            f"student.load = 'nf4' needs bitsandbytes: {pip_install('nf4')}."
        ) from error
    return bitsandbytes


def four_bit_config() -> Any:
    """Return transformers' config for weights in 4 bits and products in float32."""
    import_bitsandbytes()
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers in 4 bits by name. bitsandbytes need not be there where there are none."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "weight", None), "quant_state")
    }


def compute_in_float32(model: nn.Module) -> None:
    """Let layers in 4 bits, a stored checkpoint's too, have no kernels in bfloat16 on a CPU.

    bitsandbytes uses them where no gradient is asked for, and rounds a layer's scales for it, which
    stay rounded.
    """
    for layer in four_bit_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


@torch.no_grad()
def plain_weight(layer: Any) -> Tensor:
    """Return the weight that a layer multiplies with, in float32."""
    dequantize = import_bitsandbytes().functional.dequantize_4bit
    weight: Tensor = dequantize(layer.weight.data, layer.weight.quant_state)
    return weight.float()
