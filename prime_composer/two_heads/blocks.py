"""Logits block by block, and the sums over blocks: the parts of the passes in ``kernel``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_composer.lm_head import matmul
from prime_composer.two_heads.divergence import Divergence
from prime_composer.two_heads.heads import Logits, TwoHeads

BLOCKS = {"cpu": (256, 512), "cuda": (1024, 8192)}
"""Rows and vocabulary entries of a block, per device type. On a CPU a block fits the cache, so that
the elementwise passes over it take little next to the matrix products."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All inputs of ``CompareHeads`` but those with a gradient. See ``compare.compare``."""

    heads: TwoHeads
    dtype: torch.dtype
    reverse: bool
    forward: bool
    interpolation: Tensor | None
    divergence: Divergence | None
    top_mass: float | None
    token_ids: Tensor
    chunk: int
    token_block: int

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.heads.student.row_count

    @property
    def common(self) -> int:
        """Number of ids that every head has."""
        return min(side.size for side in self.heads.sides)

    @property
    def has_bucket(self) -> bool:
        """Whether some head has more ids than another."""
        return any(side.size > self.common for side in self.heads.sides)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first id of each chunk, and the one after its last."""
        for first in range(start, stop, self.chunk):
            yield first, min(first + self.chunk, stop)

    def row_blocks(self) -> Iterator[slice]:
        """Yield the rows of each block."""
        for first in range(0, self.n, self.token_block):
            yield slice(first, min(first + self.token_block, self.n))

    def column(self, values: Tensor) -> Tensor:
        """Return a tensor [n] as [n, 1], in the dtype of the elementwise work."""
        return values.to(self.dtype).unsqueeze(1)


class Buffer:
    """Memory of one block, allocated at its first use. Each use overwrites the previous one's."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.memory: Tensor | None = None

    def block(self, height: int, width: int) -> Tensor:
        """Return the memory as [height, width]."""
        if self.memory is None:
            plan = self.plan
            size = min(plan.token_block, plan.n) * plan.chunk
            self.memory = torch.empty(
                size, dtype=plan.dtype, device=plan.heads.student.hidden.device
            )
        return self.memory[: height * width].view(height, width)

    def like(self, block: Tensor) -> Tensor:
        """Return the memory in the shape of a block."""
        return self.block(*block.shape)


