"""Compute what one trainer GPU needs of teacher GPUs, network and API processes.

    python -m tests.benchmarks.capacity                  # print the tables
    python -m tests.benchmarks.capacity --write FILE     # renew them between the markers of FILE

Nothing is measured here, and no number is a GPU's measurement: ``ASSUMPTIONS`` are public numbers,
``MEASURED`` are those of the CPU benchmarks that it names. ``prime_composer/upstream/capacity.md``
has the tables and says what they leave out.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from docs.losses import between_markers

BEGIN = "<!-- tables: begin, from python -m tests.benchmarks.capacity --write FILE -->"
END = "<!-- tables: end -->"

K = 32

PEAK_FLOPS = 989e12
TRAINER_UTILIZATION = 0.4
PREFILL_UTILIZATION = 0.5
GPU_BYTES = 80e9
WEIGHTS_SHARE = 0.75

JSON_US = (538, 700)
PLUGIN_US = (3.9, 4.6)
ALONGSIDE = 12
"""Bytes per token beside a hidden state: log q of the sampled token, and the most probable id."""

HIDDEN_US, HIDDEN_WIDTH = (16.9, 18.1), 4096
ORCHESTRATOR_US = (10, 34)

ASSUMPTIONS = (
    (
        "peak of a GPU, P",
        f"{PEAK_FLOPS / 1e12:.0f} TFLOPS",
        "H100 SXM, bfloat16 without sparsity "
        "([NVIDIA](https://www.nvidia.com/en-us/data-center/h100/))",
    ),
    (
        "share of it that training reaches, u",
        f"{TRAINER_UTILIZATION}",
        "0.38 to 0.43 for 405B ([Llama 3](https://arxiv.org/abs/2407.21783), table 4)",
    ),
    (
        "share of it that prefill reaches, w",
        f"{PREFILL_UTILIZATION}",
        "chosen below 0.76 on TPU v4 ([Pope et al.](https://arxiv.org/abs/2211.05102))",
    ),
    (
        "API process, hidden states of width d",
        f"d / {HIDDEN_WIDTH:,} times those of width {HIDDEN_WIDTH:,}",
        "not measured at 8,192",
    ),
    ("memory of a GPU; share for weights", f"{GPU_BYTES / 1e9:.0f} GB; {WEIGHTS_SHARE}", "chosen"),
)
"""What is assumed: name, value, source."""


@dataclass(frozen=True)
class Model:
    """A dense decoder, in the sizes of its config on the Hugging Face hub."""

    name: str
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def head_parameters(self) -> int:
        """V d."""
        return self.vocab * self.width

    @property
    def product_parameters(self) -> int:
        """Parameters that every token is multiplied with: layers and output head."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp) + self.head_parameters

    @property
    def weight_bytes(self) -> int:
        """Of all weights in bfloat16, input embeddings included."""
        return 2 * (self.product_parameters + (0 if self.tied else self.head_parameters))

    @property
    def gpus_per_server(self) -> int:
        """The smallest power of two whose memory holds the weights."""
        return 2 ** max(0, math.ceil(math.log2(self.weight_bytes / (GPU_BYTES * WEIGHTS_SHARE))))


