"""Log-probs of chosen token ids from hidden states, without the logits of a whole batch.

For hidden states h [n, d], head weight W [V, d] with a bias b, a scale s and temperature T:

    z_i = (s / T) cap(h_i W^T + b),    cap(x) = softcap tanh(x / softcap), or x without one

    out[i, j] = z_i[ids[i, j]] - logsumexp_v z_i[v]

    d out[i, j] / d z_i[v] = 1[v = ids[i, j]] - softmax(z_i)[v]

    d z_i[v] / d (h_i W^T + b)[v] = (s / T) (1 - tanh(x / softcap)^2)

The vocabulary is processed in chunks. The forward keeps a running maximum and sum per token (online
softmax, Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867) and gathers the chosen logits of each chunk. The backward computes
each chunk's logits again instead of storing them. This takes four matrix products, against three of
a plain head, and a buffer of [token block, chunk] instead of several of [n, V].

Left out: second derivatives.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_composer.contract import Logits
from prime_composer.fused import fused

T = TypeVar("T")

BLOCKS = {"cpu": (1024, 8192), "cuda": (2048, 16_384)}
"""Rows and vocabulary entries of a block, per device type: 32 MiB of float32, and 128 MiB on a GPU,
where the host starts the kernels of a smaller block more slowly than they compute."""

CAST = 2**20
"""Weights of a half-precision head that a CPU has in float32 at once: 4 MiB stay in its cache."""


def selected_logprobs(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    token_ids: Int[Tensor, "n m"],
    temperature: float = 1.0,
    block: tuple[int, int] | None = None,
    *,
    bias: Float[Tensor, " v"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "n m"]:
    """Return log softmax(z) at ``token_ids``, z = scale cap(hidden weight^T + bias) / temperature.

    The softmax is over the full vocabulary. The gradients of an id in several columns of a row add
    up. The dtype of the inputs decides the arithmetic, under autocast too.

    Args:
        hidden: final hidden states (after the last norm), [n, d].
        weight: the head's weight, [V, d], of the same dtype.
        token_ids: ids in [0, V), [n, m].
        temperature: divides the logits.
        block: rows and vocabulary entries of a block, by default the device's of ``BLOCKS``. It
            changes speed and memory, not the result.
        bias: the head's, [V] (Phi).
        softcap: bound of the logits before the scale (Gemma 2); None for none.
        scale: factor of the logits (Cohere, Granite).

    Returns:
        [n, m], in float32 for half precision inputs (logits and sums are float32), otherwise in
        their own dtype.

    Raises:
        ValueError: an id outside the vocabulary, shapes or dtypes that do not fit, or a temperature
            or size of 0 or less.
    """
    block = of_device(BLOCKS, hidden.device) if block is None else block
    _check(hidden, weight, token_ids, temperature, block)
    form = softcap, scale / temperature
    return _SelectedLogprobs.apply(hidden, weight, bias, token_ids, form, block)


def logprobs_at(
    logits: Logits, token_ids: Int[Tensor, "n m"], temperature: float = 1.0
) -> Float[Tensor, "n m"]:
    """Return ``selected_logprobs`` of a head over hidden states."""
    return selected_logprobs(
        *(logits.hidden, logits.weight, token_ids, temperature),
        bias=logits.bias,
        softcap=logits.softcap,
        scale=logits.scale,
    )


def _check(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, block: tuple[int, int]
) -> None:
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; cast one to the other's dtype."
        )
    if token_ids.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"token_ids has {token_ids.shape[0]} rows for {hidden.shape[0]} hidden states."
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; a log-probability needs one above 0.")
    if min(block) < 1:
        raise ValueError(f"block is {block}: rows and vocabulary entries, both at least 1.")
    if token_ids.numel():
        low, high = (int(bound) for bound in token_ids.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(
                f"token_ids reach from {low} to {high} and the head has a vocabulary of "
                f"{weight.shape[0]}; student and teacher must share one vocabulary, and padding "
                "ids must be masked out before."
            )


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast in a method: it would round float32 logits to bfloat16."""

    @wraps(method)
    def run(ctx: Any, first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return method(ctx, first, *rest)

    return run


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        form: tuple[float | None, float],
        block: tuple[int, int],
    ) -> Tensor:
        token_block, chunk = block
        n, vocab = hidden.shape[0], weight.shape[0]
        dtype = accumulation_dtype(hidden)
        token_ids = token_ids.long()
        highest = hidden.new_full((n,), -torch.inf, dtype=dtype)
        total = hidden.new_zeros((n,), dtype=dtype)
        selected = hidden.new_zeros(token_ids.shape, dtype=dtype)
        for v0 in range(0, vocab, chunk):
            w, b = weight[v0 : v0 + chunk], None if bias is None else bias[v0 : v0 + chunk]
            for i0 in range(0, n, token_block):
                rows = slice(i0, i0 + token_block)
                logits = finished(matmul(hidden[rows], w.T), b, *form)
                inside, column = columns_in_chunk(token_ids[rows], v0, w.shape[0])
                selected[rows] = torch.where(inside, logits.gather(1, column), selected[rows])

                highest[rows], total[rows] = _added(logits, highest[rows], total[rows])
        # Subtract the maximum and log(total) one by one: at large logits their sum would round.
        ctx.save_for_backward(hidden, weight, bias, token_ids, highest, total.unsqueeze(1))
        ctx.settings = form, token_block, chunk
        return selected - highest.unsqueeze(1) - total.log().unsqueeze(1)

    # The decorators' stubs make ``ctx`` positional.
    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, highest, total = ctx.saved_tensors
        form, token_block, chunk = ctx.settings
        softcap, factor = form
        n, vocab = hidden.shape[0], weight.shape[0]
        dtype = accumulation_dtype(hidden)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad * factor
        row_grad = grad.sum(dim=1, keepdim=True)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = hidden.new_zeros(vocab, dtype=dtype) if needs_bias else None
        for v0 in range(0, vocab, chunk):
            w, b = weight[v0 : v0 + chunk], None if bias is None else bias[v0 : v0 + chunk]
            grad_w = None
            for i0 in range(0, n, token_block):
                rows = slice(i0, i0 + token_block)
                h = hidden[rows]
                dlogits = finished(matmul(h, w.T), b, *form)
                slope = None if softcap is None else 1 - (dlogits / (factor * softcap)).square_()
                _shares_in_place(dlogits, highest[rows], -row_grad[rows] / total[rows])
                inside, column = columns_in_chunk(token_ids[rows], v0, w.shape[0])
                dlogits.scatter_add_(1, column, torch.where(inside, grad[rows], 0.0))
                if slope is not None:
                    dlogits *= slope
                if grad_bias is not None:
                    grad_bias[v0 : v0 + chunk] += dlogits.sum(0)
                if h.is_cuda:
                    dlogits = dlogits.to(h.dtype)  # once for both products
                if grad_hidden is not None:
                    grad_hidden[rows] += matmul(dlogits, w)
                if needs_weight:
                    part = matmul(dlogits.T, h)
                    grad_w = part if grad_w is None else grad_w.add_(part)
            if grad_w is not None and grad_weight is not None:
                grad_weight[v0 : v0 + chunk] = grad_w
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def finished(
    products: Tensor, bias: Tensor | None, softcap: float | None, factor: float = 1.0
) -> Tensor:
    """Return factor cap(products + bias), written over the products."""
    if bias is not None:
        products += bias.to(products)
    if softcap is not None:
        products.div_(softcap).tanh_().mul_(softcap)
    if factor != 1.0:
        products *= factor
    return products


