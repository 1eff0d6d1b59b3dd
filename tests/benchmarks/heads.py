"""Measure the head's log-probs and the divergences over two heads beside their plain forms.

    python -m tests.benchmarks.heads                     # the whole table, on one GPU of 80 GB
    python -m tests.benchmarks.heads --device cpu --vocab 2000 --widths 64 --tokens 128

One step computes values, and the gradients for the student's hidden states and head. ``log-probs``
are those of the sampled token and K = 32 ids (``prime_composer.lm_head``). The others are
``prime_composer.full_vocabulary``, where student and teacher have the same width.

``products`` is the floor: the matrix products of ``chunked`` alone, in the same blocks. ``plain``
is the formula on log-softmaxes of [tokens, vocabulary], with autograd, and ``compiled`` is
``torch.compile`` of it. The variants take turns, and a time is the median of its rounds. ``MiB`` is
the peak of a step above inputs and gradients. "-" is out of memory. A CPU's peak is that of a whole
process: ``tests.benchmarks.full_vocabulary`` measures it.
"""

import argparse
import contextlib
import itertools
import statistics
from argparse import Namespace
from dataclasses import dataclass

import torch

from prime_composer.lm_head import BLOCKS, selected_logprobs
from tests.benchmarks.full_vocabulary import DTYPES, OBJECTIVES, Step

K = 32
LOG_PROBS = "log-probs"
VARIANTS = ("products", "chunked", "plain", "compiled")


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
        block, chunk = BLOCKS[self.hidden.device.type]
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


@dataclass(frozen=True)
class Measured:
    """What one variant took.

    Attributes:
        seconds: of a step.
        mebibytes: peak above inputs and gradients; None on a CPU.
    """

    seconds: float
    mebibytes: float | None


def measure(step: Step, rounds: int) -> dict[str, Measured]:
    """Return what each variant took that fits into the device's memory."""
    torch.compiler.reset()
    vars(step)["compiled"] = torch.compile(step.plain, dynamic=False)
    peaks: dict[str, float | None] = {}
    for variant in VARIANTS:
        with contextlib.suppress(torch.OutOfMemoryError):
            step.timed(variant)  # compiles, and allocates what stays
            step.hidden.grad = step.weight.grad = None
            peaks[variant] = step.memory(variant) if step.hidden.is_cuda else None
    seconds: dict[str, list[float]] = {variant: [] for variant in peaks}
    for _ in range(rounds):
        for variant, turns in seconds.items():
            turns.append(step.timed(variant))
    return {name: Measured(statistics.median(seconds[name]), peaks[name]) for name in peaks}


def row(objective: str, options: Namespace) -> str:
    """Return a line of the table."""
    step = (HeadStep if objective == LOG_PROBS else Step)(objective, options)
    measured = measure(step, options.rounds)
    cells = [objective, f"{options.width:,}", f"{options.tokens:,}"]
    cells += [
        f"{1000 * measured[variant].seconds:.1f}" if variant in measured else "-"
        for variant in VARIANTS
    ]
    chunked, products = (measured[variant].seconds for variant in ("chunked", "products"))
    cells.append(f"{chunked / products:.2f}")
    for variant in VARIANTS[1:]:
        peak = measured[variant].mebibytes if variant in measured else None
        cells.append("-" if peak is None else f"{peak:,.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--rounds", type=int, default=5)
    names = (LOG_PROBS, *OBJECTIVES)
    parser.add_argument("--objectives", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu needs small --vocab and --tokens")
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{device}, torch {torch.__version__}, {options.dtype}, vocabulary {options.vocab:,}; ms")
    print()
    print(
        "| | width | tokens | products | chunked | plain | compiled | chunked / products "
        "| MiB: chunked | plain | compiled |"
    )
    print(f"|---|{'---:|' * 10}")
    cases = itertools.product(options.objectives, options.widths, options.tokens)
    for objective, width, tokens in cases:
        sizes = {"width": width, "teacher_width": width, "tokens": tokens}
        print(row(objective, Namespace(**{**vars(options), **sizes})), flush=True)


if __name__ == "__main__":
    main()