QWEN3_0_6B = Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, True)
QWEN3_8B = Model("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936, False)
LLAMA_8B = Model("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, False)
LLAMA_70B = Model("Llama-3.1-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, False)
PAIRS = ((QWEN3_0_6B, QWEN3_8B), (LLAMA_8B, LLAMA_70B))

MEASURED = (
    (f"API process, K = {K}, JSON", JSON_US, "`served_scorer`"),
    (f"API process, K = {K}, plugin", PLUGIN_US, "`served_scorer`"),
    (
        f"API process, hidden states of width {HIDDEN_WIDTH:,} in bfloat16, plugin",
        HIDDEN_US,
        f"`served_scorer --hidden {HIDDEN_WIDTH} --layers 1 --dtype bfloat16 --ks 1 --sequences 4`",
    ),
    (f"prime-rl's orchestrator, K = {K}, JSON read and checked", ORCHESTRATOR_US, "`orchestrator`"),
)
"""CPU time in µs per token: name, range, program of ``tests.benchmarks``."""


@dataclass(frozen=True)
class Need:
    """What one trainer GPU asks for, per second. See ``need`` for the formulas."""

    tokens: float  # that it trains, and that the teacher answers for
    teacher_gpus: float  # that are busy
    bytes: float  # of answers
    api: tuple[float, float]  # API processes that are busy, lowest and highest
    json: tuple[float, float] | None  # the same for answers in JSON, where there are such


def need(student: Model, teacher: Model, full: bool) -> Need:
    """Return what one trainer GPU needs.

    Per token, in FLOPs, with N the parameters in products, V the vocabulary and d the widths:

        student, K      6 N_s + 2 V d_s                  the head's logits are computed twice
        student, full   6 N_s + 2 V (d_s + 2 d_t)        and the teacher's, twice
        teacher         2 N_t                            its head too, for the sampled token
    """
    own_head, teacher_head = student.head_parameters, student.vocab * teacher.width
    trained = 6 * student.product_parameters + 2 * own_head
    prefilled = 2 * teacher.product_parameters
    size = 4 + 8 * K
    microseconds: tuple[float, float] = PLUGIN_US
    json: tuple[float, float] | None = JSON_US
    if full:
        trained += 4 * teacher_head
        size, json = 2 * teacher.width + ALONGSIDE, None
        low, high = (teacher.width / HIDDEN_WIDTH * value for value in HIDDEN_US)
        microseconds = low, high
    tokens = TRAINER_UTILIZATION * PEAK_FLOPS / trained

    def busy(range_: tuple[float, float]) -> tuple[float, float]:
        return 1e-6 * tokens * range_[0], 1e-6 * tokens * range_[1]

    return Need(
        tokens=tokens,
        teacher_gpus=tokens * prefilled / (PREFILL_UTILIZATION * PEAK_FLOPS),
        bytes=tokens * size,
        api=busy(microseconds),
        json=None if json is None else busy(json),
    )


def tables() -> str:
    """Return assumptions, measured constants, and what a trainer GPU needs."""
    lines = ["| assumed | value | source |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {source} |" for name, value, source in ASSUMPTIONS]
    lines += ["", "| measured | µs of CPU per token | one process carries, tokens/s | program |"]
    lines += ["|---|---|---|---|"]
    for name, (low, high), program in MEASURED:
        carried = f"{rounded(1e6 / high)} to {rounded(1e6 / low)}"
        lines.append(f"| {name} | {low:g} to {high:g} | {carried} | {program} |")
    lines += ["", "| student from teacher: N | K | tokens/s | teacher GPUs busy | "]
    lines[-1] += "GPUs per server | network, Gbit/s | API processes busy, plugin | JSON |"
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [row(student, teacher, full) for student, teacher in PAIRS for full in (False, True)]
    return "\n".join(lines) + "\n"


def row(student: Model, teacher: Model, full: bool) -> str:
    """Return the row of a pair of models and a support."""
    needed = need(student, teacher, full)

    def span(busy: tuple[float, float] | None) -> str:
        return "-" if busy is None else " to ".join(map(rounded, busy))

    cells = (
        " from ".join(f"{m.name}: {m.product_parameters / 1e9:.2f} B" for m in (student, teacher)),
        '`"full"`' if full else f"{K}",
        rounded(needed.tokens),
        rounded(needed.teacher_gpus),
        f"{teacher.gpus_per_server}",
        rounded(needed.bytes * 8e-9),
        span(needed.api),
        span(needed.json),
    )
    return f"| {' | '.join(cells)} |"


def rounded(value: float) -> str:
    """Return a number with two significant digits."""
    short = float(f"{value:.1e}")
    return f"{short:,.{max(0, 1 - math.floor(math.log10(short)))}f}"


def renewed(page: str) -> str:
    """Return a page with the tables between its markers."""
    return between_markers(page, BEGIN, END, tables())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="renew the tables in FILE")
    path = parser.parse_args().write
    if path is None:
        print(tables(), end="")
        return
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
