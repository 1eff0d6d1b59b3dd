"""Run ``prime-rl probe``: measure a recipe's models, and print tables or JSON."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from prime_composer.cli.formatting import MISSING, percent
from prime_composer.cli.program import program
from prime_composer.cli.progress import Screen
from prime_composer.cli.report import console
from prime_composer.local.preflight import Finding, one_line
from prime_composer.local.probe.report import (
    Agreement,
    ModelFacts,
    PluginReport,
    ProbeReport,
    StepForecast,
    StudentReport,
    TeacherReport,
    Throughput,
    TokenizerPairFacts,
)
from prime_composer.local.probe.run import OPENING, probe
from prime_composer.local.run_dir.model_check import check_models
from prime_composer.local.run_dir.plan import plan
from prime_composer.local.sources import load_sources
from prime_composer.recipe.schema import Recipe
from prime_composer.tiny_models.cache import prepare_models

PASSED = {"ok": True, "failed": False, "skipped": None}  # A check's; a warning is no result

WORDS = {True: "passed", False: "FAILED", None: "not run"}


def run_probe(recipe: Recipe, as_json: bool) -> int:
    """Prepare a recipe's small models, measure, and print tables or one JSON object."""
    report = _measured(recipe)
    if not as_json:
        print_probe(report)
    for finding in report.findings:
        if finding.state == "failed":
            print(f"{program()} probe: {finding.name}: {finding.text}", file=sys.stderr)
    if as_json:
        print(json.dumps(plain(serialized(report)), indent=2, allow_nan=False))
    return 0 if report.passed else 1


def _measured(recipe: Recipe) -> ProbeReport:
    """Return what is measured of one recipe, with what a dry run refuses."""
    with redirect_stdout(sys.stderr), Screen(total=recipe.trainer.steps) as screen:
        problems = load_sources(recipe)
        refused = refusal(OPENING, lambda: check_models(recipe))
        if refused is not None:
            return ProbeReport([refused])
        refused = refusal("what rl --dry-run checks", lambda: plan(recipe, problems))
        paths = prepare_models(recipe, problems, progress=screen.preparing)
        report = probe(recipe, problems, paths, screen.status)
        # A check of the open models has said it already, with the same words or better ones.
        if refused is not None and report.passed:
            report = replace(report, findings=[*report.findings, refused])
        return report


def refusal(name: str, check: Callable[[], object]) -> Finding | None:
    """Return what a check refuses; None where it passes."""
    try:
        check()
    except (ValueError, ImportError) as error:
        return Finding(name, "failed", one_line(error))
    return None


def serialized(report: ProbeReport) -> dict[str, Any]:
    """Return a report as plain dictionaries and lists."""
    fields = asdict(report)
    del fields["findings"]
    checks = [
        {"name": finding.name, "passed": passed, "message": finding.text or None}
        for finding, passed in results(report.findings)
    ]
    return {"passed": report.passed, "checks": checks, "warnings": report.warnings, **fields}


def results(findings: Iterable[Finding]) -> list[tuple[Finding, bool | None]]:
    """Return the result of each check: whether it passed, None where it was not run."""
    return [(one, PASSED[one.state]) for one in findings if one.state in PASSED]


def plain(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_probe(report: ProbeReport) -> None:
    """Print the report as tables, the checks first and the recommendations last."""
    screen = console()
    made = [checks_table(report.findings)]
    if report.student is not None and report.step is not None:
        made.append(models_table(report.student, report.teachers))
        made += [
            tokenizers_table(name, teacher.tokenizers)
            for name, teacher in report.teachers.items()
            if teacher.tokenizers is not None
        ]
        made += teacher_tables(report.teachers)
        made.append(step_table(report.step, report.student))
        made.append(unmeasured_table(report.student, report.teachers))
    for table in made:
        if table.row_count:
            screen.print(table)
    for title, lines in (
        ("warnings", report.warnings),
        ("recommendations", report.recommendations),
    ):
        if lines:
            screen.print(Text(title, style="bold"))
        for line in lines:
            screen.print(Text(f"  - {line}"), soft_wrap=True)


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], left: bool = False
) -> Table:
    """Return a table whose first column is a name. Brackets in a cell are no markup."""
    table = Table(title=Text(title, style="bold"), box=SIMPLE_HEAD, title_justify="left")
    for index, column in enumerate(columns):
        justify: Any = "right" if index and not left else "left"
        table.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(MISSING if cell is None else str(cell)) for cell in row))
    return table


