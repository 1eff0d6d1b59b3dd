"""Draw the figures of runs and studies."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_composer.cli.quantities import COUNTS, QUANTITIES, REVERSE_KL, SCORES, quantity_of
from prime_composer.cli.recorded import RecordedRun

LEGEND = 150  # Letters that fit below a study's panels, side by side

Results = Mapping[str, Any]  # The contents of a study's ``results.json``


def draw_report(runs: Sequence[str | Path], output: Path, log_kl: bool = False) -> None:
    """Draw the score, reverse KL, the loss and the throughput of one or several runs as a PNG."""
    read = [RecordedRun.read(run) for run in runs]
    several = len(read) > 1
    counts = {
        name: one for name, one in COUNTS.items() if any(r.series(one.metric)[0] for r in read)
    }
    figure = new_figure(16 if counts else 11, 7)
    if not several:
        figure.suptitle(no_formula(f"{read[0].name}: {read[0].loss}"))
    (score, kl, *more), (loss, speed, *others) = figure.subplots(2, 3 if counts else 2)
    of_counts = dict(zip(counts, (*more, *others), strict=False))
    # Without a score, what the answers show is whether they were cut.
    usual = "accuracy" if any(run.scores for run in read) else "truncated"
    titles: dict[str, None] = {}
    teachers: dict[float, Any] = {}
    for run in read:
        name = next(iter(run.scores), usual)
        titles[SCORES[name].title if name in SCORES else "answers that were cut"] = None
        label = no_formula(f"{run.name} ({run.loss})")
        (line,) = score.plot(*run.series(f"eval/{name}"), marker="o", label=label)
        style = {"color": line.get_color(), "label": label}
        kl.plot(*run.series(REVERSE_KL.metric), marker="o", **style)
        speed.plot(*run.series("tokens_per_second"), **style)
        for count, axes in of_counts.items():
            axes.plot(*run.series(COUNTS[count].metric), marker="o", **style)
        for of_teacher in run.series(f"teacher/{name}")[1][:1]:
            teachers.setdefault(of_teacher, line.get_color())
        if several:
            loss.plot(*run.series("loss"), **style)
            continue
        for environment, title in run.environments.items():
            points = run.series(f"eval/{name}/{environment}")
            if points[0]:
                score.plot(*points, marker=".", linestyle=":", label=title)
        for part in loss_parts(run.records):
            loss.plot(*run.series(part), label=part)
    for value, color in teachers.items():
        own = (color, f"teacher, {value:.3g}") if len(teachers) > 1 else ("grey", "teacher")
        score.axhline(value, linestyle="--", color=own[0], label=own[1])
    kls = ", ".join(dict.fromkeys(run.kl_title for run in read))
    for axes, title, unit in (
        (score, f"held-out {', '.join(titles)}, greedy", "share"),
        (kl, f"{kls} to the teacher, held out", "nats per token"),
        (loss, "training loss" if several else "training loss and its parts", "per token"),
        (speed, "throughput", "rollout tokens per second"),
        *((of_counts[name], one.title, "held out, greedy") for name, one in counts.items()),
    ):
        label_axes(axes, title, "step", unit)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize="small", framealpha=0.5)  # a line may pass below it
    score.set_ylim(0, 1.02)
    for axes in (speed, *of_counts.values(), *([] if log_kl else [kl])):
        axes.set_ylim(bottom=0)
    if log_kl:
        kl.set_yscale("log")
    figure.savefig(output, dpi=100)


def loss_parts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the loss and the metrics that add up to it."""
    names = dict.fromkeys(name for record in records for name in record)
    parts = ("/kl_in_support", "/kl_mass", "/loss")
    others = ("rollout/", "eval/", "teacher/")  # which may end with an environment's name
    return ["loss", *(n for n in names if n.endswith(parts) and not n.startswith(others))]


