"""Measure divergences over the whole vocabulary, in time and peak memory per step.

    python -m tests.benchmarks.full_vocabulary [--teacher-width 4096] [--device cuda]
        [--dtype bfloat16]

One step is the divergence of 256 tokens at vocabulary 151,936 and its gradients for the student's
hidden states (width 1,024) and head. ``chunked`` is prime_composer.full_vocabulary. ``products``
are its six matrix products alone, in the same blocks. ``plain`` is the formula on log-softmaxes of
[tokens, vocabulary], with autograd.

``chunked`` and ``products`` take turns in one process and ``plain`` in another one, so that other
load on the machine affects all of them. ``memory`` is the peak of the step above what lies there
before it (weights and hidden states) and the gradients. Aims: chunked takes a quarter of plain's
memory, and a KL or TAID at most 1.15 times the time of its products.
"""

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from prime_composer.contract import Logits, TwoHeads
from prime_composer.divergences import (
    adaptive_kl,
    forward_kl,
    generalized_jsd,
    reverse_kl,
    taid,
)
from prime_composer.full_vocabulary import compare, kernel, token_blocks
from prime_composer.full_vocabulary.compare import KERNELS
from tests.benchmarks.turns import answer, children, peak_mib

BETA, T, TOP_MASS = 0.5, 0.4, 0.5
DIVERGENCES = {
    "reverse_kl": (reverse_kl, {}),
    "forward_kl": (forward_kl, {}),
    "taid": (taid, {"t": T, "form": "kl"}),
    "generalized_jsd": (generalized_jsd, {"beta": BETA}),
    "adaptive_kl": (adaptive_kl, {"head_mass": TOP_MASS}),
}
OBJECTIVES = tuple(DIVERGENCES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Step:
    """One step of each variant, on the same inputs."""

    def __init__(self, objective: str, options: argparse.Namespace):
        g = torch.Generator(options.device).manual_seed(0)
        settings = {"generator": g, "device": options.device, "dtype": DTYPES[options.dtype]}

        def model(width: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.randn(options.vocab, width, **settings).mul_(width**-0.5)
            return torch.randn(options.tokens, width, **settings), weight

        self.objective = objective
        self.hidden, self.weight = (x.requires_grad_() for x in model(options.width))
        self.teacher_hidden, self.teacher_weight = model(options.teacher_width)
        self.divergence, self.knobs = DIVERGENCES.get(objective, (None, {}))
        self.block, self.chunk = kernel.BLOCKS[options.device]
        if self.divergence not in KERNELS:
            self.block = token_blocks.tokens_of(self.hidden.device, options.vocab)
            self.chunk = token_blocks.CHUNK[options.device]

    def chunked(self) -> None:
        heads = TwoHeads(
            Logits(self.hidden, self.weight), (Logits(self.teacher_hidden, self.teacher_weight),)
        )
        compare(heads, self.divergence, **self.knobs).mean().backward()

    @torch.no_grad()
    def products(self) -> None:
        grad_hidden = torch.zeros_like(self.hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(self.weight)
        tokens, vocab = self.hidden.shape[0], self.weight.shape[0]
        for backward in (False, True):
            for start in range(0, vocab, self.chunk):
                w = self.weight[start : start + self.chunk]
                teacher_w = self.teacher_weight[start : start + self.chunk]
                part = grad_weight[start : start + self.chunk]
                for i in range(0, tokens, self.block):
                    h, grad_h = (x[i : i + self.block] for x in (self.hidden, grad_hidden))
                    z = h @ w.T
                    self.teacher_hidden[i : i + self.block] @ teacher_w.T
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
        elif self.objective == "adaptive_kl":
            value = adaptive_kl(p, q, head_mass=TOP_MASS, normalization="full")
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
        before = peak(self.hidden.is_cuda)
        self.timed(variant)
        return peak(self.hidden.is_cuda) - before - gradients


def peak(cuda: bool) -> float:
    if cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_mib()


def measured(objective: str, rounds: int, arguments: list[str]) -> str:
    """Return a line of the table."""
    words = [*arguments, "--child-objective", objective, "--child"]
    each = [[*words, variants] for variants in ("chunked,products", "plain")]
    with children("tests.benchmarks.full_vocabulary", each) as started:
        memory, plain_memory = (child.first for child in started)
        turns = [[*started[0].step(), *started[1].step()] for _ in range(rounds)]
    chunked, products, plain = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(turn[0] / turn[1] for turn in turns)
    return (
        f"{objective:<16}{products:>10.3f}{chunked:>10.3f}{ratio:>7.2f}{plain:>9.3f}"
        f"{memory:>14.0f}{plain_memory:>12.0f}{memory / plain_memory:>7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--teacher-width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-objective", choices=OBJECTIVES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, variants = Step(options.child_objective, options), options.child.split(",")
        answer(step.memory(variants[0]), lambda: [step.timed(variant) for variant in variants])
        return
    print(
        f"vocabulary {options.vocab}, widths {options.width} and {options.teacher_width}, "
        f"{options.tokens} tokens, {options.dtype} on {options.device}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    print(
        f"{'':<16}{'products':>10}{'chunked':>10}{'x':>7}{'plain s':>9}"
        f"{'chunked MiB':>14}{'plain MiB':>12}{'x':>7}"
    )
    for objective in options.objectives:
        print(measured(objective, options.rounds, sys.argv[1:]), flush=True)


if __name__ == "__main__":
    main()