def checks_table(findings: Iterable[Finding]) -> Table:
    """Return the preflight's checks and those of a step's parts. Why one failed is below them."""
    rows = (
        (
            finding.name,
            WORDS[passed] + (f": {finding.text}" if finding.text and passed is not False else ""),
        )
        for finding, passed in results(findings)
    )
    return table_of("checks", ("check", "result"), rows, left=True)


def models_table(student: StudentReport, teachers: Mapping[str, TeacherReport]) -> Table:
    """Return tokenizers, limits and numbers: a column for the student and one per teacher."""
    facts = [student.facts, *(teacher.facts for teacher in teachers.values())]

    def models(cell: Callable[[ModelFacts], object]) -> list[object]:
        return [*map(cell, facts)]

    def own(cell: Callable[[TeacherReport], object], of_student: object = "") -> list[object]:
        return [of_student, *map(cell, teachers.values())]

    def plugin(cell: Callable[[PluginReport], object]) -> list[object]:
        return own(lambda teacher: None if teacher.plugin is None else cell(teacher.plugin))

    rows = {
        "model": models(lambda model: model.model),
        "backend": models(lambda model: model.url or model.backend),
        "tokenizer: hash of the vocabulary": models(lambda m: hash_cell(m, "vocabulary_hash")),
        "  hash of the split of three texts": models(lambda m: hash_cell(m, "split_hash")),
        "  as the student's": own(lambda teacher: yes(teacher.same_tokenizer)),
        "chat template hash": models(lambda m: hash_cell(m, "template_hash")),
        "  same prompts": own(lambda teacher: yes(teacher.same_prompts)),
        "EOS and its id": models(eos_cell),
        "special and added tokens": models(lambda m: m.tokenizer and len(m.tokenizer.special_ids)),
        "output head, entries": models(lambda model: count(model.vocabulary)),
        "context, tokens": models(lambda model: count(model.context)),
        "largest K": own(largest_cell),
        "log-probs when sampling": models(lambda model: model.logprob_mode),
        "dtype": own(dtype_cell, student.facts.dtype),
        "entropy, nats": own(entropy_cell),
        "recommended K": own(lambda teacher: teacher.support and teacher.support.recommended_k),
        "nats from a forward pass": own(
            lambda teacher: agreement_cell(teacher.agreement), agreement_cell(student.agreement)
        ),
    }
    if any(teacher.plugin is not None for teacher in teachers.values()):
        rows |= {
            "scoring plugin": plugin(version_cell),
            "  kinds": plugin(lambda plugin: ", ".join(plugin.kinds) or None),
            "  output head": plugin(head_cell),
            "  falls back to JSON": plugin(
                lambda plugin: "every score" if plugin.version is None else "nothing"
            ),
        }
    rows_with_titles = ((title, *cells) for title, cells in rows.items())
    return table_of("models", ("", "student", *teachers), rows_with_titles)


def tokenizers_table(name: str, pair: TokenizerPairFacts) -> Table:
    """Return what a teacher with a tokenizer of its own says of the student's tokens."""
    often = ", ".join(map(repr, pair.often_open))
    rows = {
        "student's tokens": f"{pair.positions:,}",
        "  that begin on a boundary of the teacher's": percent(pair.aligned),
        "  non-canonical": percent(pair.noncanonical),
        "  without a score": percent(pair.unscored),
        "  with a bound of other tokenizations above 5% of the mass": percent(pair.off_path),
        "teacher's tokens per student token": f"{pair.teacher_tokens:.2f}",
        "teacher's mass on closed tokens": f"{percent(pair.closed_mass)} (open: "
        f"{pair.open_tokens:,} tokens{often and f', most often {often}'})",
        f"teacher's mass on the {pair.k} ids": f"{pair.support_mass:.3f} of {pair.best_mass:.3f}",
        "end of the student's prompt": repr(pair.student_prompt),
        "end of the teacher's prompt": repr(pair.teacher_prompt),
    }
    return table_of(f"tokenizers of the student and {name}", ("", "value"), rows.items(), left=True)


