"""Read problems from rows: a JSONL file's, or a hub data set's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prime_composer.problems.answers import check_reference
from prime_composer.problems.config import DataConfig, Problem

LINES_SHOWN = 5
"""Malformed lines named in one error."""


DEFAULTS = DataConfig()

T = TypeVar("T")


class UnusableRow(ValueError):
    """A row of the right form that trains or measures nothing, such as one without text."""


def read_jsonl(path: Path, config: DataConfig = DEFAULTS) -> list[Problem | None]:
    """Return the problems of one JSONL file, None for rows that are left out.

    Raises:
        ValueError: the file is missing, or as ``read_rows``.
    """
    if not path.is_file():
        raise ValueError(
            f"no such file: {path}. [data] path is a folder with train.jsonl and test.jsonl, "
            "or one JSONL file; GSM8K's are at https://github.com/openai/grade-school-math"
        )
    return read_rows(path, lambda row: problem_or_none(row, config), config.limit)


def read_rows(path: Path, parse: Callable[[Any], T], limit: int | None = None) -> list[T]:
    """Return what ``parse`` makes of each line of a JSONL file. Empty lines are skipped.

    Args:
        path: the file.
        parse: turns a JSON value into what is returned; a ``ValueError`` says what is wrong.
        limit: read only so many lines.

    Raises:
        ValueError: the file cannot be read, or lines are malformed. The message contains
            ``file:line: what is wrong`` for the first five lines.
    """
    parsed: list[T] = []
    errors: list[str] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise ValueError(f"{path}:1: the file is UTF-16; save it as UTF-8")
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if not line:
                    continue
                if len(parsed) + len(errors) == limit:
                    break
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
    """Return a line's JSON value; a ``ValueError`` says what is wrong with the line."""
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


def problem_or_none(row: Any, config: DataConfig) -> Problem | None:
    """Return a row as a problem, or None for a row that ``clean`` leaves out."""
    try:
        return problem_of_row(row, config)
    except UnusableRow:
        if config.clean:
            return None
        raise


def problem_of_row(row: Any, config: DataConfig) -> Problem:
    """Return a row as a problem.

    Raises:
        UnusableRow: the prompt or the answer is empty, or the metric cannot use the answer.
        ValueError: the row is no object, or prompt, answer or the teacher's name is malformed.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f'expected an object with "{config.prompt_key}" and "{config.answer_key}", found '
            f"{type(row).__name__}"
        )
    prompt, answer = (
        text_at(row, getattr(config, key), key) for key in ("prompt_key", "answer_key")
    )
    for key, text in ((config.prompt_key, prompt), (config.answer_key, answer)):
        if not text:
            raise UnusableRow(
                f'"{key}" is empty; write one, or leave such rows out with clean = true'
            )
    try:
        check_reference(answer, config.metric, config.answer_key)
    except ValueError as error:
        raise UnusableRow(str(error)) from None
    teacher = None if config.teacher_key is None else row.get(config.teacher_key)
    if teacher is not None and not isinstance(teacher, str):
        raise ValueError(
            f'"{config.teacher_key}" must be the name of a teacher, found {type(teacher).__name__}'
        )
    return Problem(prompt[: config.prompt_chars].strip(), answer, teacher=teacher)


def text_at(row: dict[str, Any], column: str, key: str) -> str:
    """Return the text in a column, without white space around it.

    The column is a key, or keys with dots between them that lead into objects. Messages name the
    setting that it comes from, ``key``.
    """
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            names = str(sorted(columns(row)))
            raise ValueError(
                f'"{column}" is missing; the keys are '
                + (names if len(names) <= 100 else f"{names[:100]} ...")
                + f"; name one of them in [data] {key}"
            )
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(
            f'"{column}" must be a string, found {type(value).__name__}; correct the data, or name '
            f"another column in [data] {key}"
        )
    return value.strip()


def columns(row: dict[str, Any]) -> list[str]:
    """Return the keys of a row as the recipe names them, those of objects within it with a dot."""
    named = []
    for name, value in row.items():
        named += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
    return named
