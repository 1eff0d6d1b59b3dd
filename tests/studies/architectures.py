"""Print what student and teacher of each architecture do with each backend.

    python -m tests.studies.architectures [NAME ...] [--folder DIR]
        [--write recipes/architectures.md]

Each cell is a process of its own with a time limit, because an engine may end its process. It walks
the road of a user: ``--dry-run``, a run of one step with its checkpoint, and for a teacher a second
run with the whole vocabulary. Then it takes numbers from the same backends, before and after a
weight sync. Another process, without vLLM, compares them with a plain forward of transformers in
float64, sequence by sequence. Results stay in the folder: a cell that is there is not run again.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fork_server import ENGINE, REPO, ForkServer
from tests.studies.architecture_models import ARCHITECTURES, READ_IMAGES, VOCAB, write_model

CELLS = ("student/vllm", "student/transformers", "teacher/vllm", "teacher/transformers")
PARTNER = "Qwen3"
"""The architecture on the other side of each pair, with transformers."""

TOLERANCE = 1e-3
"""Nats from float64, above which a number is wrong. float32 engines stay within 1e-4."""

SECONDS = 300.0
"""Time for a cell."""

PROMPTS = (5, 23, 90)
"""Lengths of prompts. The last one is longer than every window of the models."""

K = 8


@dataclass
class Cell:
    """What one architecture does with one backend."""

    # "ok"; "refused" by a sentence, at the dry run too; "late": by one after a dry run that passed;
    # "wrong" numbers; "traceback"; "died": the process ended or hung
    state: str
    text: str = ""  # the sentence, or the end of what the process wrote
    nats: dict[str, float] = field(default_factory=dict)  # largest distance of log-probs to float64


def recipe(folder: Path, student: Path, teacher: Path, cell: str, loss: str) -> Path:
    """Write a recipe of one step, and return its file."""
    side, backend = cell.split("/")
    of_student = backend if side == "student" else "transformers"
    of_teacher = backend if side == "teacher" else "transformers"
    rows = [{"question": f"What is {'1 + ' * i}{i}?", "answer": "x"} for i in range(1, 21)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.toml"
    path.write_text(
        f'student.model = "{student}"\n'
        f'teacher = {{model = "{teacher}", backend = "{of_teacher}"}}\n'
        f"loss = {{{loss}}}\n"
        f'rollout = {{backend = "{of_student}", max_tokens = 6, max_model_len = 256}}\n'
        f'data = {{path = "{folder}/data.jsonl", metric = "contains"}}\n'
        'trainer = {steps = 1, batch_size = 4, dtype = "float32"}\n'
        "eval = {size = 2, kl_size = 2}\n"
        "logging = {tensorboard = false}\n"
    )
    return path


def command(*words: str) -> tuple[int, str]:
    """Run ``prime-rl`` in this process; return its exit status and what it wrote to stderr."""
    from prime_composer.cli.commands import main

    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = main(list(words))
    return status, errors.getvalue()


def sentence(errors: str) -> str:
    """Return the last lines of standard error that begin with "error:", as one."""
    _, _, text = errors.rpartition("error:")
    return " ".join(text.split())


def walk(config: Path, output: Path) -> Cell:
    """Walk a user's road: dry run and run."""
    road = ("rl", "--engine", "local", "--config", str(config))
    dry, why = command(*road, "--dry-run")
    if dry:
        return Cell("refused", sentence(why))
    status, why = command(*road, "--output-dir", str(output))
    if status:
        return Cell("late", sentence(why))
    saved = output / "checkpoints" / "step_000001" / "model.safetensors"
    return Cell("ok") if saved.is_file() else Cell("wrong", "no checkpoint was written")