def draw_steps(results: Results, names: Iterable[str], output: Path) -> None:
    """Draw a study's quantities against steps: the mean, and the range over seeds."""
    shown = [name for name in names if quantity_of(name).panel is not None]
    figure, panels = study_panels(shown, "step")
    colors = colors_for(len(results["variants"]))
    for axes, name in zip(panels, shown, strict=False):
        for index, (variant, result) in enumerate(results["variants"].items()):
            points = result["over_seeds"][name]
            if not points:
                continue
            steps, means, lows, highs = (
                [point[key] for point in points] for key in ("step", "mean", "min", "max")
            )
            axes.plot(steps, means, color=colors(index), label=variant)
            axes.fill_between(steps, lows, highs, color=colors(index), alpha=0.12, linewidth=0)
        axes.set_ylim(bottom=0)
    save(figure, output)


def draw_ends(
    results: Results,
    names: Iterable[str],
    combinations: Iterable[tuple[str, ...]],
    grid: Sequence[str],
    output: Path,
) -> None:
    """Draw the last measurements: the last axis of the grid on x, a color for each other name.

    A dash beside the student's entropy is the teacher's.
    """
    shown = [name for name in names if name in (*SCORES, "reverse_kl", "forward_kl", "entropy")]
    figure, panels = study_panels(shown, grid[-1])
    combinations = list(combinations)
    groups = list(dict.fromkeys(one[:-1] for one in combinations))
    ticks = list(dict.fromkeys(one[-1] for one in combinations))
    colors = colors_for(len(groups))

    def last_of(measure: str, group: tuple[str, ...]) -> dict[int, Mapping[str, Any]]:
        """Return the last point of each variant of a group, by its place on x."""
        variants = ["-".join((*group, name)) for name in ticks]
        every = [results["variants"][variant]["over_seeds"][measure] for variant in variants]
        return {place: points[-1] for place, points in enumerate(every) if points}

    for axes, measure in zip(panels, shown, strict=False):
        for index, group in enumerate(groups):
            last = last_of(measure, group)
            shift = 0.5 * ((index + 0.5) / len(groups) - 0.5)
            named = zip(grid, group, strict=False)
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
                label=", ".join(f"{axis} = {name}" for axis, name in named),
            )
            if measure == "entropy":
                axes.set_title("entropy (dash: the teacher's)")
                dashes = last_of("teacher_entropy", group)
                places = [place + shift for place in dashes]
                axes.plot(places, [p["mean"] for p in dashes.values()], "_", color=colors(index))
        axes.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) > 8 else 0)
        axes.set_ylim(bottom=0)
    save(figure, output)


def study_panels(names: Sequence[str], x: str) -> tuple[Any, list[Any]]:
    """Return a figure, and a panel for each quantity, side by side."""
    figure = new_figure(15, 5)
    panels = list(figure.subplots(1, max(1, len(names)), squeeze=False)[0])
    for axes, quantity in zip(panels, map(QUANTITIES.__getitem__, names), strict=False):
        label_axes(axes, quantity.panel or quantity.title, x, quantity.unit)
    return figure, panels


def colors_for(count: int) -> Callable[[int], Any]:
    """Return the color of each of ``count`` lines."""
    from matplotlib import colormaps

    return colormaps["tab10" if count <= 10 else "tab20"]


def save(figure: Any, output: Path) -> None:
    """Add the legend of a study's first panel, and write the figure."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:  # none in a grid of one axis, whose only line has no name
        columns = max(1, min(6, LEGEND // max(map(len, labels))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    figure.savefig(output, dpi=120)


def new_figure(width: int, height: int) -> Any:
    """Return an empty matplotlib figure for a file, of a size in inches."""
    # matplotlib reads this when it is imported, and refuses a name that it does not know. A figure
    # for a file has a backend of its own.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Title a panel and its axes, and draw its grid. There is no half of a step."""
    from matplotlib.ticker import MaxNLocator

    if x == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def no_formula(text: str) -> str:
    """Return a text that matplotlib shows as it is, with dollar signs that are no formula."""
    return text.replace("$", r"\$")
