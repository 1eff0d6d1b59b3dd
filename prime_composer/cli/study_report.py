"""Compare the finished runs of a study: numbers, a Markdown table and the figures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prime_composer.cli.formatting import MISSING, number, percent, score
from prime_composer.cli.report import console, label, new_figure, print_table
from prime_composer.cli.study_file import Run, StudyConfig, is_finished
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.metrics import TITLES

Text = Callable[[float | None], str]  # Formats a value

Series = Sequence[Mapping[str, int | float]]  # Step, mean, min and max, where all seeds have them

Results = Mapping[str, Any]  # The contents of ``results.json``


def write_report(study: StudyConfig, runs: Sequence[Run]) -> None:
    """Write results.json, table.md and study.png beside the runs, and print the table."""
    folder = runs[0].run_dir.parent
    results, combinations, grid = compare(study, runs), list(study.combinations), list(study.grid)
    numbers, figure, markdown = folder / "results.json", folder / "study.png", folder / "table.md"
    numbers.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = as_table(results)
    markdown.write_text(table, encoding="utf-8")
    if grid or not evaluates_between(results):
        draw_grid(results, combinations, grid or ["variant"], figure)
    else:
        draw(results, figure)
    if (screen := console()).is_terminal:
        print_table(screen, *rows_of(results))
        print("\n".join(starts_of(results)), end="\n\n")
    else:
        print(f"\n{table}")
    print(f"figure: {figure}\nnumbers: {numbers}, {markdown}")


def in_short(run: Run) -> str:
    changes = [
        f"{QUANTITIES[name].name} {QUANTITIES[name].text(values[0][1])} → "
        f"{QUANTITIES[name].text(values[-1][1])}"
        for name, values in measured(run).items()
        if name in (*SCORES, "reverse_kl") and values
    ]
    return ", ".join(changes) or "finished; it evaluates nothing"


def measured(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Read (step, value) of each measurement of a run, by the names of ``QUANTITIES``."""
    records = read_metrics(run.first)
    return {
        name: [
            (record["step"], record[key])
            for record in records
            for key in (quantity.metric, f"{run.recipe.loss.type}/{quantity.metric}")
            if key in record
        ]
        for name, quantity in QUANTITIES.items()
    }


def compare(study: StudyConfig, runs: Sequence[Run]) -> Results:
    """Return the contents of ``results.json``: the series of finished runs, and over the seeds."""
    variants = {}
    for variant, items in study.items_of.items():
        repeats = [run for run in runs if run.variant == variant]
        finished = [run for run in repeats if is_finished(run)]
        by_seed = {str(run.seed): measured(run) for run in finished}
        start = read_metrics(finished[0].first)[0] if finished else {}
        variants[variant] = {
            "overrides": list(items),
            "loss": repeats[0].tables["loss"],
            "unfinished_seeds": [run.seed for run in repeats if run not in finished],
            "teacher_scores": {
                name: start[f"teacher/{name}"] for name in SCORES if f"teacher/{name}" in start
            },
            "seeds": by_seed,
            "over_seeds": {
                name: list(over_seeds([series[name] for series in by_seed.values()]))
                for name in QUANTITIES
            },
        }
    return {"base": str(study.base), "overrides": list(study.overrides), "variants": variants}


def over_seeds(series: Sequence[Sequence[tuple[int, float]]]) -> Iterator[dict[str, int | float]]:
    """Yield mean, min and max at each step that every seed measured."""
    columns = [dict(points) for points in series]
    for step in sorted(set.intersection(*map(set, columns))) if columns else []:
        values = [column[step] for column in columns]
        mean = sum(values) / len(values)
        yield {"step": step, "mean": mean, "min": min(values), "max": max(values)}


def evaluates_between(results: Results) -> bool:
    """Return whether a variant was evaluated between its start and its end."""
    return any(
        len(result["over_seeds"][name]) > 2
        for result in results["variants"].values()
        for name in (*SCORES, "reverse_kl")
    )