def run_cell(name: str, cell: str, folder: Path) -> Cell:
    """Fill one cell, in this process."""
    own, partner = model_of(name, folder, 0), model_of(PARTNER, folder, 1)
    scratch = folder / "scratch" / f"{slug(name)}.{cell.replace('/', '.')}"
    scratch.mkdir(parents=True, exist_ok=True)
    as_student = cell.startswith("student")
    student, teacher = (own, partner) if as_student else (partner, own)
    losses = [f'type="topk_reverse_kl", k={K}']
    losses += [] if as_student else ['type="sampled_reverse_kl", k="full"']
    for number, loss in enumerate(losses):
        config = recipe(scratch, student, teacher, cell, loss)
        result = walk(config, scratch / f"run{number}_{os.getpid()}")
        if result.state != "ok":
            return result
    numbers = scratch / "numbers.pt"
    if as_student:
        torch.save(student_numbers(own, cell, config), numbers)
    else:
        torch.save(teacher_numbers(own, partner, cell, config), numbers)
    return compared(own, partner, numbers, apart=cell.endswith("vllm"))


def spec_of(config: Path, model: Path, cell: str, table: str) -> Any:
    """Return how a recipe opens its student's sampler, or its teacher."""
    from prime_composer.local.opening import teacher_spec
    from prime_composer.recipe import load_recipe
    from tests.builders import student_spec

    read = load_recipe(str(config))
    student = student_spec(read, model)
    if table == "student":
        return student
    assert read.teacher is not None
    return teacher_spec(read.teacher, student, model, False, "teacher")


def random_ids(length: int, seed: int) -> list[int]:
    """Return token ids that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def student_numbers(model: Path, cell: str, config: Path) -> dict[str, Any]:
    """Return sequences with log mu and log p of their tokens, as loaded and after a weight sync."""
    from prime_composer.backends.hf_model import load_student
    from prime_composer.backends.protocols import SamplingParams
    from prime_composer.local.weight_sync import perturbed
    from prime_composer.problems.config import Problem
    from prime_composer.samplers.registry import open_sampler
    from prime_composer.step.batch import Sample
    from prime_composer.step.student_forward import student_inputs

    net, _ = load_student(model)
    sampler = open_sampler(spec_of(config, model, cell, "student"))
    prompts = [random_ids(length, length) for length in PROMPTS]
    asked = SamplingParams(n=2, max_tokens=12)

    def rows() -> list[dict[str, Any]]:
        rollouts = sampler.generate(prompts, asked, seed=0)
        no_problem = Problem("", "")
        with torch.no_grad():
            inputs = student_inputs(net, [Sample(rollout, no_problem) for rollout in rollouts])
        sizes = [int(rollout.loss_mask.sum()) for rollout in rollouts]
        log_p = inputs.trainer_logprobs.split(sizes)
        return [
            {
                "ids": rollout.token_ids,
                "start": rollout.start,
                "mu": rollout.inference_logprobs[rollout.loss_mask],
                "log p": own,
            }
            for rollout, own in zip(rollouts, log_p, strict=True)
        ]

    before = rows()
    with perturbed(net):
        sampler.update_weights(net)
        after = rows()
        state = {key: value.clone() for key, value in net.state_dict().items()}
    sampler.close()
    return {"side": "student", "before": before, "after": after, "state": state}


def teacher_numbers(model: Path, partner: Path, cell: str, config: Path) -> dict[str, Any]:
    """Return sequences with a teacher's log q, its top K, and reverse KLs over the vocabulary."""
    from prime_composer.backends.hf_model import load_student
    from prime_composer.backends.protocols import Rollout
    from prime_composer.divergences import reverse_kl
    from prime_composer.full_vocabulary import compare
    from prime_composer.problems.config import Problem
    from prime_composer.step.batch import Sample
    from prime_composer.step.student_forward import student_inputs
    from prime_composer.teachers.registry import open_scorer

    net, _ = load_student(partner)
    scorer = open_scorer(spec_of(config, model, cell, "teacher"))
    rollouts = [
        Rollout.not_sampled(torch.tensor(random_ids(length + 12, length)), length, "length")
        for length in PROMPTS
    ]
    top = scorer.score(rollouts, K)
    whole = scorer.score(rollouts, 0, hidden=True)
    no_problem = Problem("", "")
    samples = [
        Sample(rollout, no_problem, scores=scores)
        for rollout, scores in zip(rollouts, whole, strict=True)
    ]
    with torch.no_grad():
        inputs = student_inputs(net, samples)
        assert inputs.hidden_states is not None
        kls = compare(inputs.hidden_states, reverse_kl).split([12] * len(rollouts))
    scorer.close()
    return {
        "side": "teacher",
        "rows": [
            {
                "ids": rollout.token_ids,
                "start": rollout.start,
                "log q": scores.ref_logprobs,
                "top ids": scores.token_ids,
                "top log q": scores.teacher_logprobs,
                "KL": kl,
            }
            for rollout, scores, kl in zip(rollouts, top, kls, strict=True)
        ],
    }


