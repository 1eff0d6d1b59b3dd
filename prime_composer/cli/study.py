"""Compare variants of one recipe over several seeds, from the same start and rollout budget.

A study file names the base recipe, the overrides of each variant, and the seeds. Every run is a
process of its own (``prime-rl rl``) in ``<study>/<variant>-seed<N>``. Finished runs are kept, so
the same command continues a stopped study. The comparison is drawn from the ``metrics.jsonl`` of
the runs.
"""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from prime_composer.cli.formatting import MISSING, RECIPE_FILE, number, percent
from prime_composer.cli.report import new_figure
from prime_composer.cli.run_dirs import read_recipe
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.signals import Stopped
from prime_composer.local.tracker import METRICS_FILE, read_metrics
from prime_composer.recipe.loading import apply_override, parse_recipe, parse_tables, read_tables
from prime_composer.recipe.schema import Recipe, RecipeError, Section

SAME = (
    "student",
    "data",
    "trainer.steps",
    "trainer.batch_size",
    "rollout.max_tokens",
    "eval.size",
    "eval.kl_size",
)
"""Keys that every variant shares: the start, the rollout budget, and what is measured."""

SERIES = {
    "accuracy": "eval/accuracy",
    "reverse_kl": "eval/reverse_kl",
    "top1pct": "signal_top1pct",
}
"""Name in ``results.json`` -> metric, or the metric's name after the prefix of the run's loss."""

Series = list[tuple[int, float]]
"""(step, value) of each measurement of one run."""


