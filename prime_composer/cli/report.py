"""Print tables and draw figures of finished or running runs, from their ``metrics.jsonl``."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_composer.cli.formatting import (
    MISSING,
    decimal,
    is_evaluated,
    kl_title,
    number,
    score,
    scores_in,
)
from prime_composer.local.answers import Answer, read_answers, read_signatures
from prime_composer.local.run_dir.recipe_file import RECIPE_FILE
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.metrics import TITLES, signatures_of
from prime_composer.recipe.schema import Recipe

REVERSE_KL = "eval/reverse_kl"

PER_ROLLOUT = {"turns": "turns per rollout", "tool_calls": "tool calls per rollout"}
"""What is counted in environments by id -> its name for people."""

ANSWERS_SHOWN = 3
"""Questions that are printed with their answers."""

LETTERS_SHOWN = 320
"""Length up to which a question or an answer is printed."""


def print_outcome(evaluations: dict[int, dict[str, float]], steps: int, recipe: Recipe) -> None:
    """Print the table at the end of a run: teacher, student before, student after.

    ``evaluations`` has what was measured by step; step 0 is before training. ``steps`` are
    finished.
    """
    before, after = evaluations.get(0, {}), evaluations[max(evaluations)] if evaluations else {}
    table = Table(title=f"{recipe.loss.type}, {steps} steps")
    for name in ("", "teacher", "student before", "student after"):
        table.add_column(name, justify="left" if not name else "right")

    def add_score(name: str, title: str, suffix: str = "") -> None:
        teacher = before.get(f"teacher/{name}{suffix}")
        values = (teacher, *(measured.get(f"eval/{name}{suffix}") for measured in (before, after)))
        table.add_row(title, *(score(name, value) for value in values))

    def add_reverse_kl(title: str, suffix: str = "") -> None:
        metric = f"{REVERSE_KL}{suffix}"
        table.add_row(title, MISSING, number(before.get(metric)), number(after.get(metric)))

    # Without a score, what was measured is the KL alone.
    for metric in scores_in([after]) or ([] if after else ["accuracy"]):
        add_score(metric, TITLES[metric])
        for name in recipe.environments:
            if f"eval/{metric}/{name}" in after:
                add_score(metric, f"  {name}", f"/{name}")
        for temperature in recipe.eval.temperatures:
            add_score(metric, f"  at T = {temperature:g}", f"/T={temperature:g}")
    for temperature in recipe.eval.temperatures:
        add_score("self_bleu", f"Self-BLEU at T = {temperature:g}", f"/T={temperature:g}")
    for name, title in counts_in([after]).items():
        counts = (before.get(f"teacher/{name}"), before.get(f"eval/{name}"))
        table.add_row(title, *map(decimal, (*counts, after[f"eval/{name}"])))
    if REVERSE_KL in after:
        add_reverse_kl(f"{kl_title(after)} (nats/token)")
        for name in recipe.environments:
            if f"{REVERSE_KL}/{name}" in after:
                add_reverse_kl(f"  {name}", f"/{name}")
    console().print(table)
    if evaluations:
        print_signatures(signatures_of(recipe.problem_sources.values()))


def print_signatures(signatures: Mapping[str, str]) -> None:
    """Print what the numbers of graded metrics have to be published with."""
    for metric, signature in signatures.items():
        console().print(f"{TITLES.get(metric, metric)} x 100: {signature}", soft_wrap=True)


def print_answers(run_dir: Path, steps: Collection[int]) -> None:
    """Print held-out questions with the student's answers before and after training, if it has any.

    The file may hold later steps of an earlier attempt: only those of ``steps`` are read.
    """
    kept = {step: rows for step, rows in read_answers(run_dir).items() if step in steps}
    if not kept:
        return
    first, last = min(kept), max(kept)
    named = {"before": kept[first]} if first == 0 else {}
    if last > 0:
        named[f"after {last} steps"] = kept[last]
    table = Table(box=SIMPLE_HEAD, show_header=False, title="held-out questions, greedy answers")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for index in changed_first(kept[first], kept[last])[:ANSWERS_SHOWN]:
        row = kept[last][index]
        table.add_row("question", shown(row.question), style="bold")
        if row.reference:
            table.add_row("reference", shown(row.reference))
        for name, rows in named.items():
            if index < len(rows) and rows[index].question == row.question:
                table.add_row(name, _verdict(rows[index]))
        table.add_section()
    console().print(table)


def changed_first(before: Sequence[Answer], after: Sequence[Answer]) -> list[int]:
    """Return the places of the answers, those that changed first, each kind in the data's order.

    First come those that became right or wrong, then those whose words changed, then the others.
    """

    def rank(place: int) -> int:
        if place >= len(before) or before[place].question != after[place].question:
            return 2
        old, new = before[place], after[place]
        return 0 if old.correct != new.correct else 1 if old.text != new.text else 2

    return sorted(range(len(after)), key=rank)


def _verdict(answer: Answer) -> Text:
    if answer.correct is None and answer.score is None:
        return shown(answer.text)
    if answer.score is None or answer.metric not in TITLES:
        verdict = "correct" if answer.correct else "wrong"
    else:
        verdict = f"{TITLES[answer.metric]} {score(answer.metric, answer.score)}"
    return Text(f"({verdict}) ").append_text(shown(answer.text))


def shown(text: str, limit: int = LETTERS_SHOWN) -> Text:
    """Return a model's or a data set's text for a table: on one line, without what a terminal would
    obey, and cut visibly."""
    line = " ".join(text.split())
    letters = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )
    if len(letters) <= limit:
        return Text(letters)
    return Text(f"{letters[:limit]} … ({len(letters) - limit:,} more letters)")


def print_report(runs: Sequence[str | Path]) -> None:
    """Print one row per run: its loss, and its numbers at the first and the last evaluation.

    A single run also shows answers.
    """
    table = Table(box=SIMPLE_HEAD)
    for name in ("run", "loss"):
        table.add_column(name, overflow="fold")
    read = [(run, read_metrics(run)) for run in runs]
    named = dict.fromkeys(name for _, records in read for name in scores_in(records))
    titles = [TITLES[name] for name in named] or ["accuracy"]
    counted = counts_in([record for _, records in read for record in records])
    counts = (title.removesuffix(" per rollout") for title in counted.values())
    kls = ", ".join(dict.fromkeys(kl_title(*records) for _, records in read))
    for name in ("steps", "teacher", ", ".join(titles), *counts, kls, "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for run, records in read:
        own = scores_in(records) or ["accuracy"]
        evaluated = [record for record in records if is_evaluated(record)]
        before, after = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
        speeds = sorted(series(records, "tokens_per_second")[1])
        table.add_row(
            Path(run).name,
            loss_name(run),
            str(max((record["step"] for record in records), default=0)),
            ", ".join(score(name, before.get(f"teacher/{name}")) for name in own),
            ", ".join(
                " → ".join(score(name, record.get(f"eval/{name}")) for record in (before, after))
                for name in own
            ),
            *(
                " → ".join(decimal(record.get(f"eval/{name}")) for record in (before, after))
                for name in counted
            ),
            f"{number(before.get(REVERSE_KL))} → {number(after.get(REVERSE_KL))}"
            + (f" ({kl_title(*records)})" if "," in kls else ""),
            f"{speeds[len(speeds) // 2]:,.0f}" if speeds else MISSING,
        )
    console().print(table)
    print_signatures({k: text for run in runs for k, text in read_signatures(Path(run)).items()})
    if len(runs) == 1:
        print_answers(Path(runs[0]), [record["step"] for record in evaluated])


def draw_report(runs: Sequence[str | Path], output: Path, log_kl: bool = False) -> None:
    """Draw the score, reverse KL, the loss and the throughput of one or several runs as a PNG.

    The score is accuracy or a graded metric, of several the first one, with the teacher's. Without
    one it is the share of answers that were cut. A single run also shows the parts of its loss.

    Args:
        runs: the run directories.
        output: the file.
        log_kl: draw the KL on a logarithmic axis.
    """
    several = len(runs) > 1
    read = [(run, read_metrics(run)) for run in runs]
    counted = counts_in([record for _, records in read for record in records])
    figure = new_figure(16 if counted else 11, 7)
    if not several:
        figure.suptitle(plain(f"{Path(runs[0]).name}: {loss_name(runs[0])}"))
    (accuracy, reverse_kl, *more), (loss, speed, *others) = figure.subplots(2, 3 if counted else 2)
    of_counts = dict(zip(counted, (*more, *others), strict=False))
    titles: dict[str, None] = {}
    teachers: dict[float, Any] = {}
    kls = dict.fromkeys(kl_title(*records) for _, records in read)
    usual = "accuracy" if any(scores_in(records) for _, records in read) else "truncated"
    for run, records in read:
        legend = plain(f"{Path(run).name} ({loss_name(run)})")
        name = next(iter(scores_in(records)), usual)
        titles[TITLES.get(name, "answers that were cut")] = None
        (line,) = accuracy.plot(*series(records, f"eval/{name}"), marker="o", label=legend)
        style = {"color": line.get_color(), "label": legend}
        reverse_kl.plot(*series(records, REVERSE_KL), marker="o", **style)
        speed.plot(*series(records, "tokens_per_second"), **style)
        for count, axes in of_counts.items():
            axes.plot(*series(records, f"eval/{count}"), marker="o", **style)
        for score_of_teacher in series(records, f"teacher/{name}")[1][:1]:
            teachers.setdefault(score_of_teacher, line.get_color())
        if several:
            loss.plot(*series(records, "loss"), **style)
            continue
        for part in loss_parts(records):
            loss.plot(*series(records, part), label=part)
    draw_teachers(accuracy, teachers)
    for axes, title, unit in (
        (accuracy, f"held-out {', '.join(titles)}, greedy", "share"),
        (reverse_kl, f"{', '.join(kls)} to the teacher, held out", "nats per token"),
        (loss, "training loss" if several else "training loss and its parts", "per token"),
        (speed, "throughput", "rollout tokens per second"),
        *((of_counts[count], title, "held out, greedy") for count, title in counted.items()),
    ):
        label(axes, title, "step", unit)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize="small")
    accuracy.set_ylim(0, 1.02)
    for axes in (speed, *of_counts.values()):
        axes.set_ylim(bottom=0)
    if log_kl:
        reverse_kl.set_yscale("log")
    else:
        reverse_kl.set_ylim(bottom=0)
    figure.savefig(output, dpi=100)


def draw_teachers(axes: Any, scores: Mapping[float, Any]) -> None:
    """Draw the teachers' scores as dashed lines: one of all runs in grey, else in a run's color."""
    for value, color in scores.items():
        own = {"color": "grey", "label": "teacher"}
        if len(scores) > 1:
            own = {"color": color, "label": f"teacher, {value:.3g}"}
        axes.axhline(value, linestyle="--", **own)


def counts_in(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of ``PER_ROLLOUT`` that a run measured, with their titles."""
    return {
        name: title
        for name, title in PER_ROLLOUT.items()
        if any(f"eval/{name}" in record for record in records)
    }