def measured_quantities(results: Results) -> dict[str, "Quantity"]:
    variants = results["variants"].values()
    return {
        name: quantity
        for name, quantity in QUANTITIES.items()
        if any(result["over_seeds"][name] for result in variants)
    }


def as_table(results: Results) -> str:
    """Format the comparison as Markdown: its rows, and what the variants started from."""
    head, rows = rows_of(results)
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for start in starts_of(results):
        lines += ["", start]
    return "\n".join(lines) + "\n"


def rows_of(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the comparison: the mean over the seeds, and (min to max)."""
    columns = measured_quantities(results)
    head = ["variant", "seeds", *(quantity.column for quantity in columns.values())]
    rows = []
    for variant, result in results["variants"].items():
        series = result["over_seeds"]
        finished, unfinished = len(result["seeds"]), len(result["unfinished_seeds"])
        seeds = f"{finished} of {finished + unfinished}" if unfinished else str(finished)
        cells = [quantity.cell(series[name], quantity.text) for name, quantity in columns.items()]
        rows.append([variant, seeds, *cells])
    return head, rows


def starts_of(results: Results) -> list[str]:
    """Return a line for each start that variants have: student and teacher before training."""
    starts: dict[str, str] = {}
    for variant, result in results["variants"].items():
        series, parts = result["over_seeds"], []
        for name in (*SCORES, "reverse_kl"):
            if series[name]:
                quantity = QUANTITIES[name]
                part = f"{quantity.name} {quantity.text(series[name][0]['mean'])}"
                teacher = quantity.text(result["teacher_scores"].get(name))
                parts.append(part + f" (the teacher {teacher})" * (name in SCORES))
        if parts:
            starts.setdefault(", ".join(parts), variant)
    lines = []
    for text, variant in starts.items():
        where = f", {variant} and those like it" if len(starts) > 1 else ""
        lines.append(f"Before training{where}: {text}.")
    return lines


def spread(series: Series, text: Text) -> str:
    """Format the last measurement: mean (min to max), or the one value that all seeds have."""
    if not series:
        return MISSING
    last = series[-1]
    if last["min"] == last["max"]:
        return text(last["mean"])
    return f"{text(last['mean'])} ({text(last['min'])} to {text(last['max'])})"


def average(series: Series, text: Text) -> str:
    """Format the mean over all steps."""
    return text(sum(point["mean"] for point in series) / len(series)) if series else MISSING


def thirds(series: Series, text: Text) -> str:
    """Format the mean over the first third of the steps, and over the last third."""
    if not series:
        return MISSING
    size = max(1, len(series) // 3)
    return f"{average(series[:size], text)} → {average(series[-size:], text)}"


class Quantity(NamedTuple):
    """What is compared."""

    metric: str  # name in metrics.jsonl, or after the prefix of the run's loss
    column: str  # heading of the table
    text: Text  # formats a value
    cell: Callable[[Series, Text], str] = spread  # formats a series for the table
    title: str | None = None  # title of its panel in the figure; None has no panel
    unit: str = "nats per token"  # label of the panel's axis

    @property
    def name(self) -> str:
        """The heading without its unit."""
        return self.column.partition(",")[0]


SCORES = {
    name: Quantity(
        f"eval/{name}",
        title,
        partial(score, name),
        title=f"held-out {title}, greedy",
        unit="share",
    )
    for name, title in TITLES.items()
}
"""Scores of held-out answers; a study has one, or one per kind of its environments."""

QUANTITIES = SCORES | {
    "reverse_kl": Quantity(
        "eval/reverse_kl",
        "reverse KL, nats/token",
        number,
        title="reverse KL to the teacher, held out",
    ),
    "forward_kl": Quantity("eval/forward_kl", "forward KL", number),
    "entropy": Quantity("eval/entropy", "entropy", number),
    "overlap": Quantity("eval/overlap", "overlap of both top K", percent),
    "top1pct": Quantity(
        "signal_top1pct",
        "top 1% of tokens hold",
        percent,
        thirds,
        title="share of the loss's signal in its top 1% of tokens",
        unit="share",
    ),
    "step_seconds": Quantity("time/step", "s/step", lambda value: f"{value:.2f}", average),
}
"""Name in ``results.json`` -> what it is."""


def draw(results: Results, output: Path) -> None:
    """Draw each quantity with a title against steps: the mean, and the range over seeds."""
    shown = {
        name: quantity
        for name, quantity in measured_quantities(results).items()
        if quantity.title is not None
    }
    figure, panels = new_panels(len(shown))
    colors = colors_for(len(results["variants"]))
    for axes, (name, quantity) in zip(panels, shown.items(), strict=False):
        for index, (variant, result) in enumerate(results["variants"].items()):
            points = result["over_seeds"][name]
            if not points:
                continue
            steps, means, lows, highs = (
                [point[key] for point in points] for key in ("step", "mean", "min", "max")
            )
            axes.plot(steps, means, color=colors(index), label=variant)
            axes.fill_between(steps, lows, highs, color=colors(index), alpha=0.12, linewidth=0)
        label_of(axes, quantity, "step")
    save(figure, panels[0], output)


def draw_grid(
    results: Results, combinations: Sequence[tuple[str, ...]], grid: Sequence[str], output: Path
) -> None:
    """Draw the last measurements: the last axis of the grid on x, a color for each other name."""
    shown = set(measured_quantities(results)) & {*SCORES, "reverse_kl", "forward_kl"}
    measures = [name for name in QUANTITIES if name in shown]
    groups, names = groups_and_names(combinations)
    figure, panels = new_panels(len(measures))
    colors = colors_for(len(groups))
    for axes, measure in zip(panels, measures, strict=False):
        for index, group in enumerate(groups):
            last = {
                place: series[-1]
                for place, name in enumerate(names)
                if (series := results["variants"]["-".join((*group, name))]["over_seeds"][measure])
            }
            shift = 0.5 * ((index + 0.5) / len(groups) - 0.5)
            axes.errorbar(
                [place + shift for place in last],
                [point["mean"] for point in last.values()],
                [
                    [point["mean"] - point["min"] for point in last.values()],
                    [point["max"] - point["mean"] for point in last.values()],
                ],
                fmt="o",
                markersize=4,
                color=colors(index),
                label=title_of(grid, group),
            )
        axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 8 else 0)
        label_of(axes, QUANTITIES[measure], grid[-1])
    save(figure, panels[0], output)


def groups_and_names(
    combinations: Sequence[tuple[str, ...]],
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the combinations of all axes but the last, and the names of the last, in order."""
    groups = dict.fromkeys(one[:-1] for one in combinations)
    return list(groups), list(dict.fromkeys(one[-1] for one in combinations))


def title_of(grid: Sequence[str], group: Sequence[str]) -> str:
    """Return the names of a combination with their axes; "" where there is one axis or none."""
    return ", ".join(f"{axis} = {name}" for axis, name in zip(grid, group, strict=False))


def new_panels(count: int, **shared: bool) -> tuple[Any, list[Any]]:
    """Return a figure, and its panels side by side."""
    figure = new_figure(15, 5)
    return figure, list(figure.subplots(1, max(1, count), squeeze=False, **shared)[0])


def colors_for(count: int) -> Callable[[int], Any]:
    """Return the color of each of ``count`` lines."""
    from matplotlib import colormaps

    return colormaps["tab10" if count <= 10 else "tab20"]


def label_of(axes: Any, quantity: Quantity, x: str) -> None:
    """Title a panel and its axes. They begin at 0."""
    label(axes, quantity.title or quantity.column, x, quantity.unit)
    axes.set_ylim(bottom=0)


def save(figure: Any, first: Any, output: Path) -> None:
    """Add the legend of the first panel, and write the figure."""
    handles, labels = first.get_legend_handles_labels()
    if handles:  # none in a grid of one axis, whose only line has no name
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(output, dpi=120)
