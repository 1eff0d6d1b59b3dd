"""Read problems from rows: a JSONL file's, or a hub data set's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_composer.problems.answers import final_number
from prime_composer.problems.config import FINAL_MARK, Problem

LINES_SHOWN = 5
"""Malformed lines named in one error."""


def read_jsonl(path: Path, teacher_key: str | None = None) -> list[Problem]:
    """Return the problems of one JSONL file, one JSON object per line. Empty lines are skipped.

    Args:
        path: the file.
        teacher_key: the key under which a row names its teacher.

    Raises:
        ValueError: the file is missing, or lines are malformed. The message contains
            ``file:line: what is wrong`` for the first five lines.
    """
    if not path.is_file():
        raise ValueError(
            f"no such file: {path}. [data] path is a folder with train.jsonl and test.jsonl, "
            "or one JSONL file; GSM8K's are at https://github.com/openai/grade-school-math"
        )
    problems, errors = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                problems.append(_problem_of_line(line, teacher_key))
            except ValueError as error:
                errors.append(f"{path}:{number}: {error}")
    if errors:
        left_out = len(errors) - LINES_SHOWN
        more = f"\n(and {left_out} more malformed lines)" if left_out > 0 else ""
        raise ValueError("\n".join(errors[:LINES_SHOWN]) + more)
    return problems


def _problem_of_line(line: bytes, teacher_key: str | None) -> Problem:
    try:
        row = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    return problem_of_row(row, teacher_key)


def problem_of_row(row: Any, teacher_key: str | None) -> Problem:
    """Return a row as a problem.

    Raises:
        ValueError: the row is no object, or "question", "answer" or the teacher's name is
            malformed.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f'expected an object with "question" and "answer", found {type(row).__name__}'
        )
    for key in ("question", "answer"):
        if key not in row:
            raise ValueError(f'"{key}" is missing; the keys are {sorted(row)}')
        if not isinstance(row[key], str):
            raise ValueError(f'"{key}" must be a string, found {type(row[key]).__name__}')
        if not row[key].strip():
            raise ValueError(f'"{key}" is empty')
    problem = Problem(question=row["question"].strip(), answer=row["answer"].strip())
    if FINAL_MARK not in problem.answer:
        raise ValueError(f'"answer" has no "{FINAL_MARK} <number>" at its end')
    if final_number(problem.answer[problem.answer.rindex(FINAL_MARK) :]) is None:
        raise ValueError(
            f'what follows "{FINAL_MARK}" in "answer" is not a number: {problem.final!r}'
        )
    teacher = None if teacher_key is None else row.get(teacher_key)
    if teacher is not None and not isinstance(teacher, str):
        raise ValueError(
            f'"{teacher_key}" must be the name of a teacher, found {type(teacher).__name__}'
        )
    return replace(problem, teacher=teacher)
