"""Figures and tables of finished or running runs, from their ``metrics.jsonl``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from prime_composer.local.tracker import read_metrics
from prime_composer.recipe.schema import Recipe

if TYPE_CHECKING:
    from prime_composer.local.train import Outcome

MISSING = "–"


def print_outcome(outcome: "Outcome", recipe: Recipe) -> None:
    """The short table at the end of a run: teacher, student before, student after."""
    first, last = (
        outcome.evaluations[min(outcome.evaluations)],
        outcome.evaluations[max(outcome.evaluations)],
    )
    table = Table(title=f"{recipe.loss.type}, {outcome.steps} steps")
    for name in ("", "teacher", "student before", "student after"):
        table.add_column(name, justify="left" if not name else "right")
    accuracy, kl = "eval/accuracy", "eval/reverse_kl"
    table.add_row(
        "accuracy",
        percent(first.get("teacher/accuracy")),
        percent(first.get(accuracy)),
        percent(last.get(accuracy)),
    )
    for name in recipe.environments:
        if f"{accuracy}/{name}" in last:
            cells = (
                first.get(f"teacher/accuracy/{name}"),
                first.get(f"{accuracy}/{name}"),
                last[f"{accuracy}/{name}"],
            )
            table.add_row(f"  {name}", *map(percent, cells))
    if kl in last:
        table.add_row("reverse KL (nats/token)", MISSING, number(first.get(kl)), number(last[kl]))
        for name in recipe.environments:
            if f"{kl}/{name}" in last:
                table.add_row(
                    f"  {name}",
                    MISSING,
                    number(first.get(f"{kl}/{name}")),
                    number(last[f"{kl}/{name}"]),
                )
    console().print(table)


def print_report(runs: Sequence[str | Path]) -> None:
    """One row per run: its loss, and its numbers at the first and at the last evaluation."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("run", "loss"):
        table.add_column(name, overflow="fold")
    for name in ("steps", "teacher", "accuracy", "reverse KL", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        records = read_metrics(run)
        measured = [record for record in records if "eval/accuracy" in record]
        first, last = (measured[0], measured[-1]) if measured else ({}, {})
        speeds = sorted(
            record["tokens_per_second"] for record in records if "tokens_per_second" in record
        )
        table.add_row(
            Path(run).name,
            loss_name(run),
            str(max((record["step"] for record in records), default=0)),
            percent(first.get("teacher/accuracy")),
            f"{percent(first.get('eval/accuracy'))} → {percent(last.get('eval/accuracy'))}",
            f"{number(first.get('eval/reverse_kl'))} → {number(last.get('eval/reverse_kl'))}",
            f"{speeds[len(speeds) // 2]:,.0f}" if speeds else MISSING,
        )
    console().print(table)


def draw_report(runs: Sequence[str | Path], output: Path) -> None:
    """Accuracy, reverse KL, loss parts and throughput of one or several runs, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    if len(runs) == 1:
        figure.suptitle(f"{Path(runs[0]).name}: {loss_name(runs[0])}")
    (accuracy, kl), (parts, speed) = figure.subplots(2, 2)
    several = len(runs) > 1
    for run in runs:
        records = read_metrics(run)
        label = f"{Path(run).name} ({loss_name(run)})"
        (line,) = accuracy.plot(*series(records, "eval/accuracy"), marker="o", label=label)
        kl.plot(
            *series(records, "eval/reverse_kl"), marker="o", color=line.get_color(), label=label
        )
        speed.plot(*series(records, "tokens_per_second"), color=line.get_color(), label=label)
        if several:
            parts.plot(*series(records, "loss"), color=line.get_color(), label=label)
        else:
            for name in loss_parts(records):
                parts.plot(*series(records, name), label=name)
            teacher = [
                record["teacher/accuracy"] for record in records if "teacher/accuracy" in record
            ]
            if teacher:
                accuracy.axhline(teacher[0], color="grey", linestyle="--", label="teacher")
    for axes, title, unit in (
        (accuracy, "held-out accuracy, greedy", "share"),
        (kl, "reverse KL to the teacher, held out", "nats per token"),
        (parts, "training loss" if several else "training loss and its parts", "per token"),
        (speed, "throughput", "rollout tokens per second"),
    ):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize="small")
    accuracy.set_ylim(0, 1)
    kl.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    figure.savefig(output, dpi=120)


def loss_parts(records: Sequence[dict[str, Any]]) -> list[str]:
    """The loss, and those of its metrics that add up to it: within the support and the mass outside it, or channels."""
    names = dict.fromkeys(name for record in records for name in record)
    return [
        "loss",
        *(name for name in names if name.endswith(("/kl_in_support", "/kl_mass", "/loss"))),
    ]


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def loss_name(run: str | Path) -> str:
    """The run's loss type, from the recipe kept with it."""
    try:
        return json.loads((Path(run) / "recipe.json").read_text(encoding="utf-8"))["loss"]["type"]
    except (FileNotFoundError, KeyError):
        return MISSING


def console() -> Console:
    """The terminal; a pipe or a file, which has no width of its own, takes the whole table."""
    out = Console()
    return out if out.is_terminal else Console(width=120)


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"