def compared(own: Path, partner: Path, numbers: Path, apart: bool) -> Cell:
    """Compare numbers with float64, in a process without vLLM."""
    if apart:
        words = ["-m", __spec__.name, "--compare", *map(str, (own, partner, numbers))]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"the comparison failed: {done.stderr[-600:]}")
        nats = json.loads(done.stdout.splitlines()[-1])
    else:
        nats = compare_numbers(own, partner, numbers)
    right = all(value <= TOLERANCE for value in nats.values())
    return Cell("ok" if right else "wrong", nats=nats)


@torch.no_grad()
def logprobs64(net: Any, row: dict[str, Any]) -> torch.Tensor:
    """Return log-probs over the vocabulary of a sequence's tokens from its start on, [n, V]."""
    logits = net(input_ids=row["ids"].unsqueeze(0), use_cache=False).logits[0].double()
    return logits[row["start"] - 1 : -1].log_softmax(-1)


def compare_numbers(own: Path, partner: Path, numbers: Path) -> dict[str, float]:
    """Return the largest distances to plain forwards in float64, in nats."""
    from prime_composer.backends.hf_model import auto_class, read_config

    def load(folder: Path) -> Any:
        # Products of grouped experts have no float64, and fused attention leaves caps out.
        return (
            auto_class(read_config(folder))
            .from_pretrained(
                folder,
                dtype=torch.float64,
                experts_implementation="eager",
                attn_implementation="eager",
            )
            .eval()
        )

    taken, net, nats = torch.load(numbers, weights_only=False), load(own), {}

    def note(name: str, found: torch.Tensor, right: torch.Tensor) -> None:
        distance = (found.double() - right).abs().nan_to_num(nan=torch.inf).max()
        nats[name] = max(nats.get(name, 0.0), float(distance))

    if taken["side"] == "student":
        for moment in ("before", "after"):
            if moment == "after":
                net.load_state_dict(taken["state"])
                net.tie_weights()
            for row in taken[moment]:
                right = logprobs64(net, row)
                sampled = right.gather(1, row["ids"][row["start"] :, None])[:, 0]
                note("log mu", row["mu"], sampled)
                note("log p", row["log p"], sampled)
        return nats
    student = load(partner)
    for row in taken["rows"]:
        right = logprobs64(net, row)
        note("log q", row["log q"], right.gather(1, row["ids"][row["start"] :, None])[:, 0])
        note("top K", row["top log q"], right.gather(1, row["top ids"]))
        note("top K's ids", row["top log q"], right.topk(K).values)
        log_p = logprobs64(student, row)
        note("reverse KL", row["KL"], (log_p.exp() * (log_p - right)).sum(-1))
    return nats


def slug(name: str) -> str:
    """Return a name as a file's."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def model_of(name: str, folder: Path, seed: int) -> Path:
    """Return a model's folder, which is written once."""
    return write_model(name, folder / "models" / f"{slug(name)}_{seed}", seed)


