"""Logits block by block, sums over blocks, and the student's gradients from them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prime_composer.contract import Logits, TwoHeads
from prime_composer.divergences import MAX_LOG_MASS
from prime_composer.lm_head import accumulation_dtype, matmul

LOG_BUCKET_FLOOR = math.log(-MAX_LOG_MASS)  # Of padding ids, as the tail's in ``divergences``

BLOCKS = {"cpu": (256, 512), "cuda": (4096, 8192)}
"""Rows and vocabulary entries of a block, per device type. On a CPU a block fits the cache, so that
the elementwise passes over it take little next to the matrix products."""


class Plan:
    """Two heads, all of whose rows count, and the blocks in which they are compared.

    Every teacher has a weight in every row. A block has ``token_block`` rows and ``chunk``
    vocabulary entries.
    """

    def __init__(self, heads: TwoHeads, token_block: int, chunk: int):
        hidden, sizes = heads.student.hidden, [side.size for side in heads.sides]
        self.heads, self.token_block, self.chunk = heads, token_block, chunk
        self.n, self.device = len(hidden), hidden.device
        self.dtype = accumulation_dtype(hidden)  # of the elementwise work and of the results
        self.common = min(sizes)  # number of ids that every head has
        self.has_bucket = max(sizes) > self.common

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first id of each chunk, and the one after its last."""
        for first in range(start, stop, self.chunk):
            yield first, min(first + self.chunk, stop)

    def row_blocks(self) -> Iterator[slice]:
        for first in range(0, self.n, self.token_block):
            yield slice(first, min(first + self.token_block, self.n))

    def column(self, values: Tensor) -> Tensor:
        """Return a tensor [n] as [n, 1], in the dtype of the elementwise work."""
        return values.to(self.dtype).unsqueeze(1)

    def student(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Side":
        """Return the student's side, of tensors that autograd has saved."""
        return Side(replace(self.heads.student, hidden=hidden, weight=weight, bias=bias), self)


class Buffer:
    """Memory of one block, allocated at its first use. Each use overwrites the previous one's."""

    def __init__(self, plan: Plan):
        self.memory = torch.empty(0, dtype=plan.dtype, device=plan.device)

    def block(self, height: int, width: int) -> Tensor:
        """Return the memory as [height, width]."""
        if self.memory.numel() < height * width:
            self.memory = self.memory.new_empty(height * width)
        return self.memory[: height * width].view(height, width)


class Side:
    """The logits of one model, block by block: hidden states times a head."""

    def __init__(self, logits: Logits, plan: Plan):
        self.plan, self.buffer, self.slopes = plan, Buffer(plan), Buffer(plan)
        self.settings, self.size = logits, logits.size
        self.hidden = _operand(logits.hidden)
        self.factor = logits.scale / plan.heads.temperature

    def chunk(self, start: int, stop: int) -> Tensor:
        return _operand(self.settings.weight[start:stop].to(self.hidden.device))

    def logits(self, rows: slice, chunk: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        """Return a block, until the next one, and the derivative of the cap if there is one."""
        size = rows.stop - rows.start, chunk.shape[0]
        logits = self.buffer.block(*size)
        slope = None if self.settings.softcap is None else self.slopes.block(*size)
        self._fill(logits, slope, rows, chunk, start)
        return logits, slope

    def whole_rows(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the logits of all ids, and the derivative of the cap if there is one."""
        size = rows.stop - rows.start, self.size
        logits = self.buffer.block(*size)
        slopes = None if self.settings.softcap is None else self.slopes.block(*size)
        for first, last in self.plan.chunks(0, self.size):
            slope = None if slopes is None else slopes[:, first:last]
            self._fill(logits[:, first:last], slope, rows, self.chunk(first, last), first)
        return logits, slopes

    def _fill(
        self, out: Tensor, slope: Tensor | None, rows: slice, chunk: Tensor, start: int
    ) -> None:
        """Write the logits of a block, and the derivative of the cap."""
        settings = self.settings
        fits = accumulation_dtype(chunk) == out.dtype
        if fits and (chunk.dtype == out.dtype or out.is_contiguous()):
            matmul(self.hidden[rows], chunk.T, out=out)
        else:
            out.copy_(matmul(self.hidden[rows], chunk.T))
        if settings.rounded_to is not None:
            out.copy_(out.to(settings.rounded_to))
        if settings.bias is not None:
            out += settings.bias[start : start + chunk.shape[0]].to(out)
        if settings.softcap is not None and slope is not None:
            out.div_(settings.softcap).tanh_()
            torch.square(out, out=slope).neg_().add_(1)
            out.mul_(settings.softcap)
        if self.factor != 1:
            out.mul_(self.factor)

    def log_sum(self, start: int) -> Tensor:
        """Return the logsumexp over the ids from ``start`` on, [n]."""
        running = Running(self.plan, 1)
        for first, last in self.plan.chunks(start, self.size):
            chunk = self.chunk(first, last)
            for rows in self.plan.row_blocks():
                logits, _ = self.logits(rows, chunk, first)
                running.add(rows, centered_in_place(logits), logits)
        return running.log_sum()


class Running:
    """Running maximum of z, and sums of exp(z - maximum) times some factors, in float64."""

    def __init__(self, plan: Plan, sums: int):
        self.sums = torch.zeros((sums, plan.n), dtype=torch.float64, device=plan.device)
        self.highest = torch.full_like(self.sums[0], -torch.inf)
        self.exponentials, self.products = Buffer(plan), Buffer(plan)

    def add(
        self,
        rows: slice,
        highest: Tensor,
        centered: Tensor,
        ratio: tuple[Tensor, Tensor] | None = None,
        own: bool = False,
    ) -> None:
        """Add a chunk: its maximum [rows] and its logits below it, which are overwritten.

        With e = exp(centered), the sums are those of e, of e * (difference + shift) if ``ratio``
        has the two, and of e * logits for ``own``.
        """
        exponentials = centered
        if own:
            exponentials = self.exponentials.block(*centered.shape)
        torch.exp(centered, out=exponentials)
        sums = [exponentials.sum(1).double()]
        if ratio is not None:
            difference, shift = ratio
            products = torch.mul(exponentials, difference, out=self.products.block(*centered.shape))
            sums.append(products.sum(1) + sums[0] * shift)
        if own:
            sums.append(centered.mul_(exponentials).sum(1) + sums[0] * highest)
        before = self.highest[rows]
        now = torch.maximum(before, highest)
        self.sums[:, rows] *= torch.exp(before - now)
        self.sums[:, rows] += torch.stack(sums) * torch.exp(highest - now)
        self.highest[rows] = now

    def log_sum(self) -> Tensor:
        return self.highest + self.sums[0].log()

    def mean(self, factor: int) -> Tensor:
        """Return the mean of a factor under the softmax."""
        return self.sums[factor] / self.sums[0]


def centered_in_place(logits: Tensor) -> Tensor:
    """Subtract each row's maximum in place, and return it, [rows] in float64."""
    highest = logits.amax(1, keepdim=True)
    logits -= highest
    return highest.squeeze(1).double()


def _operand(x: Tensor) -> Tensor:
    """Return x as its device's matrix products take it: a CPU's half precision as float32."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and not x.is_cuda else x


class GradientSums:
    """The student's gradients, added up from the blocks of the logits' gradient.

    ``weight_dtype`` holds until the last block is added. A chunk that begins once needs no more
    than its own memory in a wider dtype.
    """

    def __init__(self, plan: Plan, student: Side, needs: Sequence[bool], weight_dtype: torch.dtype):
        self.plan, self.student, settings = plan, student, student.settings
        self.hidden = self.bias = None
        if needs[0]:
            self.hidden = torch.zeros_like(settings.hidden, dtype=plan.dtype)
        if needs[2]:
            self.bias = student.hidden.new_zeros(student.size, dtype=plan.dtype)
        self.weight: Tensor | None = None
        if needs[1]:
            self.weight = torch.zeros_like(settings.weight, dtype=weight_dtype)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ids from ``start`` on, chunk by chunk, with their rows of the head.

        The blocks of a chunk are added before the next one is asked for.
        """
        for first, last in self.plan.chunks(start, stop):
            self.ids = slice(first, last)
            if self.weight is not None:
                # The memory itself, or a copy where the sums need a wider dtype.
                self.chunk = self.weight[self.ids].to(self.plan.dtype)
            yield first, last, self.student.chunk(first, last)
            if self.weight is not None and self.weight.dtype != self.plan.dtype:
                self.weight[self.ids] = self.chunk  # one rounding to the weight's dtype

    def add(self, rows: slice, grad: Tensor, weight: Tensor, cap_slope: Tensor | None) -> None:
        """Add a block of the logits' gradient, which is overwritten."""
        if cap_slope is not None:
            grad.mul_(cap_slope)
        if self.student.factor != 1:
            grad.mul_(self.student.factor)
        if self.bias is not None:
            self.bias[self.ids] += grad.sum(0)
        if grad.is_cuda:
            grad = grad.to(weight.dtype)  # once for both products
        if self.hidden is not None:
            _add_product(self.hidden[rows], grad, weight)
        if self.weight is not None:
            _add_product(self.chunk, grad.T, self.student.hidden[rows])

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of hidden states, weight and bias."""
        settings = self.student.settings
        return (
            None if self.hidden is None else self.hidden.to(settings.hidden.dtype),
            None if self.weight is None else self.weight.to(settings.weight.dtype),
            None if self.bias is None or settings.bias is None else self.bias.to(settings.bias),
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(matmul(a, b))
