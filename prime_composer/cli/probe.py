"""Run ``prime-rl probe``: measure a recipe's models, and print tables or JSON."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from prime_composer.cli.formatting import MISSING, percent
from prime_composer.cli.progress import Screen
from prime_composer.cli.report import console
from prime_composer.local.probe import probe
from prime_composer.local.probe_report import (
    Agreement,
    ModelFacts,
    PluginReport,
    ProbeReport,
    StudentReport,
    TeacherReport,
    Throughput,
    TokenizerFacts,
)
from prime_composer.local.sources import load_sources
from prime_composer.recipe.schema import Recipe
from prime_composer.tiny_models.cache import prepare_models


def run_probe(recipe: Recipe, as_json: bool) -> int:
    """Prepare a recipe's small models, measure, and print what was found.

    Progress goes to standard error, the result to standard output.

    Args:
        recipe: the resolved recipe.
        as_json: print one JSON object instead of tables.

    Returns:
        The exit status: 0, or 1 where a check failed.
    """
    with redirect_stdout(sys.stderr), Screen(total=recipe.trainer.steps) as screen:
        problems = load_sources(recipe)
        paths = prepare_models(recipe, problems, progress=screen.preparing)
        report = probe(recipe, problems, paths, screen.status)
    if as_json:
        print(json.dumps(plain(asdict(report)), indent=2, allow_nan=False))
    else:
        print_probe(report)
    for check in report.checks:
        if check.passed is False:
            print(f"prime-rl probe: {check.name}: {check.message}", file=sys.stderr)
    return 0 if report.passed else 1


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
    for table in tables(report):
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


def tables(report: ProbeReport) -> list[Table]:
    """Return every table of a report; those without a row are not worth printing."""
    made = [checks_table(report)]
    if report.student is not None:
        made += [models_table(report.student, report.teachers), tokens_table(report.teachers)]
        made += [speed_table(report.teachers), support_table(report.teachers), step_table(report)]
        made.append(unmeasured_table(report.student, report.teachers))
    return made


def new_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table whose first column is a name."""
    table = Table(title=Text(title, style="bold"), box=SIMPLE_HEAD, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row of texts; brackets in them are no markup."""
    table.add_row(*(Text(str(cell)) for cell in cells))


def checks_table(report: ProbeReport) -> Table:
    """Return the preflight's checks and those of a step's parts."""
    table = new_table("checks", ("check", "result"))
    table.columns[1].justify = "left"
    words = {True: "passed", False: "FAILED", None: "not run"}
    for check in report.checks:
        message = f": {check.message}" if check.message else ""
        add_row(table, check.name, words[check.passed] + message)
    return table


def models_table(student: StudentReport, teachers: Mapping[str, TeacherReport]) -> Table:
    """Return tokenizers, limits and numbers: a column for the student and one per teacher."""
    table = new_table("models", ("", "student", *teachers))
    models = [student.facts, *(teacher.facts for teacher in teachers.values())]

    def add(name: str, cell: Callable[[ModelFacts], object]) -> None:
        add_row(table, name, *map(cell, models))

    add("model", lambda model: model.model)
    add("backend", lambda model: model.url or model.backend)
    add("tokenizer: hash of the vocabulary", lambda model: vocabulary_cell(model.tokenizer))
    add("  hash of the split of three texts", lambda model: split_cell(model.tokenizer))
    add_row(table, "  as the student's", "", *(yes(t.same_tokenizer) for t in teachers.values()))
    add("chat template hash", lambda model: template_cell(model.tokenizer))
    add_row(table, "  same prompts", "", *(yes(t.same_prompts) for t in teachers.values()))
    add("EOS and its id", lambda model: eos_cell(model.tokenizer))
    add("special and added tokens", lambda model: special_cell(model.tokenizer))
    add("output head, entries", lambda model: count(model.vocabulary))
    add("context, tokens", lambda model: count(model.context))
    add_row(table, "largest K", "", *(largest_cell(t.facts) for t in teachers.values()))
    add("log-probs when sampling", lambda model: model.logprob_mode or MISSING)
    add_row(table, "dtype", student.facts.dtype, *map(dtype_cell, teachers.values()))
    add_row(table, "entropy, nats", "", *map(entropy_cell, teachers.values()))
    add_row(table, "recommended K", "", *map(recommended_cell, teachers.values()))
    add_row(
        table,
        "nats from a forward pass",
        agreement_cell(student.agreement),
        *(agreement_cell(teacher.agreement) for teacher in teachers.values()),
    )
    plugins = [teacher.plugin for teacher in teachers.values()]
    if any(plugin is not None for plugin in plugins):
        add_row(table, "scoring plugin", "", *map(plugin_cell, plugins))
        add_row(table, "  kinds", "", *map(kinds_cell, plugins))
        add_row(table, "  output head", "", *map(head_cell, plugins))
        add_row(table, "  tokens per second", "", *map(road_cell, plugins))
        add_row(table, "  falls back to JSON", "", *map(fallback_cell, plugins))
    return table


def tokens_table(teachers: Mapping[str, TeacherReport]) -> Table:
    """Return both models' probabilities of the special tokens in the rollouts."""
    table = new_table(
        "special tokens in the rollouts, mean probabilities",
        ("token", "teacher", "id", "teacher's id", "positions", "student", "teacher"),
    )
    for name, teacher in teachers.items():
        for row in teacher.special_tokens:
            ending = f" ({row.endings} end a rollout)" if row.endings else ""
            add_row(
                table,
                row.token,
                name,
                row.student_id,
                MISSING if row.teacher_id is None else row.teacher_id,
                f"{row.occurrences}{ending}",
                f"{row.student_probability:.3g}",
                f"{row.teacher_probability:.3g}",
            )
    return table


def speed_table(teachers: Mapping[str, TeacherReport]) -> Table:
    """Return each teacher's speed by column."""
    columns = list(
        dict.fromkeys(entry.column for teacher in teachers.values() for entry in teacher.throughput)
    )
    table = new_table(
        "scoring, rollout tokens per second (seconds per step)",
        ("K", *columns),
    )
    for name, teacher in teachers.items() if columns else ():
        cells = {entry.column: speed_cell(entry) for entry in teacher.throughput}
        add_row(table, name, *(cells.get(column, MISSING) for column in columns))
    return table


def support_table(teachers: Mapping[str, TeacherReport]) -> Table:
    """Return what each K hides on rollouts of the student."""
    table = new_table(
        "the teacher's top K on rollouts of the student",
        ("teacher", "K", "mass outside", "reverse KL, nats", "KL hidden"),
    )
    for name, teacher in teachers.items():
        for row in teacher.support.by_k if teacher.support is not None else ():
            add_row(
                table,
                name,
                row.k,
                f"{row.mass_outside:.2e}",
                f"{row.reverse_kl:.4f}",
                percent(row.hidden),
            )
    return table


def step_table(report: ProbeReport) -> Table:
    """Return the forecast of a step."""
    table = new_table("one step of this recipe", ("", "value"))
    step, student = report.step, report.student
    assert step is not None and student is not None
    add_row(table, "rollouts", step.rollouts)
    add_row(table, "rollout tokens", count(step.tokens))
    add_row(table, "tokens per rollout", count(student.tokens_per_rollout))
    add_row(table, "cut off at max_tokens", percent(student.truncated))
    add_row(table, "sampling", seconds(step.sample_seconds))
    column = "" if step.column is None else f" at K = {step.column}"
    column = " with hidden states" if step.column == "states" else column
    add_row(table, f"scoring{column}", seconds(step.score_seconds))
    add_row(table, "forward and backward", seconds(step.train_seconds))
    add_row(table, "all steps, without evaluations", seconds(step.run_seconds))
    return table


def unmeasured_table(student: StudentReport, teachers: Mapping[str, TeacherReport]) -> Table:
    """Return what was not measured, with the reasons."""
    table = new_table("not measured", ("model", "what", "why"))
    for column in table.columns:
        column.justify = "left"
    for name, reasons in (
        ("student", student.unmeasured),
        *((name, teacher.unmeasured) for name, teacher in teachers.items()),
    ):
        for what, why in reasons.items():
            add_row(table, name, what, why)
    return table


def yes(value: bool | None) -> str:
    """Format a truth value."""
    return MISSING if value is None else "yes" if value else "NO"


def count(value: int | float | None) -> str:
    """Format a number of things."""
    return MISSING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Format seconds, from an hour on as hours."""
    if value is None:
        return MISSING
    return f"{value / 3600:,.1f} h" if value >= 3600 else f"{value:.3g} s"


def vocabulary_cell(tokenizer: TokenizerFacts | None) -> str:
    """Format a vocabulary by its hash."""
    if tokenizer is None or tokenizer.vocabulary_hash is None:
        return "cannot be asked"
    return tokenizer.vocabulary_hash


def split_cell(tokenizer: TokenizerFacts | None) -> str:
    """Format how texts are split."""
    if tokenizer is None or tokenizer.split_hash is None:
        return "cannot be asked"
    return tokenizer.split_hash


def template_cell(tokenizer: TokenizerFacts | None) -> str:
    """Format a chat template by its hash."""
    if tokenizer is None or tokenizer.source == "server":
        return "cannot be asked"
    return tokenizer.template_hash or "none"


def eos_cell(tokenizer: TokenizerFacts | None) -> str:
    """Format the token that ends a text."""
    if tokenizer is None or tokenizer.eos is None:
        return MISSING
    return f"{tokenizer.eos} {tokenizer.special_ids.get(tokenizer.eos, MISSING)}"


def special_cell(tokenizer: TokenizerFacts | None) -> str:
    """Format the number of special tokens."""
    return MISSING if tokenizer is None else str(len(tokenizer.special_ids))


def largest_cell(facts: ModelFacts) -> str:
    """Format the largest K."""
    prefix = "" if facts.largest_k_exact else "at least "
    return MISSING if facts.largest_k is None else f"{prefix}{facts.largest_k:,}"


def dtype_cell(teacher: TeacherReport) -> str:
    """Format a teacher's dtype: what its numbers show, else the recipe's."""
    return "bfloat16-like" if teacher.head_bfloat16 else f"{teacher.facts.dtype} (recipe)"


def entropy_cell(teacher: TeacherReport) -> str:
    """Format a teacher's entropy, a lower bound below K = V."""
    support = teacher.support
    if support is None:
        return MISSING
    bound = "" if support.largest_k == teacher.facts.vocabulary else "at least "
    return f"{bound}{support.entropy:.3f}"


def recommended_cell(teacher: TeacherReport) -> str:
    """Format the recommended K."""
    return MISSING if teacher.support is None else str(teacher.support.recommended_k)


def agreement_cell(agreement: Agreement | None) -> str:
    """Format the distance from a forward pass."""
    if agreement is None:
        return MISSING
    return f"{agreement.largest:.1e} (mean {agreement.mean:.1e})"


def speed_cell(entry: Throughput) -> str:
    """Format a speed."""
    if entry.tokens_per_second is None:
        return "refused"
    return f"{entry.tokens_per_second:,.0f} ({entry.seconds_per_step:.2g} s)"


def plugin_cell(plugin: PluginReport | None) -> str:
    """Format whether a server has the scoring plugin."""
    if plugin is None:
        return MISSING
    return "none" if plugin.version is None else f"version {plugin.version}, vLLM {plugin.vllm}"


def kinds_cell(plugin: PluginReport | None) -> str:
    """Format what a plugin can answer."""
    return MISSING if plugin is None or not plugin.kinds else ", ".join(plugin.kinds)


def head_cell(plugin: PluginReport | None) -> str:
    """Format an output head."""
    if plugin is None or plugin.head is None:
        return MISSING
    head = plugin.head
    dtype = head.dtype
    if head.computed_in != dtype:
        dtype += f", computed in {head.computed_in}"
    return f"{head.rows:,} x {head.columns:,} {dtype}, {head.sha256[:12]}"


def road_cell(plugin: PluginReport | None) -> str:
    """Format the speeds in binary and in JSON."""
    if plugin is None:
        return MISSING
    binary, plain = count(plugin.tokens_per_second), count(plugin.json_tokens_per_second)
    asked = "hidden states" if plugin.column == "states" else f"K = {plugin.column}"
    return f"{asked}: {binary} in binary, {plain} in JSON"


def fallback_cell(plugin: PluginReport | None) -> str:
    """Format what comes in JSON."""
    if plugin is None:
        return MISSING
    return ", ".join(plugin.falls_back) or "nothing"