def teacher_tables(teachers: Mapping[str, TeacherReport]) -> list[Table]:
    """Return the special tokens of the rollouts, the speeds of scoring, and what each K hides."""
    tokens = (
        (
            *(row.token, name, row.student_id, row.teacher_id),
            f"{row.occurrences}" + (f" ({row.endings} end a rollout)" if row.endings else ""),
            *(f"{row.student_probability:.3g}", f"{row.teacher_probability:.3g}"),
        )
        for name, teacher in teachers.items()
        for row in teacher.special_tokens
    )
    entries = [entry for teacher in teachers.values() for entry in teacher.throughput]
    columns = [*dict.fromkeys(entry.column for entry in entries)]
    speeds = []
    for name, teacher in teachers.items() if columns else ():
        cells = {entry.column: speed_cell(entry) for entry in teacher.throughput}
        speeds.append((name, *map(cells.get, columns)))
    supports = (
        (name, row.k, f"{row.mass_outside:.2e}", f"{row.reverse_kl:.4f}", percent(row.hidden))
        for name, teacher in teachers.items()
        for row in (teacher.support.by_k if teacher.support is not None else ())
    )
    return [
        table_of(
            "special tokens in the rollouts, mean probabilities",
            ("token", "teacher", "id", "teacher's id", "positions", "student", "teacher"),
            tokens,
        ),
        table_of("scoring, rollout tokens per second (seconds per step)", ("K", *columns), speeds),
        table_of(
            "the teacher's top K on rollouts of the student",
            ("teacher", "K", "mass outside", "reverse KL, nats", "KL hidden"),
            supports,
        ),
    ]


def step_table(step: StepForecast, student: StudentReport) -> Table:
    column = "" if step.column is None else f" at K = {step.column}"
    column = " with hidden states" if step.column == "states" else column
    rows = {
        "rollouts": step.rollouts,
        "rollout tokens": count(step.tokens),
        "tokens per rollout": count(student.tokens_per_rollout),
        "cut off at max_tokens": percent(student.truncated),
        "sampling": seconds(step.sample_seconds),
        f"scoring{column}": seconds(step.score_seconds),
        "forward and backward": seconds(step.train_seconds),
        "all steps, without evaluations": seconds(step.run_seconds),
    }
    return table_of("one step of this recipe", ("", "value"), rows.items())


def unmeasured_table(student: StudentReport, teachers: Mapping[str, TeacherReport]) -> Table:
    """Return what was not measured, with the reasons."""
    models = {"student": student.unmeasured} | {n: t.unmeasured for n, t in teachers.items()}
    rows = ((name, *reason) for name, reasons in models.items() for reason in reasons.items())
    return table_of("not measured", ("model", "what", "why"), rows, left=True)


def yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "NO"


def count(value: int | float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str | None:
    """Format seconds, from an hour on as hours."""
    if value is None:
        return None
    return f"{value / 3600:,.1f} h" if value >= 3600 else f"{value:.3g} s"


def hash_cell(model: ModelFacts, name: str) -> str:
    if model.tokenizer is None:
        return "cannot be asked"
    without = "none" if model.tokenizer.from_files else "cannot be asked"
    return getattr(model.tokenizer, name) or without


def eos_cell(model: ModelFacts) -> str | None:
    """Format the token that ends a text."""
    if model.tokenizer is None or model.tokenizer.eos is None:
        return None
    eos = model.tokenizer.eos
    return f"{eos} {model.tokenizer.special_ids.get(eos, MISSING)}"


def largest_cell(teacher: TeacherReport) -> str | None:
    if teacher.facts.largest_k is None:
        return None
    return ("" if teacher.facts.largest_k_exact else "at least ") + f"{teacher.facts.largest_k:,}"


def dtype_cell(teacher: TeacherReport) -> str:
    """Format a teacher's dtype: what its numbers show, else the recipe's."""
    return "bfloat16-like" if teacher.head_bfloat16 else f"{teacher.facts.dtype} (recipe)"


def entropy_cell(teacher: TeacherReport) -> str | None:
    """Format a teacher's entropy, a lower bound below K = V."""
    support = teacher.support
    if support is None:
        return None
    bound = "" if support.largest_k == teacher.facts.vocabulary else "at least "
    return f"{bound}{support.entropy:.3f}"


def agreement_cell(agreement: Agreement | None) -> str | None:
    """Format the distance from a forward pass."""
    return f"{agreement.largest:.1e} (mean {agreement.mean:.1e})" if agreement else None


def speed_cell(entry: Throughput) -> str:
    if entry.tokens_per_second is None:
        return "refused"
    return f"{entry.tokens_per_second:,.0f} ({entry.seconds_per_step:.2g})"


def version_cell(plugin: PluginReport) -> str:
    return "none" if plugin.version is None else f"version {plugin.version}, vLLM {plugin.vllm}"


def head_cell(plugin: PluginReport) -> str | None:
    head = plugin.head
    if head is None:
        return None
    dtype = head["dtype"]
    if head["computed_in"] != dtype:
        dtype += f", computed in {head['computed_in']}"
    return f"{head['rows']:,} x {head['columns']:,} {dtype}, {head['sha256'][:12]}"
