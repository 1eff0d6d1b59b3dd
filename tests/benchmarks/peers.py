"""Compare a run on one machine with what a user would take instead: TRL's ``DistillationTrainer``.

    python -m tests.benchmarks.peers --teacher DIR --student DIR [--dtype bfloat16] [--rounds 2]

Both train on the same pair, prompts, lengths and number of steps, with the reverse KL over the
whole vocabulary, AdamW and gradient checkpointing. With ``--dtype bfloat16`` both keep the
student's weights in float32 and compute its products in bfloat16 (TRL's default); our engines
compute in it altogether. Each side runs in a process of its own, in turns, so that other load meets
both.

A row has the median step, without a process's first one: wall time and CPU time of all threads per
trained token, and the most memory that the process had, its imports included (resident set). "KL"
is the steps' mean loss: both sides should agree. On a busy machine read the CPU time with
``--threads 1``: threads that wait for each other spin. Target: half of TRL's time, in no more
memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment, usable_cores
from prime_composer.problems.generated import generate_problems
from tests.benchmarks.turns import peak_mib

LR = 1e-4
CONTEXT = 384


@dataclass
class Times:
    """What one process measured, without its first step."""

    wall: list[float] = field(default_factory=list)  # seconds of each step
    cpu: list[float] = field(default_factory=list)  # CPU seconds of each step, of all threads
    tokens: list[float] = field(default_factory=list)  # trained in each step
    kl: list[float] = field(default_factory=list)  # loss of each step per token
    peak: float = 0.0  # MB of the process

    def per_token(self, values: Sequence[float]) -> float:
        """Return the median of a step's milliseconds per trained token."""
        return 1000 * statistics.median(
            value / tokens for value, tokens in zip(values, self.tokens, strict=True)
        )


class Steps:
    """Takes the time between the ends of steps."""

    def __init__(self) -> None:
        self.times = Times()
        self.last: tuple[float, float] | None = None

    def end(self, tokens: float, kl: float) -> None:
        """Take a step's time, unless it is the first one."""
        now = time.perf_counter(), time.process_time()
        if self.last is not None:
            self.times.wall.append(now[0] - self.last[0])
            self.times.cpu.append(now[1] - self.last[1])
            self.times.tokens.append(tokens)
            self.times.kl.append(kl)
        self.last = now


def train_ours(args: argparse.Namespace, folder: Path) -> Times:
    """Train as ``prime-rl rl`` does. The last step is not counted: it ends with an evaluation."""
    set_environment()
    from prime_composer.local.sources import load_sources
    from prime_composer.local.train import train
    from prime_composer.recipe.loading import load_recipe

    recipe_file = folder / "recipe.toml"
    recipe_file.write_text(f"""
student.model = "{args.student}"
teacher.model = "{args.teacher}"
loss = {{ type = "topk_reverse_kl", k = "full" }}
rollout = {{ max_tokens = {args.tokens}, max_model_len = {CONTEXT} }}
eval = {{ every = 0, size = 1, kl_size = 0 }}
checkpoint.every = 0
[data]
path = "{folder / "data"}"
messages_key = "messages"
metric = "none"
[trainer]
steps = {args.steps + 2}
batch_size = {args.batch}
micro_batch_tokens = {args.micro_batch_tokens}
lr = {LR}
dtype = "{args.dtype}"
gradient_checkpointing = true
""")
    recipe = load_recipe(recipe_file, args.overrides)
    steps = Steps()

    class Display:
        def status(self, text: str) -> None: ...

        def start(self, metrics: dict[str, float]) -> None: ...

        def step(self, step: int, metrics: dict[str, float]) -> None:
            if step < recipe.trainer.steps:
                tokens = metrics["tokens_per_second"] * metrics["time/step"]
                steps.end(tokens, metrics["loss"])

    run_dir = folder / "run"
    run_dir.mkdir()
    train(recipe, load_sources(recipe), {}, run_dir, Display())
    return steps.times


def train_trl(args: argparse.Namespace, folder: Path) -> Times:
    """Train with TRL's own trainer. It does not find vLLM: generation is transformers'."""
    from prime_composer.backends.cpu_guard import hide_cuda_packages

    hide_cuda_packages()
    modules: dict[str, Any] = sys.modules
    modules["vllm"] = None
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]
    settings = DistillationConfig(
        str(folder / "trl"),
        max_steps=args.steps + 1,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=1,
        learning_rate=LR,
        max_completion_length=args.tokens,
        beta=1.0,  # reverse KL
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
        bf16=args.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    steps = Steps()

    class Watcher(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                tokens = logs["completions/mean_length"] * len(rows)
                steps.end(tokens, float(logs["loss"]))

    trainer = DistillationTrainer(
        args.student,
        args.teacher,
        settings,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        callbacks=[Watcher()],
    )
    trainer.train()
    return steps.times


SIDES: dict[str, Callable[[argparse.Namespace, Path], Times]] = {
    "trl": train_trl,
    "ours": train_ours,
}


def write_data(folder: Path, batch: int) -> None:
    """Write the prompts, which are one step's: every step asks all of them."""
    folder.mkdir()
    for name, count, seed in (("train", batch, 0), ("test", 1, 1)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for problem in generate_problems(count, seed=seed):
                message = {"role": "user", "content": problem.question}
                file.write(json.dumps({"messages": [message]}) + "\n")


def run(side: str, args: argparse.Namespace) -> Times:
    """Run one side in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", args.batch)
        variable = "PRIME_COMPOSER_THREADS" if side == "ours" else "OMP_NUM_THREADS"
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.peers", *sys.argv[1:], "--side", side, name],
            stdout=sys.stderr,
            env=os.environ | {variable: str(args.threads)},
            check=True,
        )
        return Times(**json.loads((folder / "times.json").read_text()))


def print_row(side: str, times: Times) -> None:
    """Print the numbers of one process."""
    wall, cpu = times.per_token(times.wall), times.per_token(times.cpu)
    print(
        f"{side:>5}{wall:15.1f}{cpu:14.1f}{statistics.median(times.wall):10.2f}"
        f"{statistics.median(times.tokens):9.0f}{statistics.mean(times.kl):8.3f}"
        f"{times.peak:9,.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student", required=True)
    parser.add_argument("--batch", type=int, default=12, help="answers of a step")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="ours, with padding")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        side, folder = args.side[0], Path(args.side[1])
        times = SIDES[side](args, folder)
        times.peak = peak_mib() * 2**20 / 1e6
        (folder / "times.json").write_text(json.dumps(asdict(times)))
        return
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Run the sides in turns, and print their rows and the ratios of their medians."""
    print("      wall ms/token  CPU ms/token  s/step   tokens      KL  peak MB")
    results: dict[str, list[Times]] = {side: [] for side in SIDES}
    for turn in range(args.rounds):
        for side in [*SIDES] if turn % 2 == 0 else [*SIDES][::-1]:
            results[side].append(run(side, args))
            print_row(side, results[side][-1])
    values: dict[str, Callable[[Times], float]] = {
        "wall time": lambda times: times.per_token(times.wall),
        "CPU time": lambda times: times.per_token(times.cpu),
        "peak memory": lambda times: times.peak,
    }
    for name, value in values.items():
        theirs, ours = (statistics.median(map(value, results[side])) for side in SIDES)
        print(f"TRL / ours, {name}: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
