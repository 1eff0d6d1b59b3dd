"""Student logits on the support: no second vocabulary pass, no second dense weight gradient.

prime-rl's fused head returns log p(label) and nothing else; it never holds the logits of the whole
vocabulary. With z = W h / T,

    log p(id) = z_id - logZ = (z_id - z_label) + log p(label),

so only the difference ``z_id - z_label`` at the K ids of the support is missing: K + 1 rows of W
per token. Its gradient is written by hand. The softmax part of the gradient flows through
prime-rl's own log p(label).

Two things make it exact and cheap:

- Logits are rounded like the head rounds them (to the dtype of the matrix product), then
  soft-capped and divided by T. A label that is in the support gets exactly log p(label), in
  bfloat16 too.
- ``W[ids]`` under autograd would allocate a second dense [V, d] weight gradient. Here the weight
  passes through ``Fold`` on its way into prime-rl's head, and the few rows are added to the one
  dense gradient that comes back.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def gathered(device: torch.device) -> int:
    """Return how many elements of W to gather at once; more rows are computed in blocks.

    On a CPU a block fits its cache and the allocator's own memory (4 MiB). The kernel would map and
    unmap larger blocks, page by page, each time.
    """
    return 1 << 20 if device.type == "cpu" else 1 << 24


class SupportRows:
    """The positions that take part, and what their backward adds to the weight's gradient."""

    def __init__(
        self,
        ids: Int[Tensor, "n m"],
        index: Int[Tensor, " n"],
        inv_temperature: Float[Tensor, " n"],
    ):
        self.ids = ids  # support ids and, last, the label of each row, [n, K + 1]
        self.index = index  # position of each row in the hidden states, [n]
        self.inv_temperature = inv_temperature  # 1 / T of each row, [n]
        self.hidden: Tensor | None = (
            None  # [n, d], between ``LogitDifferences``' backward and ``Fold``'s
        )
        self.grad_logits: Tensor | None = None  # of the rows' logits, [n, K + 1], likewise

    def add_to(self, grad: Float[Tensor, "v d"]) -> None:
        """Add grad_logits * hidden of every row to ``grad[id]``: float32 sums, one rounding."""
        if self.grad_logits is None or self.hidden is None:
            return
        flat_ids = self.ids.reshape(-1)
        order = flat_ids.argsort(stable=True)
        unique_ids, place, count = flat_ids[order].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        row = order.div(self.ids.shape[1], rounding_mode="floor")
        coefficient = self.grad_logits.reshape(-1)[order]
        hidden = self.hidden.float()
        step = max(1, gathered(grad.device) // grad.shape[1])
        ends = [0, *count.cumsum(0)[step - 1 :: step].tolist(), flat_ids.numel()]
        for block, (start, end) in enumerate(pairwise(ends)):
            if start == end:
                continue
            block_ids = unique_ids[block * step : (block + 1) * step]
            # The argument of the same name warns in torch 2.11.
            with torch.sparse.check_sparse_tensor_invariants(False):
                matrix = torch.sparse_coo_tensor(
                    torch.stack([place[start:end] - block * step, row[start:end]]),
                    coefficient[start:end],
                    (block_ids.numel(), hidden.shape[0]),
                )
            grad.index_add_(0, block_ids, torch.sparse.mm(matrix, hidden).to(grad.dtype))
        self.grad_logits = self.hidden = None


class Fold(torch.autograd.Function):
    """Returns the weight; its backward adds the rows' part to the head's gradient of the weight.

    The second output is an order token. ``LogitDifferences`` takes it as an input, so autograd runs
    this node after both the head and that one. The gradient is changed in place: it is the new
    tensor that the head's backward has just made.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: SupportRows) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        return weight.view_as(weight), weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _token: Tensor) -> tuple[Tensor, None]:
        ctx.rows.add_to(grad)
        return grad, None


def folded(weight: Float[Tensor, "v d"], rows: SupportRows) -> tuple[Tensor, Tensor]:
    """Return the weight for prime-rl's head, and the order token for ``support_logits``."""
    through, token = Fold.apply(weight, rows)
    # torch.nn.Parameter's isinstance check reads this. prime-rl's activation offloading (559b4477,
    # act_offloading.py:135) skips parameters, and would copy this view of one to the host and back
    # in every micro-batch.
    through._is_param = True
    return through, token


class LogitDifferences(torch.autograd.Function):
    """Computes z_id - z_label of the rows that take part, [n, K]; 0 elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        token: Tensor,
        weight: Tensor,
        rows: SupportRows,
        softcap: float | None,
    ) -> Tensor:
        h = hidden[rows.index]
        k = rows.ids.shape[1] - 1
        capped, slope = _logits(h, weight, rows.ids, softcap)
        out = capped.new_zeros((hidden.shape[0], k))
        out[rows.index] = (capped[:, :k] - capped[:, k:]) * rows.inv_temperature.unsqueeze(1)
        ctx.save_for_backward(h, slope)
        # Not a saved tensor: prime-rl's activation offloading would copy the head to the host.
        ctx.weight = weight
        ctx.rows, ctx.shape = rows, hidden.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        h, slope = ctx.saved_tensors
        rows, weight = ctx.rows, ctx.weight
        g = grad[rows.index] * rows.inv_temperature.unsqueeze(1)
        g = torch.cat([g, -g.sum(dim=1, keepdim=True)], dim=1)
        if slope is not None:
            g = g * slope
        rows.grad_logits, rows.hidden = g, h
        grad_hidden = None
        if ctx.needs_input_grad[0]:
            grad_h = torch.empty_like(h)
            for block in _blocks(rows.ids, weight):
                w = _gather(weight, rows.ids[block]).float()
                grad_h[block] = torch.bmm(g[block].unsqueeze(1), w).squeeze(1).to(h.dtype)
            grad_hidden = h.new_zeros(ctx.shape).index_copy_(0, rows.index, grad_h)
        return grad_hidden, grad.new_zeros(()), None, None, None


def _logits(
    h: Tensor, weight: Tensor, ids: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return soft-capped logits of ``ids`` and the cap's slope: float32, or float64 as ``h`` is."""
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    z = torch.empty(ids.shape, dtype=dtype, device=h.device)
    for block in _blocks(ids, weight):
        w = _gather(weight, ids[block]).to(dtype)
        product = torch.bmm(w, h[block].to(dtype).unsqueeze(2)).squeeze(2)
        z[block] = product.to(h.dtype).to(dtype)
    if softcap is None:
        return z, None
    tanh = torch.tanh(z / softcap)
    return softcap * tanh, 1 - tanh**2


def _gather(weight: Tensor, ids: Tensor) -> Tensor:
    """Return weight[ids], copied a row at a time."""
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _blocks(ids: Tensor, weight: Tensor) -> list[slice]:
    step = max(1, gathered(ids.device) // (ids.shape[1] * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, ids.shape[0], step)]


def support_rows(
    ids: Int[Tensor, "seq k"],
    labels: Int[Tensor, " seq"],
    scored: Bool[Tensor, " seq"],
    temperature: Float[Tensor, " seq"] | None,
) -> SupportRows | None:
    """Return the rows where ``scored`` is True, on the device of ``labels``; None without any.

    Ids and ``scored`` on the CPU cost the accelerator no synchronization.
    """
    index = scored.nonzero().squeeze(1)
    if index.numel() == 0:
        return None
    device = labels.device
    support_ids = ids[index].to(device)
    index = index.to(device)
    with_label = torch.cat([support_ids, labels[index].unsqueeze(1)], dim=1).long()
    if temperature is None:
        inv_temperature = torch.ones(index.shape[0], device=device)
    else:
        inv_temperature = 1.0 / temperature.to(device)[index]
    return SupportRows(with_label, index, inv_temperature)


def support_logits(
    hidden: Float[Tensor, "seq d"],
    token: Tensor,
    weight: Float[Tensor, "v d"],
    rows: SupportRows,
    softcap: float | None = None,
) -> Float[Tensor, "seq k"]:
    """Return student logits at the support minus the label's, [seq, K]; 0 outside ``rows``.

    The gradient reaches ``hidden``, and the weight's rows through the ``Fold`` that made ``token``.
    Ids have to be in the vocabulary.
    """
    return LogitDifferences.apply(hidden, token, weight.detach(), rows, softcap)
