"""Print tables and draw figures of finished or running runs, from their ``metrics.jsonl``."""

import json
import os
import sys
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
    kl_title,
    number,
    percent,
    score,
    scores_in,
)
from prime_composer.local.answers import Answer, read_answers, read_signatures
from prime_composer.local.run_dir.checkpoint import list_checkpoints
from prime_composer.local.run_dir.disk import readable
from prime_composer.local.run_dir.recipe_file import RECIPE_FILE
from prime_composer.local.tracker import is_evaluated, read_metrics
from prime_composer.problems.metrics import TITLES, signatures_of
from prime_composer.recipe.prepare import QuantizeConfig
from prime_composer.recipe.schema import Recipe

REVERSE_KL = "eval/reverse_kl"

PER_ROLLOUT = {"turns": "turns per rollout", "tool_calls": "tool calls per rollout"}
"""What is counted in environments by id -> its name for people."""

SHARES = {
    "of the tokens": ("rollout/token_share", percent),
    "of the weights": ("rollout/weight_share", percent),
    "of the gradient": ("rollout/gradient_share", percent),
    "KL to the teacher, nats": ("distillation/kl", number),
}
"""Column of a report -> what a step measures of each environment, and how it is shown."""

FOLDED_NAME = 10  # Letters of a name in a row, where a terminal has no room for more

ANSWERS_SHOWN = 3  # Questions that a report shows with their answers

LETTERS_SHOWN = 320  # Length up to which a question or an answer is printed


def print_outcome(evaluations: dict[int, dict[str, float]], steps: int, recipe: Recipe) -> None:
    """Print the table at the end of a run: teacher, student before, student after."""
    before, after = evaluations.get(0, {}), evaluations[max(evaluations)] if evaluations else {}
    environments = titles_of({name: one.model_dump() for name, one in recipe.environments.items()})
    console().print(
        outcome_table(
            f"{recipe.loss.type}, {steps} steps",
            before,
            after,
            environments,
        )
    )
    if evaluations:
        print_signatures(signatures_of(recipe.problem_sources.values()))


