"""Read the output head of a model in vLLM's worker.

``compute_logits`` is called once, and what it passes to vLLM's ``LogitsProcessor`` is noted. So a
tied head, a head of another name and a bias are found in every architecture. With tensor
parallelism each worker has a part of the rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prime_composer.scoring.wire import row_digests

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

HASHED_ROWS = 4096  # Rows of the head that are on the CPU at once


@dataclass(frozen=True)
class Head:
    """A worker's part of the output head."""

    weight: Tensor  # its rows, [rows, d]
    bias: Tensor | None  # of its rows, [rows]; None without one
    first: int  # the first row's id
    scale: float  # factor of the logits
    softcap: float | None  # cap of the logits; None for none
    computed_in: torch.dtype  # the dtype of the multiplication


def find_head(model: nn.Module) -> Head:
    """Return what a model of vLLM multiplies hidden states with. It has to be one plain matrix."""
    processors = [part for part in model.modules() if type(part).__name__ == "LogitsProcessor"]
    if len(processors) != 1:
        raise ValueError(f"the model has {len(processors)} logits processors, not one")
    processor: Any = processors[0]
    lm_head, bias = _noted(model, processor)
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPE_NAMES or weight.ndim != 2:
        raise ValueError("its output head is quantized")
    shard = lm_head.shard_indices
    first, last = shard.org_vocab_start_index, shard.org_vocab_end_index
    return Head(
        weight.detach()[: last - first],
        None if bias is None else bias.detach()[: last - first],
        first,
        float(processor.scale),
        None if processor.soft_cap is None else float(processor.soft_cap),
        getattr(processor, "head_dtype", None) or weight.dtype,
    )


def head_dtype_of(config: Any) -> str | None:
    """Return the dtype of the logits by vLLM's model config; None where it does not say."""
    if getattr(config, "quantization", None) or not hasattr(config, "head_dtype"):
        return None
    return str(config.head_dtype).removeprefix("torch.")


def _noted(model: Any, processor: Any) -> tuple[Any, Any]:
    """Return the head and the bias that a model passes to its processor. Nothing is multiplied.

    A kernel that is given a wrong width of hidden states reads and writes beyond its memory.
    """
    parameter = next(model.parameters())
    hidden, logits = torch.zeros(2, 1, 1, dtype=parameter.dtype, device=parameter.device)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return logits

    processor.forward = note
    try:
        with torch.inference_mode():
            result = model.compute_logits(hidden)
    finally:
        del processor.forward
    ((args, kwargs),) = calls
    taken = args[1] if len(args) > 1 else kwargs["hidden_states"]
    if taken is not hidden or result is not logits:
        raise ValueError("its logits are more than hidden states times one matrix")
    lm_head = args[0] if args else kwargs["lm_head"]
    return lm_head, args[2] if len(args) > 2 else kwargs.get("embedding_bias")


def worker_head(worker: Any, first: int, last: int) -> dict[str, Any]:
    """Return the head's facts, or some of its rows, as a method of vLLM's worker.

    Everything is of types that vLLM sends between its processes without pickling.
    """
    has_second = hasattr(getattr(worker, "model_runner", None), "prompt_logprobs_worker")
    runner = "second" if has_second else "first"
    try:
        head = find_head(worker.get_model())
    except Exception as error:  # of whatever a model of vLLM may be; its engine goes on
        return {"error": str(error) or type(error).__name__, "runner": runner}

    def bits(rows: slice) -> tuple[Any, Any]:
        bias = None if head.bias is None else bits_of(head.bias[rows].to(head.weight.dtype))
        return bits_of(head.weight[rows]), bias

    if first == last:
        digests = [
            row_digests(*bits(slice(begin, begin + HASHED_ROWS)))
            for begin in range(0, len(head.weight), HASHED_ROWS)
        ]
        return {
            "first": head.first,
            "rows": len(head.weight),
            "columns": head.weight.shape[1],
            "dtype": DTYPE_NAMES[head.weight.dtype],
            "digests": b"".join(digests),
            "scale": head.scale,
            "softcap": head.softcap,
            "bias": head.bias is not None,
            "computed_in": DTYPE_NAMES[head.computed_in],
        }
    weight, bias = bits(slice(max(0, first - head.first), max(0, last - head.first)))
    return {
        "first": max(first, head.first),
        "dtype": DTYPE_NAMES[head.weight.dtype],
        "weight": weight.tobytes(),
        "bias": b"" if bias is None else bias.tobytes(),
        "runner": runner,
    }


def bits_of(tensor: Tensor) -> Any:
    """Return a tensor on the CPU in NumPy, [n] or [n, columns], as integers of the same width."""
    integers = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.contiguous().cpu().view(integers).numpy()
