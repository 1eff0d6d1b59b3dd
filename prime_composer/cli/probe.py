"""Run ``prime-rl probe``: measure a recipe's models, and print tables or JSON."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from prime_composer.cli.program import program
from prime_composer.cli.progress import Screen
from prime_composer.cli.quantities import MISSING
from prime_composer.cli.report import console
from prime_composer.local.preflight import CheckResult, one_line
from prime_composer.local.probe.report import ProbeReport, StudentReport, TeacherReport
from prime_composer.local.probe.run import OPENING, SECONDS_PER_COLUMN, probe
from prime_composer.local.probe.served import probe_server
from prime_composer.local.requirements import check_requirements
from prime_composer.local.sources import load_sources
from prime_composer.recipe.loading import load_recipe
from prime_composer.recipe.schema import Recipe
from prime_composer.recipe.urls import public_url
from prime_composer.teachers.server import ServerScorer
from prime_composer.tiny_models.cache import prepare_models

PASSED = {"ok": True, "failed": False, "skipped": None}  # A check's; a warning is no result

WORDS = {True: "passed", False: "FAILED", None: "not run"}

TITLES = {
    "vocabulary": "output head, entries",
    "largest_k": "largest K",
    "max_logprobs": "largest K in JSON (--max-logprobs)",
    "sampled_logprob": "mean log-prob of its own tokens, sampled",
    "scored_logprob": "the same, scored",
    "entropy": "entropy, nats",
    "recommended_k": "recommended K",
    "k": "K",
    "column": "K",
    "reverse_kl": "reverse KL, nats",
    "hidden": "share of the KL hidden",
    "throughput": "scoring, rollout tokens without prompts",
    "by_k": "by K",
    "run_seconds": "run seconds, without evaluations",
}
"""Field of a record -> its title, where the field's own name is not enough."""

SHOWN = 8  # Entries of a list in one cell


def run_probe(
    config: str | None,
    teacher: str | None,
    model: str | None,
    json_output: bool,
    overrides: Sequence[str],
) -> int:
    """Measure a recipe's models, or a server; print tables or one JSON object."""
    if (config is None) == (teacher is None):
        raise ValueError("give --config FILE, a recipe, or --teacher URL, a server")
    if overrides if config is None else model:
        raise ValueError("--set goes with --config, and --model with --teacher")
    if teacher is not None:
        report = _measured_server(teacher, model)
    else:
        report = _measured(load_recipe(str(config), overrides))
    if not json_output:
        print_probe(report)
    for finding in report.findings:
        if finding.state == "failed":
            print(f"{program()} probe: {finding.name}: {finding.text}", file=sys.stderr)
    if json_output:
        # JSON has neither NaN nor infinities: what reads them gives None.
        found = json.loads(json.dumps(serialized(report)), parse_constant=lambda _: None)
        print(json.dumps(found, indent=2, allow_nan=False))
    return 0 if report.passed else 1


def _measured_server(url: str, model: str | None) -> ProbeReport:
    """Return what is measured of a teacher's server without a recipe."""
    with redirect_stdout(sys.stderr), Screen(total=1) as screen:
        screen.status(f"measuring {public_url(url)}")
        with closing(ServerScorer(url, model, section="--teacher", status=screen.status)) as scorer:
            return probe_server(scorer, url, SECONDS_PER_COLUMN)


def _measured(recipe: Recipe) -> ProbeReport:
    """Return what is measured of one recipe."""
    with redirect_stdout(sys.stderr), Screen(total=recipe.trainer.steps) as screen:
        problems = load_sources(recipe)
        try:
            check_requirements(recipe)
        except (ValueError, ImportError) as error:
            return ProbeReport([CheckResult(OPENING, "failed", one_line(error))])
        paths = prepare_models(recipe, problems, progress=screen.preparing)
        return probe(recipe, problems, paths, screen.status)


def serialized(report: ProbeReport) -> dict[str, Any]:
    """Return a report as plain dictionaries and lists."""
    fields = asdict(report)
    del fields["findings"]
    checks = [
        {"name": one.name, "passed": PASSED[one.state], "message": one.text or None}
        for one in checks_of(report)
    ]
    return {"passed": report.passed, "checks": checks, "warnings": report.warnings, **fields}