def titles_of(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of a recipe's environments for people, which say what trains nothing."""
    return {
        name: f"{name} (not trained on)" if table.get("use") == "eval" else name
        for name, table in environments.items()
    }


def outcome_table(
    title: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    environments: Mapping[str, str],
) -> Table:
    """Return the table of two evaluations of a run: teacher, student before, student after."""
    table = Table(title=title)
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
        for name, shown_name in environments.items():
            if f"eval/{metric}/{name}" in after:
                add_score(metric, f"  {shown_name}", f"/{name}")
    for name, title in counts_in([after]).items():
        counts = (before.get(f"teacher/{name}"), before.get(f"eval/{name}"))
        table.add_row(title, *map(decimal, (*counts, after[f"eval/{name}"])))
    if REVERSE_KL in after:
        add_reverse_kl(f"{kl_title(after)} (nats/token)")
        for name, shown_name in environments.items():
            if f"{REVERSE_KL}/{name}" in after:
                add_reverse_kl(f"  {shown_name}", f"/{name}")
    if "eval/overlap" in after:
        shares = [percent(one.get("eval/overlap")) for one in (before, after)]
        table.add_row("overlap of both top K", MISSING, *shares)
    return table


def print_signatures(signatures: Mapping[str, str]) -> None:
    """Print what the numbers of graded metrics have to be published with."""
    for metric, signature in signatures.items():
        console().print(f"{TITLES.get(metric, metric)} x 100: {signature}", soft_wrap=True)


def print_size(run_dir: Path) -> None:
    """Print the size of a student that stays rounded, and of its newest checkpoint."""
    first = next(iter(read_metrics(run_dir)), {})
    if "student/rounded" not in first:
        return
    recipe = json.loads((run_dir / RECIPE_FILE).read_text(encoding="utf-8"))
    quantize = QuantizeConfig.model_validate(recipe["student"]["quantize"])
    rounded, weights = (int(first[f"student/{name}"]) for name in ("rounded", "weights"))
    bits = quantize.information(rounded, weights)
    newest = [checkpoint.path for checkpoint in list_checkpoints(run_dir)[-1:]]
    sizes = [file.stat().st_size for path in newest for file in path.glob("*.safetensors")]
    on_disk = f"; {readable(sum(sizes))} on the disk, in float32" if sizes else ""
    console().print(
        f"student of {run_dir.name}: {rounded:,} of {weights:,} weights have {quantize.bits} bits "
        f"in groups of {quantize.group}; {readable(round(bits / 8))} of information, "
        f"{bits / weights:.2f} bits per weight{on_disk}",
        soft_wrap=True,
    )


def print_answers(run_dir: Path, steps: Collection[int]) -> None:
    """Print held-out questions with the answers before and after training, and the teacher's."""
    kept = {step: rows for step, rows in read_answers(run_dir).items() if step in steps}
    if not kept:
        return
    first, last = min(kept), max(kept)
    named = {"before": kept[first]} if first == 0 else {}
    if last > 0:
        named[f"after {last} steps"] = kept[last]
    rows = kept[last][:ANSWERS_SHOWN]
    if first == 0 < last:
        rows = _most_changed(kept[first], kept[last])[:ANSWERS_SHOWN]
    named["teacher"] = [row for one in read_answers(run_dir, "teacher").values() for row in one]
    table = Table(box=SIMPLE_HEAD, show_header=False, title="held-out questions, greedy answers")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row("question", shown(row.question), style="bold")
        if row.reference:
            table.add_row("reference", shown(row.reference))
        for name, answers in named.items():
            own = next((one for one in answers if one.asked == row.asked), None)
            if own is not None:
                table.add_row(name, _verdict(own))
        table.add_section()
    console().print(table)


def _most_changed(before: Sequence[Answer], after: Sequence[Answer]) -> list[Answer]:
    """Return the later answers, those that became right first, then those of another text."""
    earlier = {answer.asked: answer for answer in before}

    def rank(answer: Answer) -> tuple[bool, bool]:
        was = earlier.get(answer.asked)
        if was is None:
            return True, True
        gained = (answer.correct or answer.score or 0) - (was.correct or was.score or 0)
        return gained <= 0, answer.text == was.text

    return sorted(after, key=rank)


def _verdict(answer: Answer) -> Text:
    if answer.correct is None and answer.score is None:
        return shown(answer.text)
    if answer.score is None or answer.metric not in TITLES:
        verdict = "correct" if answer.correct else "wrong"
    else:
        verdict = f"{TITLES[answer.metric]} {score(answer.metric, answer.score)}"
    return Text(f"({verdict}) ").append_text(shown(answer.text))


def shown(text: str) -> Text:
    """Return a text for a table: on one line, without what a terminal would obey, and cut."""
    line = " ".join(text.split())
    letters = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )
    if len(letters) <= LETTERS_SHOWN:
        return Text(letters)
    more = len(letters) - LETTERS_SHOWN
    return Text(f"{letters[:LETTERS_SHOWN]} … ({more:,} more letters)")


def print_report(runs: Sequence[str | Path]) -> None:
    """Print one row per run: its loss, and its numbers at the first and the last evaluation."""
    read = [(run, read_metrics(run)) for run in runs]
    named = dict.fromkeys(name for _, records in read for name in scores_in(records))
    titles = [TITLES[name] for name in named] or ["accuracy"]
    counted = counts_in([record for _, records in read for record in records])
    counts = (title.removesuffix(" per rollout") for title in counted.values())
    kls = ", ".join(dict.fromkeys(kl_title(*records) for _, records in read))
    head = ["run", "loss", "steps", "teacher", ", ".join(titles), *counts, kls, "tok/s"]
    rows = []
    for run, records in read:
        own = scores_in(records) or ["accuracy"]
        evaluated = [record for record in records if is_evaluated(record)]
        before, after = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
        speeds = sorted(series(records, "tokens_per_second")[1])
        cells = [
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
        ]
        rows.append(cells)
    print_table(console(), head, rows, names=2)
    print_signatures({k: text for run in runs for k, text in read_signatures(Path(run)).items()})
    for run in runs:
        print_size(Path(run))
    if len(runs) == 1:
        environments = environments_of(runs[0])
        if len(environments) > 1 and evaluated:
            console().print(outcome_table("by environment", before, after, environments))
        print_shares(evaluated)
        print_answers(Path(runs[0]), [record["step"] for record in evaluated])


