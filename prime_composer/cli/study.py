"""Studies: several variants of one recipe, over several seeds, from the same start and the same rollout budget.

A study file names the base recipe, what each variant overrides, and the seeds. Every run is a process of its own
(``prime-rl rl``), in ``<study>/<variant>-seed<N>``; what has finished is kept, so a study that was stopped goes on where it
was. The comparison is drawn from the runs' own ``metrics.jsonl``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from prime_composer.local.tracker import METRICS_FILE, read_metrics
from prime_composer.recipe.loading import load_recipe, parse_tables, read_tables
from prime_composer.recipe.schema import Recipe, RecipeError, Section

RECIPE_FILE = "recipe.json"

SAME = (
    "student", "data", "trainer.steps", "trainer.batch_size", "rollout.max_tokens", "eval.size", "eval.kl_size",
)  # fmt: skip
"""What every variant has to share: the start, the rollout budget, and what is measured."""

SERIES = {
    "accuracy": "eval/accuracy",
    "reverse_kl": "eval/reverse_kl",
    "top1pct": "signal_top1pct",
}
"""What is compared, by its name in ``results.json``, and the metric, or the end of its name where each loss has its own."""

MISSING = "–"


class StudyConfig(Section):
    """Which runs are compared."""

    base: Path
    """The recipe that every variant starts from; relative to the study file."""

    overrides: tuple[str, ...] = ()
    """``section.key=value``, as after ``--set``: what all variants change in the base."""

    variants: Annotated[dict[str, tuple[str, ...]], Field(min_length=2)]
    """Name -> ``section.key=value`` items of its own. ``loss={type = "taid", k = 16}`` replaces a whole table."""

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
                    f"{name!r} names a directory: letters, digits and . _ + - only, and no sign first"
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
        recipe: the base with the variant's overrides and the seed.
        overrides: the same as ``--set`` items.
        base: the recipe file.
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
        output_dir: takes the place of the file's own.

    Returns:
        The study, and its runs: seed by seed, so that a study that is stopped early compares what it has.

    Raises:
        RecipeError: the file, a variant's override or its recipe is wrong, or the variants do not share start and budget.
    """
    path = Path(path)
    study = parse_tables(StudyConfig, read_tables(path, "study", "recipes/studies/"), str(path))
    for item in (*study.overrides, *(item for own in study.variants.values() for item in own)):
        if item.partition("=")[0].strip() == "trainer.seed":
            raise RecipeError(f"{path}: {item}: the seeds of a study stand in `seeds`")
    base = Path(os.path.relpath(path.parent / study.base))
    folder = Path(output_dir or study.output_dir or Path("outputs") / path.stem)
    runs = []
    for seed in study.seeds:
        for variant, own in study.variants.items():
            overrides = (*study.overrides, *own, f"trainer.seed={seed}")
            try:
                recipe = load_recipe(base, overrides)
            except RecipeError as error:
                raise RecipeError(f"{path}: variants.{variant}: {error}") from None
            runs.append(
                Run(variant, seed, recipe, overrides, base, folder / f"{variant}-seed{seed}")
            )
    _check_same_budget(runs[: len(study.variants)], path)
    return study, runs


def _check_same_budget(runs: Sequence[Run], path: Path) -> None:
    for key in SAME:
        values = [_at(run.recipe, key) for run in runs]
        for run, value in zip(runs, values, strict=True):
            if value != values[0]:
                raise RecipeError(
                    f"{path}: variants.{run.variant}: {key} differs from that of variants.{runs[0].variant} "
                    f"({_short(value)} against {_short(values[0])}); a comparison starts from the same student and spends "
                    "the same rollouts. Set it in `overrides`, for all of them"
                )


