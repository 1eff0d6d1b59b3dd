"""Output that is gone, or cannot show a letter, ends no command."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import TextColumn

from prime_composer.cli import figures, report
from prime_composer.cli.figures import draw_report, new_figure
from prime_composer.cli.output import forgiving_output
from prime_composer.cli.progress import Screen, step_line
from prime_composer.cli.report import console, print_outcome, print_report
from prime_composer.recipe.loading import parse_recipe
from tests.conftest import TINY_RECIPE

BRACKETS = "m[/b] [teacher] [red]x :smile:"


def recorded(folder: Path, *records: dict[str, float], **recipe: Any) -> Path:
    """Write the directory of a run; return it."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    if recipe:
        (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


def printed_in(encoding: str, monkeypatch: pytest.MonkeyPatch, text: str) -> bytes:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with forgiving_output():
        print(text)
    return raw.getvalue()


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [
        ("latin-1", "2 – é 雪", b"2 \\u2013 \xe9 \\u96ea\n"),
        ("utf-8", "1 → 2 – é 雪", "1 → 2 – é 雪\n".encode()),
        ("utf-8", os.fsdecode(b"m\xff"), b"m\\udcff\n"),
    ],
)
def test_letters_that_the_output_lacks_are_replaced(
    encoding: str, text: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed_in(encoding, monkeypatch, text) == shown


class Gone(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_screen_goes_on_when_its_output_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich ends the process where it sees a broken pipe; it never sees one."""
    monkeypatch.setattr(sys, "stdout", Gone())
    with forgiving_output(), Screen(total=2) as screen:
        screen.status("loading")
        screen.step(2, {"loss": 1.0, "tokens_per_second": 3.0, "eval/accuracy": 0.5})
        console().print("a table")
        print("done")


def test_command_of_a_closed_pipe_ends_without_a_word() -> None:
    """The reader leaves before the first line; the exit status stays that of the command."""
    code = "import sys; sys.stdin.read(); from prime_composer.cli.output import forgiving_output\n"
    code += "with forgiving_output():\n    print('x' * 100_000)\n    print('y', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 0
    process.stderr.close()


def test_log_has_the_numbers_of_its_own_step(capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation is not repeated as if each later step had measured it."""
    speed = {"loss": 1.0, "tokens_per_second": 9.0}
    with Screen(total=40) as screen:
        screen.step(10, speed | {"eval/reverse_kl": 0.5})
        for step in range(11, 21):
            screen.step(step, speed)
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first == "step 10/40  loss 1.0000  reverse KL 0.500  9 tok/s"
    assert second == "step 20/40  loss 1.0000  9 tok/s"


def test_brackets_and_colons_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(total=1)
    screen.status(f"warning: {BRACKETS}")
    console().print(BRACKETS)
    assert capsys.readouterr().out == f"warning: {BRACKETS}\n{BRACKETS}\n"
    columns = [c for c in screen._progress.columns if isinstance(c, TextColumn)]
    assert columns and not any(column.markup for column in columns)


def test_report_keeps_its_columns_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells are folded, and nothing is cut."""
    records: list[dict[str, float]] = [
        {"step": 0, "eval/accuracy": 0.39, "teacher/accuracy": 0.99, "eval/reverse_kl": 0.738},
        {"step": 120, "eval/accuracy": 0.985, "eval/reverse_kl": 0.008}
        | {"loss": 0.1, "tokens_per_second": 12345.0},
    ]
    loss = {"type": "topk_reverse_kl"}
    names = ("gsm8k_opd", "gsm8k_opd-2")
    runs = [recorded(tmp_path / name, *records, loss=loss) for name in names]
    screen = Console(width=60, markup=False, highlight=False)
    monkeypatch.setattr(report, "console", lambda: screen)
    print_report(runs)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    text = "".join("".join(lines).split())
    for cell in ("120", "99.0%", "39.0%", "98.5%", "12,345"):
        assert text.count(cell) == 2
    assert "…" not in text


ROLLOUTS = {
    0: {"teacher/accuracy": 1.0, "teacher/turns": 3.0, "teacher/tool_calls": 2.0}
    | {"eval/accuracy": 0.25, "eval/turns": 3.456, "eval/tool_calls": 2.789},
    4: {"eval/accuracy": 0.75, "eval/turns": 3.125, "eval/tool_calls": 2.0},
}


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        (
            ROLLOUTS,
            {
                "accuracy": ["100.0%", "25.0%", "75.0%"],
                "turns per rollout": ["3.00", "3.46", "3.12"],
                "tool calls per rollout": ["2.00", "2.79", "2.00"],
            },
        ),
        # A row of metrics.jsonl may be lost; a later one is not shown in its place.
        ({4: {"eval/accuracy": 0.25}}, {"accuracy": ["–", "–", "25.0%"]}),
    ],
    ids=["tasks", "first lost"],
)
def test_outcome_shows_teacher_and_student_before_and_after(
    evaluations: dict[int, dict[str, float]],
    expected: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcome(evaluations, 4, parse_recipe(TINY_RECIPE))
    lines = capsys.readouterr().out.replace("│", "|").splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if "|" in line}
    cells = {name: [cell.strip() for cell in row] for name, row in rows.items()}
    assert expected.items() <= cells.items()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the figures that are made within a test."""
    made: list[Any] = []
    monkeypatch.setattr(
        figures, "new_figure", lambda *size: made.append(new_figure(*size)) or made[-1]
    )
    return made


def test_figure_of_one_run_has_its_environments_and_parts(tmp_path: Path, drawn: list[Any]) -> None:
    """Each with its own numbers; an environment's KL is no part of the loss."""
    first = {"step": 0, "eval/accuracy": 0.1, "eval/accuracy/sums": 0.2, "teacher/accuracy": 0.9}
    parts = {"loss": 2.0, "x/kl_in_support": 1.5, "x/kl_mass": 0.5, "rollout/reward/loss": 7.0}
    environments = {"sums": {"source": "generated"}, "held": {"use": "eval"}}
    run = recorded(tmp_path, first, {"step": 1, **parts}, environments=environments)
    draw_report([run], tmp_path / "report.png")
    score, _, loss, _ = drawn[0].axes
    lines = {one.get_label(): (*one.get_xdata(), *one.get_ydata()) for one in score.get_lines()}
    assert lines[f"{tmp_path.name} (–)"] == (0, 0.1) and lines["sums"] == (0, 0.2)
    assert len(lines) == 3 and "teacher" in lines
    lines = {one.get_label(): (*one.get_xdata(), *one.get_ydata()) for one in loss.get_lines()}
    assert lines == {"loss": (1, 2.0), "x/kl_in_support": (1, 1.5), "x/kl_mass": (1, 0.5)}


def test_kl_on_some_ids_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the status line, in the table at the end, and in the report; of all ids it is not."""
    whole = {"eval/accuracy": 0.5, "eval/reverse_kl": 4.23}
    some = whole | {"eval/reverse_kl": 3.95, "eval/kl_ids": 32.0}
    speed = {"loss": 1.0, "tokens_per_second": 9.0}
    assert "KL on 32 ids + tail 3.950" in step_line(some | speed)
    assert "reverse KL 4.230" in step_line(whole | speed)
    print_outcome({0: some, 4: some}, 4, parse_recipe(TINY_RECIPE))
    assert "KL on 32 ids + tail (nats/token)" in capsys.readouterr().out
    folders = [
        recorded(tmp_path / str(n), {"step": 0, **one}) for n, one in enumerate((whole, some))
    ]
    print_report(folders[1:])
    assert "KL on 32 ids + tail" in capsys.readouterr().out
    print_report(folders[:1])
    assert "ids + tail" not in capsys.readouterr().out
    print_report(folders)
    out = " ".join(capsys.readouterr().out.split())
    assert "4.230 (reverse KL)" in out and "3.950 (KL on 32 ids + tail)" in out
    draw_report(folders, tmp_path / "report.png")