class StudyConfig(Section):
    """Which runs are compared."""

    base: Path
    """The recipe that every variant starts from; relative to the study file."""

    overrides: tuple[str, ...] = ()
    """``section.key=value``, as after ``--set``: what all variants change in the base."""

    variants: Annotated[dict[str, tuple[str, ...]], Field(min_length=2)]
    """Name -> ``section.key=value`` items of this variant.

    ``loss={type = "taid", k = 16}`` replaces a whole table.
    """

    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """``trainer.seed`` of each variant's runs."""

    output_dir: str | None = None
    """Where the runs go; unset: outputs/<name of the study file>."""

    @field_validator("variants")
    @classmethod
    def _names_are_directories(
        cls, variants: dict[str, tuple[str, ...]]
    ) -> dict[str, tuple[str, ...]]:
        for name in variants:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
                raise ValueError(
                    f"{name!r} names a directory: letters, digits and . _ + - only, "
                    "and no sign first"
                )
        return variants

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("the same seed twice is the same run twice; give different ones")
        return seeds


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        variant: name of the variant.
        seed: ``trainer.seed``.
        recipe: the base with the overrides of all variants, of this one, and the seed.
        overrides: the same as ``--set`` items.
        base: the recipe file.
        run_dir: where the run goes.
    """

    variant: str
    seed: int
    recipe: Recipe
    overrides: tuple[str, ...]
    base: Path
    run_dir: Path

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")


def load_study(
    path: str | os.PathLike[str], output_dir: str | None = None
) -> tuple[StudyConfig, list[Run]]:
    """Read and validate a study file, and the recipe of every variant.

    Args:
        path: a TOML file.
        output_dir: replaces the file's own.

    Returns:
        The study, and its runs seed by seed, so that a stopped study has whole seeds to compare.

    Raises:
        RecipeError: the file, an override or a variant's recipe is wrong, or the variants do not
            share start and budget.
    """
    path = Path(path)
    study = parse_tables(StudyConfig, read_tables(path, "study", "recipes/studies/"), str(path))
    for item in (*study.overrides, *(item for items in study.variants.values() for item in items)):
        if item.partition("=")[0].strip() == "trainer.seed":
            raise RecipeError(f"{path}: {item}: the seeds of a study belong in `seeds`")
    base = Path(os.path.relpath(path.parent / study.base))
    tables = read_tables(base, "recipe", "recipes/")
    folder = Path(output_dir or study.output_dir or Path("outputs") / path.stem)
    runs = []
    for seed in study.seeds:
        for variant, items in study.variants.items():
            overrides = (*study.overrides, *items, f"trainer.seed={seed}")
            try:
                recipe = _with_overrides(tables, overrides, base)
            except RecipeError as error:
                raise RecipeError(f"{path}: variants.{variant}: {error}") from None
            run_dir = folder / f"{variant}-seed{seed}"
            runs.append(Run(variant, seed, recipe, overrides, base, run_dir))
    _check_same_budget(runs[: len(study.variants)], path)
    return study, runs


def _with_overrides(tables: dict[str, Any], overrides: Sequence[str], base: Path) -> Recipe:
    changed = copy.deepcopy(tables)
    for item in overrides:
        apply_override(changed, item)
    return parse_recipe(changed, str(base))


def _check_same_budget(runs: Sequence[Run], path: Path) -> None:
    """Refuse variants whose keys of ``SAME`` differ."""
    for key in SAME:
        values = [_value_at(run.recipe, key) for run in runs]
        for run, value in zip(runs, values, strict=True):
            if value != values[0]:
                raise RecipeError(
                    f"{path}: variants.{run.variant}: {key} differs from that of "
                    f"variants.{runs[0].variant} ({_short(value)} against {_short(values[0])}); "
                    "a comparison starts from the same student and spends the same rollouts. "
                    "Set it in `overrides`, for all of them"
                )


def _value_at(recipe: Recipe, key: str) -> Any:
    """Return a value of the recipe by its dotted key."""
    if key == "data":  # variants may choose other teachers for an environment
        return {
            name: source.model_copy(update={"teacher": None})
            for name, source in recipe.sources.items()
        }
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def run_study(path: Path, output_dir: str | None = None) -> int:
    """Run what is missing of a study, draw the comparison and print its table.

    A run that diverges is named at the end, and the others continue. A wrong set-up stops the
    study. Ctrl-C, SIGTERM and SIGHUP stop it after the current step, and compare the finished
    runs.

    Returns:
        The exit status: 0, 1 if a run failed, 128 + n after signal n.
    """
    study, runs = load_study(path, output_dir)
    folder = runs[0].run_dir.parent
    print(
        f"study: {len(study.variants)} variants, {len(study.seeds)} seeds, in {folder}", flush=True
    )
    failed: list[str] = []
    stopped_by = 0
    try:
        for index, run in enumerate(runs, 1):
            if not finish(run, f"[{index}/{len(runs)}] {run.name}"):
                failed.append(run.name)
    except KeyboardInterrupt as error:
        stopped_by = signum_of(error)
    results = compare(study, runs)
    numbers, figure, markdown = folder / "results.json", folder / "study.png", folder / "table.md"
    numbers.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = as_table(results)
    markdown.write_text(table, encoding="utf-8")
    draw(results, figure)
    print(f"\n{table}\nfigure: {figure}\nnumbers: {numbers}, {markdown}")
    if failed:
        names = ", ".join(failed)
        print(f"prime-rl study: failed: {names}; the table leaves them out", file=sys.stderr)
    if stopped_by:
        print("stopped; the same command continues this study")
        return 128 + stopped_by
    return 1 if failed else 0


def finish(run: Run, label: str) -> bool:
    """Run it unless that is done, and print its result.

    Returns:
        False if it diverged.
    """
    if is_finished(run):
        print(f"{label}: {in_short(run)} (kept)", flush=True)
        return True
    print(f"{label}: running; progress in {run.log}", flush=True)
    done = start(run)
    print(f"{label}: {in_short(run) if done else f'failed, see {run.log}'}", flush=True)
    return done


def is_finished(run: Run) -> bool:
    """Check whether the run's directory contains its last evaluation.

    Raises:
        RecipeError: it contains another recipe's run.
    """
    if not (run.run_dir / RECIPE_FILE).exists():
        return False
    before = read_recipe(run.run_dir)
    now = run.recipe.model_dump(mode="json")
    changed = [section for section in now if before.get(section) != now[section]]
    if changed:
        raise RecipeError(
            f"{run.run_dir} holds a run with another [{'], ['.join(changed)}]; "
            "nothing was touched. Name another --output-dir, or move it away"
        )
    if not (run.run_dir / METRICS_FILE).exists():
        return False
    return any(
        record["step"] == run.recipe.trainer.steps and "eval/accuracy" in record
        for record in read_metrics(run.run_dir)
    )


def start(run: Run) -> bool:
    """Run or resume one run in a process of its own; its output goes to a log beside its directory.

    Returns:
        True if it finished, False if it diverged.

    Raises:
        RecipeError: the run could not start; the message ends with the last line of its log.
        KeyboardInterrupt: Ctrl-C or another signal, once the run has written its checkpoint.
    """
    command = [sys.executable, "-m", "prime_composer.cli", "rl", "--config", str(run.base)]
    command += ["--engine", "local", "--output-dir", str(run.run_dir)]
    for item in run.overrides:
        command += ["--set", item]
    if list_checkpoints(run.run_dir):
        command.append("--resume")
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    status = call(command, run.log)
    if status > 128:
        raise Stopped(status - 128)
    if status not in (0, 1):
        last = run.log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RecipeError(
            f"{run.name} ended with status {status}: {' '.join(last)} (all of it: {run.log})"
        )
    return status == 0


def call(command: Sequence[str], log: Path) -> int:
    """Return the exit status of a process whose output is appended to ``log``.

    It is out of the terminal's reach and gets each signal from here, once: the first one makes it
    leave a checkpoint, the second one ends it.
    """
    stopped: KeyboardInterrupt | None = None
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt as error:
                stopped = error
                process.send_signal(signum_of(error))
    if stopped is not None:
        raise stopped
    return status


def signum_of(error: KeyboardInterrupt) -> int:
    """Return the number of the signal behind a KeyboardInterrupt."""
    return error.signum if isinstance(error, Stopped) else signal.SIGINT


def in_short(run: Run) -> str:
    """Format a finished run as one line."""
    values = measured(run)
    accuracy, reverse_kl = values["accuracy"], values["reverse_kl"]
    parts = [f"accuracy {percent(accuracy[0][1])} → {percent(accuracy[-1][1])}"]
    if reverse_kl:
        parts.append(f"reverse KL {number(reverse_kl[0][1])} → {number(reverse_kl[-1][1])}")
    return ", ".join(parts)


def measured(run: Run) -> dict[str, Series]:
    """Read the run's series, by the names of ``SERIES``."""
    records = read_metrics(run.run_dir)
    return {
        name: [
            (record["step"], record[key])
            for record in records
            for key in (metric, f"{run.recipe.loss.type}/{metric}")
            if key in record
        ]
        for name, metric in SERIES.items()
    }


