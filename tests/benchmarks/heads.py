"""Measure the head's log-probs and the divergences over two heads beside their plain forms.

    python -m tests.benchmarks.heads                     # the whole table, on one GPU of 80 GB
    python -m tests.benchmarks.heads --device cpu --widths 1024 --tokens 256 [--teacher-width 4096]

One step computes values, and the gradients for the student's hidden states and head. ``log-probs``
are those of the sampled token and K = 32 ids (``prime_composer.lm_head``). The others are
``prime_composer.full_vocabulary``.

``products`` is the floor: the matrix products of ``chunked`` alone, in the same blocks. ``plain``
is the formula on log-softmaxes of [tokens, vocabulary], with autograd, and ``compiled`` is
``torch.compile`` of it, on a GPU. The variants take turns, and a time is the median of its rounds:
CPU time of one thread, or a GPU's. ``MiB`` is the peak of a step above inputs and gradients, on a
CPU that of a process of its own. "-" is out of memory, or not measured. Aims: ``chunked`` takes a
twentieth of plain's memory, and at most 1.15 times the time of its products.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from prime_composer.contract import Logits, TwoHeads
from prime_composer.divergences import (
    forward_kl,
    generalized_jsd,
    reverse_kl,
    taid,
)
from prime_composer.full_vocabulary import compare
from prime_composer.full_vocabulary.blocks import BLOCKS
from prime_composer.full_vocabulary.token_blocks import blocks_of
from prime_composer.lm_head import BLOCKS as HEAD_BLOCKS
from prime_composer.lm_head import selected_logprobs
from tests.benchmarks.turns import peak_mib

K = 32
BETA, T = 0.5, 0.4
LOG_PROBS = "log-probs"
DIVERGENCES = {
    "reverse_kl": (reverse_kl, {}),
    "forward_kl": (forward_kl, {}),
    "taid": (taid, {"t": T, "form": "kl"}),
    "generalized_jsd": (generalized_jsd, {"beta": BETA}),
}
OBJECTIVES = (LOG_PROBS, *DIVERGENCES)
VARIANTS = ("products", "chunked", "plain", "compiled")


class Step:
    """One step of each variant, on the same inputs."""

    def __init__(self, objective: str, options: Namespace):
        g = torch.Generator(options.device).manual_seed(0)
        dtype = getattr(torch, options.dtype)
        settings = {"generator": g, "device": options.device, "dtype": dtype}

        def model(width: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.randn(options.vocab, width, **settings).mul_(width**-0.5)
            return torch.randn(options.tokens, width, **settings), weight

        self.objective = objective
        self.hidden, self.weight = (x.requires_grad_() for x in model(options.width))
        self.teacher_hidden, self.teacher_weight = model(options.teacher_width or options.width)
        self.divergence, self.knobs = DIVERGENCES.get(objective, (None, {}))
        self.forward_blocks = [BLOCKS[options.device]]
        if self.divergence is generalized_jsd:
            plan = blocks_of(self.heads())
            self.forward_blocks = [(plan.token_block, plan.chunk)]

    def heads(self) -> TwoHeads:
        teacher = Logits(self.teacher_hidden, self.teacher_weight)
        return TwoHeads(Logits(self.hidden, self.weight), (teacher,))

    def chunked(self) -> None:
        compare(self.heads(), self.divergence, **self.knobs).mean().backward()

    @torch.no_grad()
    def products(self) -> None:
        grad_hidden = torch.zeros_like(self.hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(self.weight)
        tokens, vocab = self.hidden.shape[0], self.weight.shape[0]
        backward_blocks = BLOCKS[self.hidden.device.type]
        passes = [(blocks, False) for blocks in self.forward_blocks] + [(backward_blocks, True)]
        for (block, chunk), backward in passes:
            for start in range(0, vocab, chunk):
                w = self.weight[start : start + chunk]
                teacher_w = self.teacher_weight[start : start + chunk]
                part = grad_weight[start : start + chunk]
                for i in range(0, tokens, block):
                    h, grad_h = (x[i : i + block] for x in (self.hidden, grad_hidden))
                    z = h @ w.T
                    self.teacher_hidden[i : i + block] @ teacher_w.T
                    if backward and h.dtype == torch.float32:
                        grad_h.addmm_(z, w)
                        torch.addmm(part, z.T, h, beta=float(i > 0), out=part)
                    elif backward:
                        grad_h += torch.mm(z, w, out_dtype=torch.float32)
                        torch.addmm(part, z.T, h, beta=float(i > 0), out=part)

    def plain(self) -> None:
        p = torch.log_softmax((self.hidden @ self.weight.T).float(), dim=-1)
        with torch.no_grad():
            q = torch.log_softmax((self.teacher_hidden @ self.teacher_weight.T).float(), dim=-1)
        if self.objective == "reverse_kl":
            value = (p.exp() * (p - q)).sum(-1)
        elif self.objective == "forward_kl":
            value = (q.exp() * (q - p)).sum(-1)
        elif self.objective == "taid":
            target = torch.log_softmax((1 - T) * p.detach() + T * q, dim=-1)
            value = (target.exp() * (target - p)).sum(-1)
        else:
            m = torch.log(BETA * q.exp() + (1 - BETA) * p.exp())
            value = (BETA * q.exp() * (q - m) + (1 - BETA) * p.exp() * (p - m)).sum(-1)
        value.mean().backward()

    def timed(self, variant: str) -> float:
        """Return the seconds of one step: of the processor, or of the wall on a GPU."""
        self.hidden.grad = self.weight.grad = None
        cuda = self.hidden.is_cuda
        if cuda:
            torch.cuda.synchronize()
        clock = time.perf_counter if cuda else time.process_time
        began = clock()
        getattr(self, variant)()
        if cuda:
            torch.cuda.synchronize()
        return clock() - began

    def memory(self, variant: str) -> float:
        """Return the peak of a step above inputs and gradients, in MiB. CPU: the process's peak."""
        gradients = sum(x.numel() * x.element_size() for x in (self.hidden, self.weight)) / 2**20
        if self.hidden.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = self._peak()
        self.timed(variant)
        return self._peak() - before - gradients

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if self.hidden.is_cuda else peak_mib()