def _at(recipe: Recipe, key: str) -> Any:
    if key == "data":  # who teaches an environment may differ
        return {
            name: data.model_copy(update={"teacher": None}) for name, data in recipe.sources.items()
        }
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def run_study(path: Path, output_dir: str | None = None) -> int:
    """Run what is missing of a study, draw the comparison and print its table. Returns the exit status: 1 if a run failed.

    A run that diverges is named in the table and the others go on; a wrong set-up stops the study. Ctrl-C stops it after
    the step at hand, compares what there is, and returns 130.
    """
    study, runs = load_study(path, output_dir)
    folder = runs[0].run_dir.parent
    print(
        f"study: {len(study.variants)} variants, {len(study.seeds)} seeds, in {folder}", flush=True
    )
    failed: list[str] = []
    stopped = False
    try:
        for number, run in enumerate(runs, 1):
            failed += [] if finish(run, f"[{number}/{len(runs)}] {run.name}") else [run.name]
    except KeyboardInterrupt:
        stopped = True
    results = compare(study, runs)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = as_table(results)
    (folder / "table.md").write_text(table, encoding="utf-8")
    draw(results, folder / "study.png")
    print(
        f"\n{table}\nfigure: {folder / 'study.png'}\nnumbers: {folder / 'results.json'}, {folder / 'table.md'}"
    )
    if failed:
        print(
            f"prime-rl study: failed: {', '.join(failed)}; the table leaves them out",
            file=sys.stderr,
        )
    if stopped:
        print("stopped; the same command goes on where this one was")
    return 130 if stopped else 1 if failed else 0


def finish(run: Run, label: str) -> bool:
    """Run it unless that is done, and say how it went; False if it diverged."""
    if is_finished(run):
        print(f"{label}: {in_short(run)} (kept)", flush=True)
        return True
    print(f"{label}: running; progress in {run.log}", flush=True)
    done = start(run)
    print(f"{label}: {in_short(run) if done else f'failed, see {run.log}'}", flush=True)
    return done