def compare(study: StudyConfig, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the contents of ``results.json``: the series of finished runs, and over the seeds."""
    variants = {}
    for variant, items in study.variants.items():
        repeats = [run for run in runs if run.variant == variant]
        finished = [run for run in repeats if is_finished(run)]
        by_seed = {str(run.seed): measured(run) for run in finished}
        start_of_run = read_metrics(finished[0].run_dir)[0] if finished else {}
        variants[variant] = {
            "overrides": list(items),
            "loss": repeats[0].recipe.model_dump(mode="json")["loss"],
            "unfinished_seeds": [run.seed for run in repeats if run not in finished],
            "teacher_accuracy": start_of_run.get("teacher/accuracy"),
            "seeds": by_seed,
            "over_seeds": {
                name: list(over_seeds([series[name] for series in by_seed.values()]))
                for name in SERIES
            },
        }
    return {"base": str(study.base), "overrides": list(study.overrides), "variants": variants}


def over_seeds(
    series: Sequence[Sequence[tuple[int, float]]],
) -> Iterator[dict[str, int | float]]:
    """Yield mean, min and max at each step that every seed measured."""
    columns = [dict(points) for points in series]
    steps = sorted(set.intersection(*(set(column) for column in columns))) if columns else []
    for step in steps:
        values = [column[step] for column in columns]
        yield {
            "step": step,
            "mean": sum(values) / len(values),
            "min": min(values),
            "max": max(values),
        }


def as_table(results: Mapping[str, Any]) -> str:
    """Format the comparison as a Markdown table: the mean over the seeds, and (min to max)."""
    head = ["variant", "seeds", "accuracy", "reverse KL, nats/token", "top 1% of tokens hold"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    before = ""
    for variant, result in results["variants"].items():
        series = result["over_seeds"]
        finished, unfinished = len(result["seeds"]), len(result["unfinished_seeds"])
        cells = [
            f"{finished} of {finished + unfinished}" if unfinished else str(finished),
            spread(series["accuracy"], percent),
            spread(series["reverse_kl"], number),
            thirds(series["top1pct"]),
        ]
        if series["accuracy"] and not before:
            before = f"\nBefore training: accuracy {percent(series['accuracy'][0]['mean'])}"
            before += f" (the teacher {percent(result['teacher_accuracy'])})"
            if series["reverse_kl"]:
                before += f", reverse KL {number(series['reverse_kl'][0]['mean'])}"
            before += "."
        lines.append(f"| {' | '.join([variant, *cells])} |")
    return "\n".join([*lines, before] if before else lines) + "\n"


def spread(series: Sequence[Mapping[str, int | float]], text: Callable[[float | None], str]) -> str:
    """Format the last measurement: mean (min to max), or the one value that all seeds have."""
    if not series:
        return MISSING
    last = series[-1]
    if last["min"] == last["max"]:
        return text(last["mean"])
    return f"{text(last['mean'])} ({text(last['min'])} to {text(last['max'])})"


def thirds(series: Sequence[Mapping[str, int | float]]) -> str:
    """Format the mean over the first third of the steps, and over the last third."""
    if not series:
        return MISSING
    size = max(1, len(series) // 3)
    means = [
        sum(point["mean"] for point in part) / size for part in (series[:size], series[-size:])
    ]
    return f"{percent(means[0])} → {percent(means[1])}"


def draw(results: Mapping[str, Any], output: Path) -> None:
    """Draw each quantity of ``SERIES`` against steps: the mean, and the range over seeds."""
    figure = new_figure(15, 5)
    from matplotlib import colormaps

    panels = figure.subplots(1, 3)
    titles = {
        "accuracy": ("held-out accuracy, greedy", "share"),
        "reverse_kl": ("reverse KL to the teacher, held out", "nats per token"),
        "top1pct": ("share of the loss's signal in its top 1% of tokens", "share"),
    }
    colors = colormaps["tab10" if len(results["variants"]) <= 10 else "tab20"]
    for axes, (name, (title, unit)) in zip(panels, titles.items(), strict=True):
        for index, (variant, result) in enumerate(results["variants"].items()):
            points = result["over_seeds"][name]
            if not points:
                continue
            steps, means, lows, highs = (
                [point[key] for point in points] for key in ("step", "mean", "min", "max")
            )
            axes.plot(steps, means, color=colors(index), label=variant)
            axes.fill_between(steps, lows, highs, color=colors(index), alpha=0.12, linewidth=0)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(output, dpi=120)