def print_shares(evaluated: Sequence[Mapping[str, Any]]) -> None:
    """Print what each environment, or teacher of rows, was of the first and last evaluated step."""
    trained = [record for record in evaluated if record["step"] > 0]
    of_tokens = "rollout/token_share/"
    keys = dict.fromkeys(key for record in trained for key in record)
    names = [key.removeprefix(of_tokens) for key in keys if key.startswith(of_tokens)]
    columns = {
        title: (metric, shown)
        for title, (metric, shown) in SHARES.items()
        if any(f"{metric}/{name}" in record for record in trained for name in names)
    }
    if not columns:
        return
    rows = []
    for name in names:
        pairs = [
            [shown(record.get(f"{metric}/{name}")) for record in (trained[0], trained[-1])]
            for metric, shown in columns.values()
        ]
        rows.append([name, *(" → ".join(pair) for pair in pairs)])
    print_table(console(), ["part of a step", *columns], rows)


def print_table(
    screen: Console, head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1
) -> None:
    """Print a table; in a narrow terminal a block for each row. No number is left out or cut."""
    any_width = screen.options.update(max_width=sys.maxsize)
    for width, wraps in ((None, False), (FOLDED_NAME, False), (FOLDED_NAME, True)):
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for title in head[:names]:
            table.add_column(title, overflow="fold", max_width=width)
        for title in head[names:]:
            table.add_column(title, justify="right", no_wrap=not wraps, overflow="fold")
        for row in rows:
            table.add_row(*row)
        needed = screen.measure(table, options=any_width)
        if (needed.minimum if wraps else needed.maximum) <= screen.width:
            screen.print(table)
            return
    for name, *cells in rows:
        block = Table.grid(padding=(0, 2))
        for title, cell in zip(head[1:], cells, strict=True):
            block.add_row(f"  {title}", cell)
        screen.print(Text(f"\n{name}", style="bold"), block)
    screen.print()


def draw_report(runs: Sequence[str | Path], output: Path, log_kl: bool = False) -> None:
    """Draw the score, reverse KL, the loss and the throughput of one or several runs as a PNG."""
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
        for environment, title in environments_of(run).items():
            points = series(records, f"eval/{name}/{environment}")
            if points[0]:
                accuracy.plot(*points, marker=".", linestyle=":", label=title)
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
            axes.legend(fontsize="small", framealpha=0.5)  # a line may pass below it
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
    """Title a panel and its axes, and draw its grid. There is no half of a step."""
    from matplotlib.ticker import MaxNLocator

    if x == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def plain(text: str) -> str:
    """Return a text that matplotlib shows as it is, with dollar signs that are no formula."""
    return text.replace("$", r"\$")


def loss_parts(records: Sequence[dict[str, Any]]) -> list[str]:
    """Name the loss and the metrics that add up to it."""
    names = dict.fromkeys(name for record in records for name in record)
    parts = ("/kl_in_support", "/kl_mass", "/loss")
    others = ("rollout/", "eval/", "teacher/")  # which may end with an environment's name
    return ["loss", *(n for n in names if n.endswith(parts) and not n.startswith(others))]


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was measured, and its values."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def loss_name(run: str | Path) -> str:
    """Return the run's loss type, from the recipe kept with it."""
    loss = _table_of(run, "loss").get("type")
    return loss if isinstance(loss, str) else MISSING


def environments_of(run: str | Path) -> dict[str, str]:
    """Return the environments of a run with their titles, from the recipe kept with it."""
    tables = _table_of(run, "environments")
    return titles_of({k: table for k, table in tables.items() if isinstance(table, dict)})


def _table_of(run: str | Path, name: str) -> dict[str, Any]:
    """Return a table of the recipe that is kept with a run, empty where it cannot be read."""
    try:
        table = json.loads((Path(run) / RECIPE_FILE).read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def console() -> Console:
    """Return the terminal, or 120 columns where the output is a pipe. Nothing is markup."""
    terminal = Console(markup=False, emoji=False, highlight=False)
    if not terminal.is_terminal:
        terminal.width = 120
    return terminal
