"""Output that is gone, or cannot show a letter, ends no command."""

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.progress import TextColumn

from prime_composer.cli.output import forgiving_output
from prime_composer.cli.progress import Screen
from prime_composer.cli.report import console, draw_report, print_outcome
from prime_composer.recipe.loading import parse_recipe
from tests.conftest import TINY_RECIPE

BRACKETS = "m[/b] [teacher] [red]x :smile:"


def printed_in(encoding: str, monkeypatch: pytest.MonkeyPatch, text: str) -> bytes:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with forgiving_output():
        print(text)
    return raw.getvalue()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", b"1 -> 2 - \\xe9 \\u96ea\n"),
        ("latin-1", b"1 -> 2 - \xe9 \\u96ea\n"),
        ("utf-8", "1 → 2 – é 雪\n".encode()),
    ],
)
def test_letters_that_the_output_lacks_are_replaced(
    encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed_in(encoding, monkeypatch, "1 → 2 – é 雪") == shown


def test_path_that_is_no_utf8_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed_in("utf-8", monkeypatch, os.fsdecode(b"m\xff")) == b"m\\udcff\n"


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


def test_full_disk_in_a_loggers_thread_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """TensorBoard writes in a thread of its own."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with forgiving_output():
        thread = threading.Thread(target=full)
        thread.start()
        thread.join()
    printed = capsys.readouterr()
    assert "a background thread ended: No space left on device; free some room" in printed.out
    assert "Traceback" not in printed.err


def test_status_shows_brackets_and_colons_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(total=1)
    screen.status(f"warning: {BRACKETS}")
    assert capsys.readouterr().out == f"warning: {BRACKETS}\n"
    columns = [c for c in screen._progress.columns if isinstance(c, TextColumn)]
    assert columns and not any(column.markup for column in columns)


def test_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(BRACKETS)
    assert capsys.readouterr().out == f"{BRACKETS}\n"


@pytest.mark.parametrize("evaluations", [{}, {4: {"eval/accuracy": 0.25}}])
def test_outcome_without_the_first_evaluation_is_shown(
    evaluations: dict[int, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row of metrics.jsonl may be lost; a later one is not shown in its place."""
    print_outcome(evaluations, 4, parse_recipe(TINY_RECIPE))
    row = next(line for line in capsys.readouterr().out.splitlines() if "accuracy" in line)
    cells = [cell.strip() for cell in row.replace("│", "|").split("|")[2:-1]]
    assert cells == ["–", "–", "25.0%" if evaluations else "–"]


def test_figure_of_a_directory_with_dollars_and_brackets(tmp_path: Path) -> None:
    """Two dollar signs would be a formula."""
    run_dir = tmp_path / r"a$\frac$[b]"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    draw_report([run_dir, run_dir], run_dir / "report.png")
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