def is_finished(run: Run) -> bool:
    """Whether the run's directory holds its last evaluation.

    Raises:
        RecipeError: it holds another recipe's run.
    """
    try:
        before = json.loads((run.run_dir / RECIPE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    now = run.recipe.model_dump(mode="json")
    changed = [section for section in now if before.get(section) != now[section]]
    if changed:
        raise RecipeError(
            f"{run.run_dir} holds a run with another [{'], ['.join(changed)}]; nothing was touched. "
            "Name another --output-dir, or move it away"
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
        RecipeError: the run could not start; the message has its last words.
        KeyboardInterrupt: Ctrl-C, once the run has left its checkpoint.
    """
    command = [
        sys.executable,
        "-m",
        "prime_composer.cli.commands",
        "rl",
        "--config",
        str(run.base),
        "--engine",
        "local",
    ]
    command += ["--output-dir", str(run.run_dir)]
    for item in run.overrides:
        command += ["--set", item]
    if any((run.run_dir / "checkpoints").glob("step_*")):
        command.append("--resume")
    elif (run.run_dir / RECIPE_FILE).exists():
        shutil.rmtree(run.run_dir)  # this study's own run, stopped before its first checkpoint
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    status = call(command, run.log)
    if status == 130:
        raise KeyboardInterrupt
    if status not in (0, 1):
        last = run.log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RecipeError(
            f"{run.name} ended with status {status}: {' '.join(last)} (all of it: {run.log})"
        )
    return status == 0


def call(command: Sequence[str], log: Path) -> int:
    """Exit status of a process whose output is appended to ``log``."""
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # a terminal's Ctrl-C has reached it too: it finishes its step and leaves a checkpoint
            raise


def in_short(run: Run) -> str:
    """A finished run in one line."""
    found = measured(run)
    parts = [f"accuracy {percent(found['accuracy'][0][1])} → {percent(found['accuracy'][-1][1])}"]
    if found["reverse_kl"]:
        parts.append(
            f"reverse KL {found['reverse_kl'][0][1]:.3f} → {found['reverse_kl'][-1][1]:.3f}"
        )
    return ", ".join(parts)


def measured(run: Run) -> dict[str, list[tuple[int, float]]]:
    """The run's series: (step, value) by the names of ``SERIES``."""
    records = read_metrics(run.run_dir)
    series: dict[str, list[tuple[int, float]]] = {}
    for name, metric in SERIES.items():
        series[name] = [
            (record["step"], value)
            for record in records
            for key, value in record.items()
            if key == metric or key == f"{run.recipe.loss.type}/{metric}"
        ]
    return series


def compare(study: StudyConfig, runs: Sequence[Run]) -> dict[str, Any]:
    """Every finished run's series, and over the seeds mean, least and greatest value: the contents of ``results.json``."""
    results: dict[str, Any] = {
        "base": str(study.base),
        "overrides": list(study.overrides),
        "variants": {},
    }
    for variant, own in study.variants.items():
        mine = [run for run in runs if run.variant == variant]
        done = [run for run in mine if is_finished(run)]
        unfinished = [run.seed for run in mine if run not in done]
        by_seed = {str(run.seed): measured(run) for run in done}
        results["variants"][variant] = {
            "overrides": list(own),
            "loss": mine[0].recipe.loss.model_dump(mode="json"),
            "unfinished_seeds": unfinished,
            "teacher_accuracy": read_metrics(done[0].run_dir)[0].get("teacher/accuracy")
            if done
            else None,
            "seeds": by_seed,
            "over_seeds": {
                name: list(over_seeds([series[name] for series in by_seed.values()]))
                for name in SERIES
            },
        }
    return results


def over_seeds(series: Sequence[Sequence[tuple[int, float]]]) -> Iterator[dict[str, int | float]]:
    """At each step that every seed measured: mean, min and max."""
    columns = [dict(one) for one in series]
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
    """The comparison as a Markdown table: mean over the seeds, and (least to greatest)."""
    head = ["variant", "seeds", "accuracy", "reverse KL, nats/token", "top 1 % of tokens hold"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    before = ""
    for variant, found in results["variants"].items():
        series = found["over_seeds"]
        done, left = len(found["seeds"]), len(found["unfinished_seeds"])
        cells = [
            f"{done} of {done + left}" if left else str(done),
            spread(series["accuracy"], percent),
            spread(series["reverse_kl"], number),
            thirds(series["top1pct"]),
        ]
        if series["accuracy"] and not before:
            before = f"\nBefore training: accuracy {percent(series['accuracy'][0]['mean'])}"
            before += f" (the teacher {percent(found['teacher_accuracy'])})"
            before += (
                f", reverse KL {number(series['reverse_kl'][0]['mean'])}."
                if series["reverse_kl"]
                else "."
            )
        lines.append(f"| {' | '.join([variant, *cells])} |")
    return "\n".join([*lines, before] if before else lines) + "\n"


def spread(series: Sequence[Mapping[str, int | float]], text: Any) -> str:
    """The last measurement: mean (min to max), or the one value that all seeds have."""
    if not series:
        return MISSING
    last = series[-1]
    if last["min"] == last["max"]:
        return text(last["mean"])
    return f"{text(last['mean'])} ({text(last['min'])} to {text(last['max'])})"


def thirds(series: Sequence[Mapping[str, int | float]]) -> str:
    """Mean over the first third of the steps, and over the last third."""
    if not series:
        return MISSING
    size = max(1, len(series) // 3)
    means = [
        sum(point["mean"] for point in part) / size for part in (series[:size], series[-size:])
    ]
    return f"{percent(means[0])} → {percent(means[1])}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def number(value: float) -> str:
    return f"{value:.3f}"


def draw(results: Mapping[str, Any], output: Path) -> None:
    """Accuracy, reverse KL and the share of the signal in the top 1 % of tokens against steps: mean and range over seeds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = {
        "accuracy": ("held-out accuracy, greedy", "share"),
        "reverse_kl": ("reverse KL to the teacher, held out", "nats per token"),
        "top1pct": ("share of the loss's signal in its top 1 % of tokens", "share"),
    }
    colors = colormaps["tab10" if len(results["variants"]) <= 10 else "tab20"]
    for axes, (name, (title, unit)) in zip(panels, titles.items(), strict=True):
        for index, (variant, found) in enumerate(results["variants"].items()):
            points = found["over_seeds"][name]
            if not points:
                continue
            steps = [point["step"] for point in points]
            axes.plot(
                steps, [point["mean"] for point in points], color=colors(index), label=variant
            )
            axes.fill_between(
                steps,
                [p["min"] for p in points],
                [p["max"] for p in points],
                color=colors(index),
                alpha=0.12,
                linewidth=0,
            )
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(output, dpi=120)
