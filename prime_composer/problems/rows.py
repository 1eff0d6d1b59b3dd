"""Read problems from rows: lines of a JSONL file, rows of a table, of the hub, or from Python."""

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from prime_composer.problems.answers import check_reference
from prime_composer.problems.config import DataConfig, Message, Problem

GZIP = ".gz"  # Ending of a file that is compressed

ROWS_SHOWN = 5  # Malformed rows named in one error

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model"), "assistant"),
}
"""Role of a message, as people store conversations -> as chat templates have it."""

CONVERSATIONS = ("messages", "conversations")  # Columns in which people store them

REASONING_KEYS = ("reasoning_content", "reasoning")  # What the assistant thought, apart

EXACT_UP_TO = 2**53  # Beyond, a float may be another whole number than was meant

T = TypeVar("T")
R = TypeVar("R")


class MissingColumn(ValueError):
    """A row has no such column; the message names those that there are."""


class UnusableRow(ValueError):
    """A row of the right form that trains or measures nothing, such as one without text."""


def parse_rows(
    rows: Iterable[tuple[str, R]], parse: Callable[[R], T], limit: int | None = None
) -> list[T]:
    """Return what ``parse`` makes of each row; the first five malformed ones make one error."""
    parsed: list[T] = []
    errors: list[str] = []
    for place, row in rows:
        if len(parsed) + len(errors) == limit:
            break
        try:
            parsed.append(parse(row))
        except ValueError as error:
            errors.append(f"{place}: {error}")
    if errors:
        left_out = len(errors) - ROWS_SHOWN
        more = f"\n(and {left_out} more malformed rows)" if left_out > 0 else ""
        raise ValueError("\n".join(errors[:ROWS_SHOWN]) + more)
    return parsed


def read_rows(path: Path, parse: Callable[[Any], T], limit: int | None = None) -> list[T]:
    """Return what ``parse_rows`` makes of a JSONL file, maybe gzipped, with ``file:line`` as
    places.

    Empty lines are skipped.
    """
    try:
        return parse_rows(_lines(path), lambda line: parse(_json(line)), limit)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with gzip.open(path) if path.suffix.lower() == GZIP else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"{path}:1: the file is UTF-16; save it as UTF-8")
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                yield f"{path}:{number}", line


def _json(line: bytes) -> Any:
    """Return a line's JSON value; a ``ValueError`` says what is wrong with the line."""
    try:
        row = json.loads(line)
        if b"\\ud" in line.lower():  # half a letter (a lone surrogate) is no UTF-8
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from None
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
    """Return a row as a problem, or raise ``UnusableRow`` where it cannot be one."""
    if not isinstance(row, Mapping):
        both = f'"{config.prompt_key}" and "{config.answer_key}"'
        wanted = both if config.messages_key is None else f'"{config.messages_key}"'
        raise _not_of_type("a row", f"an object with {wanted}", row)
    context: tuple[Message, ...] = ()
    reasoning = ""
    if config.messages_key is None:
        prompt_key, answer_key = config.prompt_key, config.answer_key
        prompt = _text(value_at(row, prompt_key, "prompt_key"), prompt_key, "prompt_key")
        answer = _answer(row, config)
    else:
        context, prompt, (_, answer, reasoning) = _conversation(row, config.messages_key)
        prompt_key = answer_key = config.messages_key
    if not prompt:
        raise UnusableRow(
            f'"{prompt_key}" is empty; write one, or leave such rows out with clean = true'
        )
    if config.scored:
        _check_answer(answer, config, answer_key)
    if config.system_key is not None and (
        system := _text(row.get(config.system_key), config.system_key, "system_key")
    ):
        if context and context[0].role == "system":
            raise ValueError(
                f'"{config.system_key}" and a system message in "{config.messages_key}": keep one '
                "of them"
            )
        context = (Message("system", system), *context)
    teacher = None if config.teacher_key is None else row.get(config.teacher_key)
    teacher = None if is_missing(teacher) else teacher
    if teacher is not None and not isinstance(teacher, str):
        raise _not_of_type(f'"{config.teacher_key}"', "the name of a teacher", teacher)
    question = prompt[: config.prompt_chars].strip()
    return Problem(question, answer, teacher=teacher, context=context, reasoning=reasoning)


def _check_answer(answer: str, config: DataConfig, key: str) -> None:
    if not answer:
        lacks = f'"{key}" is empty'
        if config.messages_key is not None:
            lacks = f'"{key}" does not end in a message of the assistant, the answer'
        raise UnusableRow(
            f"{lacks}; write one, leave such rows out with clean = true, or set metric = "
            '"none" for prompts without answers'
        )
    try:
        check_reference(answer, config.metric, key)
    except ValueError as error:
        raise UnusableRow(str(error)) from None


def _answer(row: Mapping[str, Any], config: DataConfig) -> str:
    """Return the answer in its column; "" where there is none and none is needed."""
    try:
        value = value_at(row, config.answer_key, "answer_key")
    except MissingColumn as error:
        if not config.scored:
            return ""
        raise ValueError(f'{error}, or set metric = "none" for prompts without answers') from None
    if isinstance(value, Real | Decimal) and not isinstance(value, bool) and not is_missing(value):
        return _written(value, config.answer_key)
    return _text(value, config.answer_key, "answer_key")


