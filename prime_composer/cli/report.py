"""Print tables of finished or running runs, from what their directories have."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_composer.cli.program import program
from prime_composer.cli.quantities import (
    COUNTS,
    MISSING,
    OVERLAP,
    REVERSE_KL,
    SCORES,
    Quantity,
    kl_title,
    number,
    percent,
    score_text,
)
from prime_composer.cli.recorded import RecordedRun, environment_titles
from prime_composer.local.answers import KeptAnswer, read_answers, read_signatures
from prime_composer.problems.metrics import TITLES, signatures_of
from prime_composer.recipe.schema import Recipe

SHARES = (
    Quantity("rollout/token_share", "of the tokens", percent),
    Quantity("rollout/weight_share", "of the weights", percent),
    Quantity("rollout/gradient_share", "of the gradient", percent),
    Quantity("distillation/kl", "KL to the teacher, nats", number),
)
"""What a step measures of each environment."""

ANSWERS_SHOWN = 3  # Questions that a report shows with their answers

LETTERS_SHOWN = 320  # Length up to which a question or an answer is printed


def print_outcome(evaluations: dict[int, dict[str, float]], steps: int, recipe: Recipe) -> None:
    """Print the table at the end of a run: teacher, student before, student after."""
    before, after = evaluations.get(0, {}), evaluations[max(evaluations)] if evaluations else {}
    tables = {name: one.model_dump() for name, one in recipe.environments.items()}
    title = f"{recipe.loss.type}, {steps} steps"
    console().print(outcome_table(title, before, after, environment_titles(tables)))
    if evaluations:
        print_signatures(signatures_of(recipe.problem_sources.values()))


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
    kl = REVERSE_KL._replace(title=f"{kl_title(after)} (nats/token)")
    rows = [one for one in (*SCORES.values(), *COUNTS.values(), kl, OVERLAP) if one.metric in after]
    # Without a score, what was measured is the KL alone.
    for quantity in rows if after else [SCORES["accuracy"]]:
        parts = {f"/{name}": f"  {shown_name}" for name, shown_name in environments.items()}
        for suffix, words in {"": quantity.title, **parts}.items():
            metric = f"{quantity.metric}{suffix}"
            if metric in after or not suffix:
                of_teacher = before.get(metric.replace("eval/", "teacher/", 1))
                values = (of_teacher, before.get(metric), after.get(metric))
                table.add_row(words, *map(quantity.text, values))
    return table


def print_signatures(signatures: Mapping[str, str]) -> None:
    """Print what the numbers of graded metrics have to be published with."""
    for metric, signature in signatures.items():
        console().print(f"{TITLES.get(metric, metric)} x 100: {signature}", soft_wrap=True)


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


def _most_changed(before: Sequence[KeptAnswer], after: Sequence[KeptAnswer]) -> list[KeptAnswer]:
    """Return the later answers, those that became right first, then those of another text."""
    earlier = {answer.asked: answer for answer in before}

    def rank(answer: KeptAnswer) -> tuple[bool, bool]:
        was = earlier.get(answer.asked)
        if was is None:
            return True, True
        gained = (answer.correct or answer.score or 0) - (was.correct or was.score or 0)
        return gained <= 0, answer.text == was.text

    return sorted(after, key=rank)


def _verdict(answer: KeptAnswer) -> Text:
    if answer.correct is None and answer.score is None:
        return shown(answer.text)
    if answer.score is None or answer.metric not in TITLES:
        verdict = "correct" if answer.correct else "wrong"
    else:
        verdict = f"{TITLES[answer.metric]} {score_text(answer.metric, answer.score)}"
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


def report(runs: Sequence[str], output: str | None, log_kl: bool) -> int:
    """Print the table of runs, and draw them."""
    from prime_composer.cli.figures import draw_report
    from prime_composer.upstream.launches import missing

    for sentence in [each for run in runs for each in missing(Path(run))]:
        print(f"{program()} report: {sentence}", file=sys.stderr)
    figure = Path(output) if output else Path(runs[0]) / "report.png"
    print_report(runs)
    draw_report(runs, figure, log_kl)
    print(f"figure: {figure}")
    return 0


def print_report(runs: Sequence[str | Path]) -> None:
    """Print one row per run: its loss, and its numbers at the first and the last evaluation."""
    read = [RecordedRun.read(run) for run in runs]
    measured = [*SCORES.values(), *COUNTS.values()]
    columns = [one for one in measured if any(run.series(one.metric)[0] for run in read)]
    if not any(run.scores for run in read):
        columns.insert(0, SCORES["accuracy"])
    kls = ", ".join(dict.fromkeys(run.kl_title for run in read))
    titles = [one.title.removesuffix(" per rollout") for one in columns]
    head = ["run", "loss", "steps", "teacher", *titles, kls, "tok/s"]
    rows = []
    for run in read:
        before, after = run.ends
        names = run.scores or ["accuracy"]
        speeds = sorted(run.series("tokens_per_second")[1])
        own_kl = f" ({run.kl_title})" if "," in kls else ""
        rows.append(
            [
                run.name,
                run.loss,
                str(max((record["step"] for record in run.records), default=0)),
                ", ".join(SCORES[name].text(before.get(f"teacher/{name}")) for name in names),
                *(change(one, one.metric, before, after) for one in columns),
                change(REVERSE_KL, REVERSE_KL.metric, before, after) + own_kl,
                f"{speeds[len(speeds) // 2]:,.0f}" if speeds else MISSING,
            ]
        )
    print_table(console(), head, rows, names=2)
    print_signatures({k: text for run in read for k, text in read_signatures(run.folder).items()})
    if len(read) == 1:
        if len(run.environments) > 1 and run.evaluated:
            console().print(outcome_table("by environment", *run.ends, run.environments))
        print_shares(run.evaluated)
        print_answers(run.folder, [record["step"] for record in run.evaluated])


def change(
    quantity: Quantity, metric: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """Format a metric of two steps."""
    return " → ".join(quantity.text(record.get(metric)) for record in (before, after))


def print_shares(evaluated: Sequence[Mapping[str, Any]]) -> None:
    """Print what each environment, or teacher of rows, was of the first and last evaluated step."""
    trained = [record for record in evaluated if record["step"] > 0]
    of_tokens = f"{SHARES[0].metric}/"
    keys = dict.fromkeys(key for record in trained for key in record)
    names = [key.removeprefix(of_tokens) for key in keys if key.startswith(of_tokens)]
    columns = [one for one in SHARES if any(f"{one.metric}/{name}" in keys for name in names)]
    rows = [
        [name, *(change(one, f"{one.metric}/{name}", trained[0], trained[-1]) for one in columns)]
        for name in names
    ]
    if rows:
        print_table(console(), ["part of a step", *(one.title for one in columns)], rows)


def print_table(
    screen: Console, head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1
) -> None:
    """Print a table. A narrow terminal folds its cells."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for place, title in enumerate(head):
        table.add_column(title, justify="left" if place < names else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen.print(table)


def console() -> Console:
    """Return the terminal, or 120 columns where the output is a pipe. Nothing is markup."""
    terminal = Console(markup=False, emoji=False, highlight=False)
    if not terminal.is_terminal:
        terminal.width = 120
    return terminal
