"""Student logits on the support, beside prime-rl's output head: no second vocabulary pass, no second weight gradient.

prime-rl's fused head returns log p(label) and nothing else; logits of the vocabulary never exist. With z = W h / T,

    log p(id) = z_id - logZ = (z_id - z_label) + log p(label),

so the difference ``z_id - z_label`` at the K ids of the support, K + 1 rows of W per token, is all that is missing. It
is differentiable by hand, and the softmax part of the gradient flows through prime-rl's own log p(label).

Two things make it exact and cheap:

- Logits are rounded like the head rounds them (to the dtype of the matrix product), then soft-capped and divided by T:
  a label that stands in the support gets exactly log p(label), in bfloat16 too.
- ``W[ids]`` under autograd would allocate a second dense [V, d] weight gradient. Here the weight passes through ``Fold``
  on its way into prime-rl's head, and the few rows are added into the one dense gradient that comes back.
"""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def gathered(device: torch.device) -> int:
    """Elements of W gathered at once; more rows are walked in blocks. On a CPU what stays in its cache and in the
    allocator's own memory (4 MiB): larger blocks are fetched from the kernel and given back, page by page, each time.
    """
    return 1 << 20 if device.type == "cpu" else 1 << 24


class Rows:
    """The rows that take part, and what their backward leaves for the weight's gradient."""

    def __init__(
        self,
        ids: Int[Tensor, "n m"],
        index: Int[Tensor, " r"],
        inv_temperature: Float[Tensor, " r"],
    ):
        self.ids = ids
        self.index = index
        self.inv_temperature = inv_temperature
        self.hidden: Tensor | None = None
        self.grad_logits: Tensor | None = None

    def add_to(self, grad: Float[Tensor, "v d"]) -> None:
        """grad[id] += sum of grad_logits * hidden over the rows that read this id; float32 sums, one rounding."""
        if self.grad_logits is None or self.hidden is None:
            return
        flat = self.ids.reshape(-1)
        order = flat.argsort(stable=True)
        used, place, count = flat[order].unique_consecutive(return_inverse=True, return_counts=True)
        row = order.div(self.ids.shape[1], rounding_mode="floor")
        coefficient = self.grad_logits.reshape(-1)[order]
        hidden = self.hidden.float()
        step = max(1, gathered(grad.device) // grad.shape[1])
        ends = [0, *count.cumsum(0)[step - 1 :: step].tolist(), flat.numel()]
        for block, (start, end) in enumerate(pairwise(ends)):
            if start == end:
                continue
            ids = used[block * step : (block + 1) * step]
            part = torch.sparse_coo_tensor(
                torch.stack([place[start:end] - block * step, row[start:end]]),
                coefficient[start:end],
                (ids.numel(), hidden.shape[0]),
                check_invariants=False,
            )
            grad.index_add_(0, ids, torch.sparse.mm(part, hidden).to(grad.dtype))
        self.grad_logits = self.hidden = None


class Fold(torch.autograd.Function):
    """The weight, unchanged; in the backward the rows' contributions join the gradient that prime-rl's head returns.

    The second output is an order token: ``Logits`` takes it as an input, so autograd runs this node after both the head
    and ``Logits``. The gradient is changed in place: it is the fresh tensor that the head's backward just made.
    """

    @staticmethod
    def forward(ctx, weight, rows):
        ctx.rows = rows
        return weight.view_as(weight), weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _token):
        ctx.rows.add_to(grad)
        return grad, None


def folded(weight: Float[Tensor, "v d"], rows: Rows) -> tuple[Tensor, Tensor]:
    """The weight to hand to prime-rl's head, and the order token for ``support_logits``."""
    through, token = Fold.apply(weight, rows)
    # What torch.nn.Parameter's isinstance check reads: prime-rl's activation offloading (559b4477, act_offloading.py:135)
    # leaves parameters where they are, and would copy this view of one to the host and back in every micro batch.
    through._is_param = True
    return through, token


class Logits(torch.autograd.Function):
    """z_id - z_label of the rows that take part, [n, K]; 0 elsewhere."""

    @staticmethod
    def forward(ctx, hidden, token, weight, rows, softcap):
        h = hidden[rows.index]
        k = rows.ids.shape[1] - 1
        capped, slope = _logits(h, weight, rows.ids, softcap)
        out = capped.new_zeros((hidden.shape[0], k))
        out[rows.index] = (capped[:, :k] - capped[:, k:]) * rows.inv_temperature.unsqueeze(1)
        ctx.save_for_backward(h, slope)
        # Not among the saved tensors: prime-rl's activation offloading would copy the whole head to the host.
        ctx.weight = weight
        ctx.rows, ctx.shape = rows, hidden.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
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
            for part in _blocks(rows.ids, weight):
                w = _gather(weight, rows.ids[part]).float()
                grad_h[part] = torch.bmm(g[part].unsqueeze(1), w).squeeze(1).to(h.dtype)
            grad_hidden = h.new_zeros(ctx.shape).index_copy_(0, rows.index, grad_h)
        return grad_hidden, grad.new_zeros(()), None, None, None


def _logits(
    h: Tensor, weight: Tensor, ids: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Soft-capped logits of ``ids`` in float32 (float64 for float64), and the slope of the cap."""
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    z = torch.empty(ids.shape, dtype=dtype, device=h.device)
    for part in _blocks(ids, weight):
        w = _gather(weight, ids[part]).to(dtype)
        z[part] = torch.bmm(w, h[part].to(dtype).unsqueeze(2)).squeeze(2).to(h.dtype).to(dtype)
    if softcap is None:
        return z, None
    tanh = torch.tanh(z / softcap)
    return softcap * tanh, 1 - tanh**2


def _gather(weight: Tensor, ids: Tensor) -> Tensor:
    """weight[ids], copied a row at a time."""
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _blocks(ids: Tensor, weight: Tensor) -> list[slice]:
    step = max(1, gathered(ids.device) // (ids.shape[1] * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, ids.shape[0], step)]


def rows_of(
    ids: Int[Tensor, "n k"],
    labels: Int[Tensor, " n"],
    wanted: Bool[Tensor, " n"],
    temperature: Float[Tensor, " n"] | None,
) -> Rows | None:
    """The rows of ``wanted``, their support ids and label; None where nothing is wanted."""
    index = wanted.nonzero().squeeze(1)
    if index.numel() == 0:
        return None
    with_label = torch.cat([ids[index], labels[index].unsqueeze(1)], dim=1).long()
    one = torch.ones((), device=index.device) if temperature is None else temperature[index]
    return Rows(with_label, index, (1.0 / one).expand(index.shape[0]))


def support_logits(
    hidden: Float[Tensor, "n d"],
    token: Tensor,
    weight: Float[Tensor, "v d"],
    rows: Rows,
    softcap: float | None = None,
) -> Float[Tensor, "n k"]:
    """Student logits at the support minus the label's, [n, k]; the gradient reaches ``hidden``, and the weight's rows
    through the ``Fold`` that made ``token``.

    Raises:
        ValueError: an id outside the head's vocabulary.
    """
    highest = int(rows.ids.max())
    if highest >= weight.shape[0]:
        raise ValueError(
            f"The teacher's top-K holds the token id {highest} and the student's head has a vocabulary of "
            f"{weight.shape[0]}: student and teacher must share one tokenizer."
        )
    return Logits.apply(hidden, token, weight.detach(), rows, softcap)