class Side:
    """The logits of one model, block by block: hidden states times a head."""

    def __init__(self, logits: Logits, plan: Plan):
        self.plan, self.buffer = plan, Buffer(plan)
        self.settings, self.size = logits, logits.size
        self.hidden = _operand(logits.hidden)
        self.factor = logits.scale / plan.heads.temperature

    def keep(self, rows: Tensor) -> None:
        """Replace all other rows, which may hold NaN."""
        self.hidden = torch.where(rows.unsqueeze(1), self.hidden, 0)

    def chunk(self, start: int, stop: int) -> Tensor:
        """Return rows of the head."""
        return _operand(self.settings.weight[start:stop].to(self.hidden.device))

    def logits(self, rows: slice, chunk: Tensor, start: int) -> Tensor:
        """Return the logits of a block. The next block overwrites them.

        Args:
            rows: of the hidden states.
            chunk: rows of the head.
            start: the first one's id.
        """
        return self.logits_and_slope(rows, chunk, start)[0]

    def logits_and_slope(
        self, rows: slice, chunk: Tensor, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of a block, and the derivative of the cap if there is one."""
        settings, width = self.settings, chunk.shape[0]
        if chunk.dtype == self.plan.dtype:
            logits = self.buffer.block(rows.stop - rows.start, width)
            torch.mm(self.hidden[rows], chunk.T, out=logits)
        else:
            logits = matmul(self.hidden[rows], chunk.T).to(self.plan.dtype)
        slope = None
        if settings.rounded_to is not None:
            logits = logits.to(settings.rounded_to).to(self.plan.dtype)
        if settings.bias is not None:
            logits += settings.bias[start : start + width].to(logits)
        if settings.softcap is not None:
            logits.div_(settings.softcap).tanh_()
            slope = 1 - logits.square()
            logits.mul_(settings.softcap)
        if self.factor != 1:
            logits.mul_(self.factor)
        return logits, slope

    def sums(self, start: int, stop: int) -> "Running":
        """Return the sum of exp(z) over some ids."""
        running = Running(self.plan, 1)
        for first, last in self.plan.chunks(start, stop):
            chunk = self.chunk(first, last)
            for rows in self.plan.row_blocks():
                logits = self.logits(rows, chunk, first)
                running.add(rows, centered_in_place(logits), logits)
        return running


class Teachers:
    """The logits of one teacher, or log q of a mixture of several."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.sides = [Side(teacher, plan) for teacher in plan.heads.teachers]
        # Highest logit and log of the sum below it over the weight, [n, 1] each.
        self.log_totals: list[tuple[Tensor, Tensor]] = []
        weights_of_rows = plan.heads.teacher_weights
        if weights_of_rows is not None:
            for side, weights in zip(self.sides, weights_of_rows.double().T, strict=True):
                side.keep(weights > 0)
                total = side.sums(0, side.size)
                log_total = total.sums[0].log() - weights.log()
                self.log_totals.append((plan.column(total.highest), plan.column(log_total)))

    def chunks(self, start: int, stop: int) -> list[Tensor]:
        """Return what ``logits`` needs of the ids of a chunk."""
        return [side.chunk(start, stop) for side in self.sides]

    def logits(self, rows: slice, chunks: list[Tensor], start: int) -> Tensor:
        """Return the logits of a block, or log q of the mixture. The next block overwrites them."""
        mixed = self.sides[0].logits(rows, chunks[0], start)
        if not self.log_totals:
            return mixed
        for i, (side, chunk) in enumerate(zip(self.sides, chunks, strict=True)):
            part = side.logits(rows, chunk, start) if i else mixed
            for subtrahend in self.log_totals[i]:
                part -= subtrahend[rows]
            mixed = torch.logaddexp(mixed, part, out=mixed) if i else part
        return mixed

    def log_bucket(self) -> Tensor:
        """Return the log of the sum over the ids beyond the smallest head, [n], in float64."""
        parts = [side.sums(self.plan.common, side.size).log_sum() for side in self.sides]
        if not self.log_totals:
            return parts[0]
        scaled = [
            part - highest.squeeze(1) - log_total.squeeze(1)
            for part, (highest, log_total) in zip(parts, self.log_totals, strict=True)
        ]
        return torch.stack(scaled).logsumexp(0)


class Running:
    """Running maximum of z, and sums of exp(z - maximum) times some factors, in float64."""

    def __init__(self, plan: Plan, sums: int):
        device = plan.heads.student.hidden.device
        self.sums = torch.zeros((sums, plan.n), dtype=torch.float64, device=device)
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
            exponentials = self.exponentials.like(centered)
        torch.exp(centered, out=exponentials)
        sums = [exponentials.sum(1).double()]
        if ratio is not None:
            difference, shift = ratio
            products = torch.mul(exponentials, difference, out=self.products.like(centered))
            sums.append(products.sum(1) + sums[0] * shift)
        if own:
            sums.append(centered.mul_(exponentials).sum(1) + sums[0] * highest)
        before = self.highest[rows]
        now = torch.maximum(before, highest)
        self.sums[:, rows] *= torch.exp(before - now)
        self.sums[:, rows] += torch.stack(sums) * torch.exp(highest - now)
        self.highest[rows] = now

    def log_sum(self) -> Tensor:
        """Return the logsumexp of all chunks."""
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
    """The student's gradients, added up from the blocks of the logits' gradient."""

    def __init__(self, plan: Plan, student: Side, needs: Sequence[bool]):
        self.plan, self.student, settings = plan, student, student.settings
        self.hidden = self.bias = None
        if needs[0]:
            self.hidden = torch.zeros_like(settings.hidden, dtype=plan.dtype)
        if needs[2]:
            self.bias = student.hidden.new_zeros(student.size, dtype=plan.dtype)
        self.weight: Tensor | None = None
        if needs[1]:
            self.weight = torch.zeros_like(settings.weight)

    def begin(self, start: int, stop: int) -> None:
        """Begin a chunk of the vocabulary."""
        self.ids = slice(start, stop)
        if self.weight is not None:
            # A copy, 0 as well, where the sums need a wider dtype.
            self.chunk = self.weight[self.ids].to(self.plan.dtype)

    def add(self, rows: slice, grad: Tensor, weight: Tensor, cap_slope: Tensor | None) -> None:
        """Add a block of the logits' gradient, which is overwritten."""
        if cap_slope is not None:
            grad.mul_(cap_slope)
        if self.student.factor != 1:
            grad.mul_(self.student.factor)
        if self.hidden is not None:
            _add_product(self.hidden[rows], grad, weight)
        if self.weight is not None:
            _add_product(self.chunk, grad.T, self.student.hidden[rows])
        if self.bias is not None:
            self.bias[self.ids] += grad.sum(0)

    def end(self) -> None:
        """End the chunk: one rounding to the weight's dtype."""
        if self.weight is not None and self.weight.dtype != self.plan.dtype:
            self.weight[self.ids] = self.chunk

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of hidden states, weight and bias."""
        settings = self.student.settings
        return (
            None if self.hidden is None else self.hidden.to(settings.hidden.dtype),
            self.weight,
            None if self.bias is None or settings.bias is None else self.bias.to(settings.bias),
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total``."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(matmul(a, b))
