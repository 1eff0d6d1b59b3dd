"""Compare the finished runs of a study: numbers, a Markdown table and the figure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from prime_composer.cli.figures import Results, draw_ends, draw_steps
from prime_composer.cli.quantities import MISSING, QUANTITIES, SCORES, Formatter, quantity_of
from prime_composer.cli.recorded import RecordedRun
from prime_composer.cli.report import console, print_table
from prime_composer.cli.study_file import StudyConfig, StudyRun, is_finished

Series = Sequence[Mapping[str, int | float]]  # Step, mean, min and max, where all seeds have them

COMPARED = (*SCORES, "reverse_kl")  # What a study is about


def write_report(study: StudyConfig, runs: Sequence[StudyRun]) -> None:
    """Write results.json, table.md and study.png beside the runs, and print the table."""
    folder = runs[0].run_dir.parent
    results = results_of(study, runs)
    numbers, figure, markdown = folder / "results.json", folder / "study.png", folder / "table.md"
    numbers.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = as_markdown(results)
    markdown.write_text(table, encoding="utf-8")
    if study.grid or not evaluates_between(results):
        grid = list(study.grid) or ["variant"]
        draw_ends(results, measured_quantities(results), study.combinations, grid, figure)
    else:
        draw_steps(results, measured_quantities(results), figure)
    if (screen := console()).is_terminal:
        print_table(screen, *table_rows(results))
        print("\n".join(before_training(results)), end="\n\n")
    else:
        print(f"\n{table}")
    print(f"figure: {figure}\nnumbers: {numbers}, {markdown}")


def summary(run: StudyRun) -> str:
    """Return what a finished run has reached, in one line."""
    series = measured(run)
    changes = [
        f"{QUANTITIES[name].name} {QUANTITIES[name].text(series[name][0][1])} → "
        f"{QUANTITIES[name].text(series[name][-1][1])}"
        for name in COMPARED
        if series[name]
    ]
    return ", ".join(changes) or "finished; it evaluates nothing"


def measured(run: StudyRun) -> dict[str, list[tuple[int, float]]]:
    """Read (step, value) of each measurement of a run, by the names of ``quantity_of``."""
    recorded, loss = RecordedRun.read(run.first), run.recipe.loss.type
    by_environment = (f"{score}/{name}" for score in SCORES for name in run.recipe.environments)
    metrics = {name: quantity_of(name).metric for name in (*QUANTITIES, *by_environment)}
    series = {name: recorded.series(one, f"{loss}/{one}") for name, one in metrics.items()}
    return {name: list(zip(*points, strict=True)) for name, points in series.items()}


def results_of(study: StudyConfig, runs: Sequence[StudyRun]) -> Results:
    """Return the contents of ``results.json``: the series of finished runs, and over the seeds."""
    variants = {}
    for variant, items in study.items_of.items():
        repeats = [run for run in runs if run.variant == variant]
        finished = [run for run in repeats if is_finished(run)]
        by_seed = {str(run.seed): measured(run) for run in finished}
        names = dict.fromkeys((*QUANTITIES, *chain(*by_seed.values())))
        start = RecordedRun.read(finished[0].first).records[0] if finished else {}
        variants[variant] = {
            "overrides": list(items),
            "loss": repeats[0].tables["loss"],
            "unfinished_seeds": [run.seed for run in repeats if run not in finished],
            "teacher_scores": {
                name: start[f"teacher/{name}"] for name in names if f"teacher/{name}" in start
            },
            "seeds": by_seed,
            "over_seeds": {
                name: list(over_seeds([series[name] for series in by_seed.values()]))
                for name in names
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
    series = (one["over_seeds"][name] for one in results["variants"].values() for name in COMPARED)
    return any(len(points) > 2 for points in series)


def measured_quantities(results: Results) -> list[str]:
    """Return the names of what a variant has measured; those of environments are the last."""
    every = [result["over_seeds"] for result in results["variants"].values()]
    names = dict.fromkeys((*QUANTITIES, *chain(*every)))
    return [name for name in names if any(series.get(name) for series in every)]


def as_markdown(results: Results) -> str:
    """Format the comparison as Markdown: its rows, and what the variants started from."""
    head, rows = table_rows(results)
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for start in before_training(results):
        lines += ["", start]
    return "\n".join(lines) + "\n"


def table_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the comparison: the mean over the seeds, and (min to max)."""
    names = measured_quantities(results)
    head = ["variant", "seeds", *(quantity_of(name).title for name in names)]
    rows = []
    for variant, result in results["variants"].items():
        finished, unfinished = len(result["seeds"]), len(result["unfinished_seeds"])
        seeds = f"{finished} of {finished + unfinished}" if unfinished else str(finished)
        series = result["over_seeds"]
        rows.append([variant, seeds, *(cell(name, series.get(name, [])) for name in names)])
    return head, rows


def before_training(results: Results) -> list[str]:
    """Return a line for each start that variants have: student and teacher before training."""
    starts: dict[str, str] = {}
    for variant, result in results["variants"].items():
        parts = []
        for name, series in result["over_seeds"].items():
            if series and name.partition("/")[0] in COMPARED:
                quantity = quantity_of(name)
                part = f"{quantity.name} {quantity.text(series[0]['mean'])}"
                teacher = quantity.text(result["teacher_scores"].get(name))
                parts.append(part + f" (the teacher {teacher})" * (name != "reverse_kl"))
        if parts:
            starts.setdefault(", ".join(parts), variant)
    several = len(starts) > 1
    return [
        f"Before training{f', {variant} and those like it' if several else ''}: {text}."
        for text, variant in starts.items()
    ]


def cell(name: str, series: Series) -> str:
    """Format a quantity for the table: the last step, the change within a run, or the mean."""
    text = quantity_of(name).text
    if not series:
        return MISSING
    if name == "step_seconds":
        return average(series, text)
    if name == "top1pct":
        third = max(1, len(series) // 3)
        return f"{average(series[:third], text)} → {average(series[-third:], text)}"
    last = series[-1]
    if last["min"] == last["max"]:
        return text(last["mean"])
    return f"{text(last['mean'])} ({text(last['min'])} to {text(last['max'])})"


def average(series: Series, text: Formatter) -> str:
    """Format the mean over all steps."""
    return text(sum(point["mean"] for point in series) / len(series))