@functools.cache
def forks(vllm: bool) -> ForkServer:
    """Return what starts the cells' processes, with their libraries imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return ForkServer("tests.vllm_imported", parent=forks(False)) if vllm else ForkServer(*ENGINE)


def fill(name: str, cell: str, folder: Path, seconds: float) -> Cell:
    """Return a cell's result, from its file or from a process of its own."""
    file = folder / f"{slug(name)}.{cell.replace('/', '.')}.json"
    if file.exists():
        return Cell(**json.loads(file.read_text()))
    words = ("--cell", name, cell, "--folder", str(folder))
    log = file.with_suffix(".log")
    with log.open("wb") as stream:
        if name in READ_IMAGES and cell.endswith("vllm"):
            command = [sys.executable, "-m", "tests.studies.with_torchvision", *words]
            process: Any = subprocess.Popen(command, cwd=REPO, stdout=stream, stderr=stream)
        else:
            own = forks(cell.endswith("vllm"))
            process = own.start("-m", __spec__.name, *words, cwd=REPO, output=stream)
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"no end within {seconds:g} s"
    if status or not file.exists():
        written = log.read_text(errors="replace")[-800:]
        file.write_text(json.dumps(asdict(Cell("died", f"{status}: {written}"))))
    return Cell(**json.loads(file.read_text()))


def fill_here(name: str, cell: str, folder: Path) -> None:
    """Fill a cell in this process, and write its file."""
    try:
        result = run_cell(name, cell, folder)
    except Exception:
        result = Cell("traceback", traceback.format_exc()[-1500:])
    file = folder / f"{slug(name)}.{cell.replace('/', '.')}.json"
    file.write_text(json.dumps(asdict(result)))


PAGE = """# Architectures

What student and teacher do with each backend of one machine, for random tiny models in float32. A
number is the largest distance to float64 in nats (a student's log-probs before and after new
weights; a teacher's, its top K and reverse KL), over a dry run, a step and a checkpoint. `refused`:
an error at the dry run. `ended`: an error when the run opens its models. vLLM is its CPU build: a
GPU's may do more. Models that read images ran on text, beside a torchvision whose missing operators
were declared: PyPI's is no build for the CPU.

    python -m tests.studies.architectures --write recipes/architectures.md

"""
WORDS = {"refused": "refused", "late": "ended"}


def shown(cell: Cell, notes: list[str]) -> str:
    """Return a cell of the table. Sentences are notes below it."""
    if cell.state == "ok":
        return f"{max(cell.nats.values()):.0e}"
    said = cell.text or f"up to {max(cell.nats.values()):.1g} nat from float64"
    text = re.sub(r"/\S*/", "", said.removeprefix("prime-rl rl: "))
    text = re.sub(r"[<>|]", "", text)[:300].rstrip()
    if text not in notes:
        notes.append(text)
    return f"{WORDS.get(cell.state, cell.state)} ({notes.index(text) + 1})"


def table(rows: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Return the lines of the table and its notes."""
    notes: list[str] = []
    lines = ["| architecture |" + "".join(f" {cell.replace('/', ', ')} |" for cell in CELLS)]
    lines.append("|---" * (len(CELLS) + 1) + "|")
    for name, own in rows.items():
        lines.append(f"| {name} | " + " | ".join(shown(cell, notes) for cell in own) + " |")
    return [*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]


def main(words: Sequence[str] | None = None) -> None:
    """Fill the cells that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("outputs/architectures"))
    parser.add_argument("--write", type=Path, help="a page to write the table to")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.compare:
        print(json.dumps(compare_numbers(*args.compare)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    if args.cell:
        fill_here(*args.cell, folder)
        return
    rows = {}
    for name in args.names or ARCHITECTURES:
        rows[name] = [fill(name, cell, folder, SECONDS) for cell in CELLS]
        print(name, *(cell.state for cell in rows[name]), flush=True)
    lines = table(rows)
    print("\n".join(lines))
    if args.write is not None:
        args.write.write_text(PAGE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
