"""Read problems from rows: a JSONL file's, or a hub data set's."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from prime_composer.problems.answers import check_reference
from prime_composer.problems.config import Problem

LINES_SHOWN = 5
"""Malformed lines named in one error."""


T = TypeVar("T")


def read_jsonl(
    path: Path, teacher_key: str | None = None, answer_check: str = "gsm8k"
) -> list[Problem]:
    """Return the problems of one JSONL file.

    Args:
        path: the file.
        teacher_key: the key under which a row names its teacher.
        answer_check: the rule that answers are checked by. It has to read the reference.

    Raises:
        ValueError: the file is missing, or as ``read_rows``.
    """
    if not path.is_file():
        raise ValueError(
            f"no such file: {path}. [data] path is a folder with train.jsonl and test.jsonl, "
            "or one JSONL file; GSM8K's are at https://github.com/openai/grade-school-math"
        )
    return read_rows(path, lambda row: problem_of_row(row, teacher_key, answer_check))


def read_rows(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """Return what ``parse`` makes of each line of a JSONL file. Empty lines are skipped.

    Args:
        path: the file.
        parse: turns a JSON value into what is returned; a ``ValueError`` says what is wrong.

    Raises:
        ValueError: the file cannot be read, or lines are malformed. The message contains
            ``file:line: what is wrong`` for the first five lines.
    """
    parsed, errors = [], []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise ValueError(f"{path}:1: the file is UTF-16; save it as UTF-8")
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if not line:
                    continue
                try:
                    parsed.append(parse(_json(line)))
                except ValueError as error:
                    errors.append(f"{path}:{number}: {error}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if errors:
        left_out = len(errors) - LINES_SHOWN
        more = f"\n(and {left_out} more malformed lines)" if left_out > 0 else ""
        raise ValueError("\n".join(errors[:LINES_SHOWN]) + more)
    return parsed


def _json(line: bytes) -> Any:
    """Return a line's JSON value.

    Raises:
        ValueError: it is no JSON, or text in it is none.
    """
    try:
        text = line.decode()
        row = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"the lone surrogate {half} is half a letter; remove it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("too deeply nested") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"not read: {error}") from error
    return row


def problem_of_row(row: Any, teacher_key: str | None, answer_check: str = "gsm8k") -> Problem:
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
            names = str(sorted(row))
            raise ValueError(
                f'"{key}" is missing; the keys are '
                + (names if len(names) <= 100 else f"{names[:100]} ...")
            )
        if not isinstance(row[key], str):
            raise ValueError(f'"{key}" must be a string, found {type(row[key]).__name__}')
        if not row[key].strip():
            raise ValueError(f'"{key}" is empty')
    problem = Problem(question=row["question"].strip(), answer=row["answer"].strip())
    check_reference(problem.answer, answer_check)
    teacher = None if teacher_key is None else row.get(teacher_key)
    if teacher is not None and not isinstance(teacher, str):
        raise ValueError(
            f'"{teacher_key}" must be the name of a teacher, found {type(teacher).__name__}'
        )
    return replace(problem, teacher=teacher)