def checks_of(report: ProbeReport) -> list[CheckResult]:
    """Return the findings that are the result of a check."""
    return [one for one in report.findings if one.state in PASSED]


def print_probe(report: ProbeReport) -> None:
    """Print the report as tables, the checks first and the recommendations last."""
    screen = console()
    checks = [(one.name, _result(one)) for one in checks_of(report)]
    made = [table_of("checks", ("check", "result"), checks)]
    models: dict[str, StudentReport | TeacherReport] = {**report.teachers}
    if report.student is not None:
        models = {"student": report.student, **models}
    if models:
        why = {name: teacher.unmeasured for name, teacher in report.teachers.items()}
        reasons = [(name, *reason) for name, own in why.items() for reason in own.items()]
        step = [] if report.step is None else side_by_side([report.step])
        metrics = {} if report.step is None else report.step.metrics
        made += [
            table_of("models", ("", *models), side_by_side([*models.values()])),
            *lists_of(models),
            table_of("one step of this recipe", ("", "value"), step),
            table_of("its metrics", ("", "value"), [(k, formatted(v)) for k, v in metrics.items()]),
            table_of("not measured", ("model", "what", "why"), reasons),
        ]
    for table in made:
        if table.row_count:
            screen.print(table)
    for title in ("warnings", "recommendations"):
        if lines := getattr(report, title):
            screen.print(Text(title, style="bold"))
        for line in lines:
            screen.print(Text(f"  - {line}"), soft_wrap=True)


def _result(finding: CheckResult) -> str:
    """Return a check's result in words; why it failed is on standard error."""
    word = WORDS[PASSED[finding.state]]
    return f"{word}: {finding.text}" if finding.text and finding.state == "skipped" else word


def side_by_side(records: Sequence[object]) -> list[tuple[str, ...]]:
    """Return a row for each single value of some records, with a cell for each record."""
    columns = [
        {title: formatted(value) for title, value in leaves(record) if not is_list(value)}
        for record in records
    ]
    titles = dict.fromkeys(title for column in columns for title in column)
    rows = [(title, *(column.get(title, MISSING) for column in columns)) for title in titles]
    return [row for row in rows if set(row[1:]) != {MISSING}]


def lists_of(models: Mapping[str, object]) -> Iterator[Table]:
    """Yield a table for each list of records that some models have, such as the speed at each K."""
    found: dict[str, list[dict[str, str]]] = {}
    for model, record in models.items():
        for title, value in leaves(record):
            for one in value if is_list(value) else ():
                row = {"model": model} | {name: formatted(cell) for name, cell in leaves(one)}
                found.setdefault(title, []).append(row)
    for title, rows in found.items():
        columns = [name for name in rows[0] if any(row[name] != MISSING for row in rows)]
        yield table_of(title, columns, [[row[name] for name in columns] for row in rows])


def leaves(record: object, of: str = "") -> Iterator[tuple[str, Any]]:
    """Yield title and value of each field of a record, and of the records within it."""
    for name, value in vars(record).items():
        title = of + TITLES.get(name, name.replace("_", " "))
        if is_dataclass(value):
            yield from leaves(value, "" if name == "facts" else f"{title}: ")
        elif name not in ("unmeasured", "metrics"):
            yield title, value


def is_list(value: Any) -> bool:
    """Return whether a value is a list of records."""
    return isinstance(value, list) and any(map(is_dataclass, value))


def formatted(value: Any) -> str:
    """Format a single value. A text that is not printable is quoted, as Python does it."""
    if value is None or value in ([], {}):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        value = [f"{name} {formatted(one)}" for name, one in value.items()]
    if isinstance(value, list):
        more = [f"and {len(value) - SHOWN} more"] if len(value) > SHOWN else []
        return ", ".join([*map(formatted, value[:SHOWN]), *more])
    return value if value.isprintable() and value == value.strip() else repr(value)


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table. Brackets in a cell are no markup."""
    table = Table(title=Text(title, style="bold"), box=SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
