"""The student's answers before and after training: kept by the run, shown by the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import main
from prime_composer.cli.report import print_answers, shown
from prime_composer.local.answers import ANSWERS_FILE, KeptAnswer, read_answers, write_answers
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe

Raw = Callable[..., dict[str, Any]]


def answer(text: str, question: str = "What is 2 + 3?", correct: bool = False) -> KeptAnswer:
    return KeptAnswer(question, "#### 5", text, correct)


def printed(run_dir: Path, steps: list[int], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    print_answers(run_dir, steps)
    return capsys.readouterr().out


def test_run_keeps_the_answers_of_each_evaluation(
    whole: Path, tiny_recipe: Raw, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of four steps evaluates at 0, 2 and 4. The report needs the run directory alone, shows
    three of four questions, and has the teacher's answers."""
    answers = read_answers(whole)
    assert list(answers) == [0, 2, 4]
    held_out = load_problem_set(parse_recipe(tiny_recipe()).sources).held_out[:4]
    for rows in answers.values():
        assert [row.question for row in rows] == [problem.question for problem in held_out]
        assert [row.reference for row in rows] == [problem.answer for problem in held_out]
        assert [row.place for row in rows] == [0, 1, 2, 3]
        assert all(row.text for row in rows)
    assert main(["report", str(whole), "--output", str(tmp_path / "report.png")]) == 0
    out = capsys.readouterr().out
    assert out.count("before") == out.count("after 4 steps") == 3
    assert out.count("\n  teacher ") == 3
    teacher = read_answers(whole, "teacher")
    assert list(teacher) == [0]
    assert [row.question for row in teacher[0]] == [problem.question for problem in held_out]
    measured = [r for r in read_metrics(whole) if "eval/accuracy" in r]
    for record in measured:
        correct = sum(bool(row.correct) for row in answers[record["step"]])
        assert correct == 4 * record["eval/accuracy"]
    assert sum(bool(row.correct) for row in teacher[0]) == 4 * measured[0]["teacher/accuracy"]


def test_answers_show_brackets_escapes_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is read as markup or by the terminal, and what is cut says so."""
    odd = "[bold]x[/bold] [/] :smile: \x1b[31mred\x07\n\n  \ud800 end"
    write_answers(tmp_path, 0, [answer(odd)])
    write_answers(tmp_path, 4, [answer("y" * 2000, correct=True)])
    out = printed(tmp_path, [0, 4], capsys)
    replaced = "\N{REPLACEMENT CHARACTER}"
    line = f"[bold]x[/bold] [/] :smile: {replaced}[31mred{replaced} {replaced} end"
    assert f"(wrong) {line}" in out and "\x1b" not in out
    assert out.count("y") - "correct".count("y") >= 320 and "(1,680 more letters)" in out
    assert "(correct)" in out
    assert str(shown("a" * 320)) == "a" * 320


def test_answers_to_conversations_are_matched_by_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two conversations end in the same question; the teacher's answer to the first is missing."""
    said = {
        0: ["it is red before", "it is blue before"],
        4: ["it is red after", "it is blue after"],
    }
    for step, texts in said.items():
        answers = [KeptAnswer("And why?", "", text, None, place=n) for n, text in enumerate(texts)]
        write_answers(tmp_path, step, answers)
    of_teacher = [KeptAnswer("And why?", "", "it is blue of course", None, place=1)]
    write_answers(tmp_path, 0, of_teacher, of="teacher")
    words = [" ".join(line.split()) for line in printed(tmp_path, [0, 4], capsys).splitlines()]
    assert [line for line in words if "it is" in line or line.startswith("question")] == [
        "question And why?",
        "before it is red before",
        "after 4 steps it is red after",
        "question And why?",
        "before it is blue before",
        "after 4 steps it is blue after",
        "teacher it is blue of course",
    ]


def test_answers_of_another_attempt_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that the run's metrics lack are left out; of a step written twice the newer counts."""
    write_answers(tmp_path, 0, [answer("first")])
    write_answers(tmp_path, 4, [answer("older four")])
    write_answers(tmp_path, 4, [answer("newer four")])
    write_answers(tmp_path, 9, [answer("never came back to nine")])
    out = printed(tmp_path, [0, 4], capsys)
    assert "first" in out and "newer four" in out and "after 4 steps" in out
    assert "older" not in out and "nine" not in out


@pytest.mark.parametrize(
    "content",
    [None, '{"step": 0}\n[]\n7\n{"step": "x", "answers": []}\n{'],
)
def test_answers_that_are_not_there_print_nothing(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of an older version has no file, and a damaged one stops no report."""
    if content is not None:
        (tmp_path / ANSWERS_FILE).write_text(content)
    assert printed(tmp_path, [0, 4], capsys) == ""