def new_figure(width: int, height: int) -> Any:
    """Return an empty matplotlib figure for a file, of a size in inches."""
    # matplotlib reads this when it is imported, and refuses a name that it does not know. A figure
    # for a file has a backend of its own.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Title a panel and its axes, and draw its grid."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def plain(text: str) -> str:
    """Return a text that matplotlib shows as it is, with dollar signs that are no formula."""
    return text.replace("$", r"\$")


def loss_parts(records: Sequence[dict[str, Any]]) -> list[str]:
    """Name the loss and the metrics that add up to it.

    These are the KL within the support and the mass outside it, or the channels of ``compose``.
    """
    names = dict.fromkeys(name for record in records for name in record)
    parts = ("/kl_in_support", "/kl_mass", "/loss")
    return ["loss", *(name for name in names if name.endswith(parts))]


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was measured, and its values."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def loss_name(run: str | Path) -> str:
    """Return the run's loss type, from the recipe kept with it."""
    try:
        return json.loads((Path(run) / RECIPE_FILE).read_text(encoding="utf-8"))["loss"]["type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return MISSING


def console() -> Console:
    """Return the terminal, or 120 columns where the output is a pipe or a file.

    The names of runs and losses may contain brackets; nothing is read as markup.
    """
    terminal = Console(markup=False, emoji=False, highlight=False)
    if not terminal.is_terminal:
        terminal.width = 120
    return terminal