@fused
def _added(logits: Tensor, highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return maximum and sum with those of a chunk, whose logits are overwritten."""
    new_highest = torch.maximum(highest, logits.amax(dim=1))
    rescale = torch.exp(highest - new_highest)  # exp(-inf) = 0 at the first chunk
    logits -= new_highest.unsqueeze(1)
    return new_highest, rescale * total + logits.exp_().sum(dim=1)


@fused
def _shares_in_place(logits: Tensor, highest: Tensor, factor: Tensor) -> None:
    """Write a factor times exp(logits - highest)."""
    logits -= highest.unsqueeze(1)
    logits.exp_().mul_(factor)


def of_device(sizes: Mapping[str, T], device: torch.device) -> T:
    """Return the sizes of a CPU, or those of a GPU."""
    return sizes["cpu" if device.type == "cpu" else "cuda"]


def accumulation_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def columns_in_chunk(token_ids: Tensor, v0: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which ids are in the chunk from ``v0``, and their column (elsewhere any valid one)."""
    column = token_ids - v0
    inside = (column >= 0) & (column < size)
    return inside, column.clamp_(0, size - 1)


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b``, in float32 for half precision: bfloat16 logits are off by up to 0.1 nat.

    ``out`` is the result's memory, of its dtype.
    """
    half = next((t.dtype for t in (a, b) if t.dtype in (torch.bfloat16, torch.float16)), None)
    if half is None:
        return torch.mm(a, b, out=out)
    if a.is_cuda:  # tensor cores take half precision operands and accumulate in float32
        return torch.mm(a.to(half), b.to(half), out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def whole_logits(logits: Logits) -> Float[Tensor, "n v"]:
    """Return the logits of a block of rows, as ``head_logits`` does."""
    products = head_logits(logits.hidden, logits.weight)
    return finished(products, logits.bias, logits.softcap, logits.scale)


def head_logits(
    hidden: Float[Tensor, "... d"], weight: Float[Tensor, "v d"]
) -> Float[Tensor, "... v"]:
    """Return hidden weight^T, in float32 for half precision, without a float32 copy of the head.

    It is for blocks of rows, and has no gradient.
    """
    if hidden.dtype == weight.dtype and accumulation_dtype(weight) == weight.dtype:
        return hidden @ weight.T
    rows = hidden.reshape(-1, hidden.shape[-1])
    if hidden.is_cuda:
        return matmul(rows, weight.T).view(*hidden.shape[:-1], -1)
    rows, size = rows.float(), max(1, CAST // weight.shape[1])
    logits = rows.new_empty(len(rows), len(weight))
    cast = rows.new_empty(size, weight.shape[1])
    for first in range(0, len(weight), size):
        part = weight[first : first + size]
        columns = logits[:, first : first + size]
        torch.mm(rows, cast[: len(part)].copy_(part).T, out=columns)
    return logits.view(*hidden.shape[:-1], -1)