class HeadStep(Step):
    """One step of the log-probs of chosen ids."""

    def __init__(self, objective: str, options: Namespace):
        super().__init__(objective, options)
        g = torch.Generator(options.device).manual_seed(1)
        size = (options.tokens, K + 1)
        self.ids = torch.randint(0, options.vocab, size, generator=g, device=options.device)

    def chunked(self) -> None:
        selected_logprobs(self.hidden, self.weight, self.ids).mean().backward()

    @torch.no_grad()
    def products(self) -> None:
        grad_hidden = torch.zeros_like(self.hidden, dtype=torch.float32)
        block, chunk = HEAD_BLOCKS[self.hidden.device.type]
        for backward, first in itertools.product(
            (False, True), range(0, self.weight.shape[0], chunk)
        ):
            w = self.weight[first : first + chunk]
            for start in range(0, self.hidden.shape[0], block):
                h = self.hidden[start : start + block]
                z = h @ w.T
                if backward:
                    grad_hidden[start : start + block] += z @ w
                    z.T @ h

    def plain(self) -> None:
        table = torch.log_softmax((self.hidden @ self.weight.T).float(), dim=-1)
        table.gather(1, self.ids).mean().backward()


def make_step(objective: str, options: Namespace) -> Step:
    return (HeadStep if objective == LOG_PROBS else Step)(objective, options)


def measure(step: Step, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds, and on a GPU MiB, of each variant that fits into the device's memory."""
    variants: Sequence[str] = VARIANTS[:-1]
    if step.hidden.is_cuda:
        torch.compiler.reset()
        vars(step)["compiled"] = torch.compile(step.plain, dynamic=False)
        variants = VARIANTS
    peaks: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    for variant in variants:
        with contextlib.suppress(torch.OutOfMemoryError):
            step.timed(variant)  # compiles, and allocates what stays
            seconds[variant] = []
            step.hidden.grad = step.weight.grad = None
            if step.hidden.is_cuda:
                peaks[variant] = step.memory(variant)
    for _ in range(rounds):
        for variant, turns in seconds.items():
            turns.append(step.timed(variant))
    return {name: statistics.median(turns) for name, turns in seconds.items()}, peaks


def memory_apart(objective: str, variant: str, sizes: Sequence[str]) -> float:
    """Return the MiB of a step on the CPU, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.heads", *sys.argv[1:], *sizes]
    command += ["--child", variant, "--objectives", objective]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def row(objective: str, options: Namespace) -> str:
    """Return a line of the table."""
    seconds, peaks = measure(make_step(objective, options), options.rounds)
    if options.device == "cpu":
        sizes = ["--widths", str(options.width), "--tokens", str(options.tokens)]
        peaks = {name: memory_apart(objective, name, sizes) for name in ("chunked", "plain")}
    cells = [objective, f"{options.width:,}", f"{options.tokens:,}"]
    cells += [f"{1000 * seconds[name]:.1f}" if name in seconds else "-" for name in VARIANTS]
    cells.append(f"{seconds['chunked'] / seconds['products']:.2f}")
    cells += [f"{peaks[name]:,.0f}" if name in peaks else "-" for name in VARIANTS[1:]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--teacher-width", type=int, help="the student's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu needs small --widths and --tokens")
    options.dtype = "bfloat16" if cuda else "float32"
    cases = [
        (objective, Namespace(**{**vars(options), "width": width, "tokens": tokens}))
        for objective, width, tokens in itertools.product(
            options.objectives, options.widths, options.tokens
        )
    ]
    if options.child:
        ((objective, own),) = cases
        print(make_step(objective, own).memory(options.child))
        return
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{device}, torch {torch.__version__}, {options.dtype}, vocabulary {options.vocab:,}; ms")
    print()
    print(
        "| | width | tokens | products | chunked | plain | compiled | chunked / products "
        "| MiB: chunked | plain | compiled |"
    )
    print(f"|---|{'---:|' * 10}")
    for objective, own in cases:
        print(row(objective, own), flush=True)


if __name__ == "__main__":
    main()