def _written(number: Real | Decimal, column: str) -> str:
    """Return a number as people write it: pandas makes 57 a float where another row has none."""
    value: Any = number
    if isinstance(value, float) and EXACT_UP_TO <= abs(value) < math.inf:
        raise ValueError(
            f'"{column}" is the float {value:g}, which may have lost digits; write it as a text or '
            'an integer (in pandas the dtype "Int64", which allows for missing values)'
        )
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)


def _not_of_type(place: str, wanted: str, found: Any, remedy: str = "") -> ValueError:
    return ValueError(f"{place} must be {wanted}, found {type(found).__name__}{remedy}")


def is_missing(value: Any) -> bool:
    """Return whether a table has no value here: None, NaN, or pandas's NA."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ArithmeticError):  # NA and Decimal("sNaN") say neither yes nor no
        return True
    except ValueError:  # an array, which is a value
        return False


def _conversation(row: Mapping[str, Any], column: str) -> tuple[tuple[Message, ...], str, Message]:
    """Return the messages before the question, the question, and the answer, empty where there is
    none."""
    messages = value_at(row, column, "messages_key")
    if is_missing(messages):
        return (), "", Message("assistant", "")
    if isinstance(messages, str):
        messages = _stored(messages, column)
    if hasattr(messages, "tolist"):  # pandas reads a list column of parquet as arrays
        messages = messages.tolist()
    if not isinstance(messages, list | tuple):
        raise _not_of_type(f'"{column}"', "a list of messages", messages)
    turns = [
        _turn(message, f'"{column}", message {number}', number)
        for number, message in enumerate(messages, start=1)
    ]
    answers = bool(turns) and turns[-1].role == "assistant"
    answer = turns.pop() if answers else Message("assistant", "")
    if not turns or turns[-1].role != "user":
        last = f"a message of the {turns[-1].role}" if turns else "nothing"
        raise ValueError(
            f'"{column}" must end with a message of the user, and maybe its answer; before the '
            f"answer it ends with {last}"
        )
    *context, question = turns
    return tuple(context), question.content.strip(), answer._replace(content=answer.content.strip())


def _stored(text: str, column: str) -> Any:
    """Return the messages of a column in which they are JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            f'"{column}" must be a list of messages, or one as JSON, and is the text '
            f"{text[:40]!r}; name a column of texts in [data] prompt_key"
        ) from None


def _turn(message: Any, place: str, number: int) -> Message:
    """Return a message under the names of chat templates."""
    if not isinstance(message, Mapping):
        raise _not_of_type(place, "an object with role and content", message)
    named, content = message.get("role", message.get("from")), message.get("content")
    content = message.get("value") if content is None else content
    role = ROLES.get(named) if isinstance(named, str) else None
    calls: Any = message.get("tool_calls")
    if role is None or (not is_missing(calls) and len(calls)):
        found = f"role {named!r}" if role is None else "tool_calls"
        raise ValueError(
            f"{place} has {found}; the roles are {', '.join(ROLES)}, and a conversation with tools "
            "is an environment by id"
        )
    if role == "system" and number > 1:
        raise ValueError(f"{place} is of the system, which speaks first or not at all")
    thoughts = [message[key] for key in REASONING_KEYS if not is_missing(message.get(key))]
    return Message(role, _content(content, place), thoughts[0] if thoughts else "")


def _content(content: Any, place: str) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    if hasattr(content, "tolist"):
        content = content.tolist()
    if isinstance(content, list | tuple):
        other = [part for part in content if not _is_text(part)]
        if other:
            raise ValueError(
                f"{place}: a part of content is no text but {str(other[0])[:60]}; the losses train "
                "on text alone, so leave such rows out"
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _not_of_type(f"{place}: content", "a string or a list of text parts", content)
    return content


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )


def _text(value: Any, column: str, key: str) -> str:
    """Return a text without white space around it; "" for a missing one."""
    if is_missing(value):
        return ""
    if not isinstance(value, str):
        also = ""
        if key == "prompt_key" and isinstance(value, list | tuple):
            also = f", or a conversation in [data] messages_key = {json.dumps(column)}"
        remedy = f"; correct the data, or name another column in [data] {key}{also}"
        raise _not_of_type(f'"{column}"', "a string", value, remedy)
    return value.strip()


def value_at(row: Mapping[str, Any], column: str, key: str) -> Any:
    """Return what a column of a row contains; raise ``MissingColumn`` where there is none."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            names = str(sorted(columns(row)))
            hint = ""
            kept = next((n for n in CONVERSATIONS if isinstance(row.get(n), list | tuple)), None)
            if key != "messages_key" and kept is not None:
                hint = f', or set messages_key = "{kept}"'
            raise MissingColumn(
                f'"{column}" is missing; the keys are '
                + (names if len(names) <= 100 else f"{names[:100]} ...")
                + f"; name one of them in [data] {key}{hint}"
            )
        value = value[name]
    return value


def columns(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row as the recipe names them, those of objects within it with a dot."""
    named: list[str] = []
    for name, value in row.items():
        named += (
            [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) else [str(name)]
        )
    return named
