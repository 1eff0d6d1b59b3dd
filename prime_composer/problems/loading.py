"""Problems from JSONL files, the hub, or the generator."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from prime_composer.problems.answers import final_number
from prime_composer.problems.config import FINAL_MARK, DataConfig, Problem
from prime_composer.problems.generated import generate_problems


def load_environments(sources: Mapping[str, DataConfig]) -> tuple[list[Problem], list[Problem]]:
    """The problems of all environments to train on, one environment after the other, and the held-out ones, the
    environments in turn, so that a part of them is of all.

    Raises:
        ValueError: as ``load_problems``, or one environment trains on what another one holds out.
    """
    practice: list[Problem] = []
    held_out: list[list[Problem]] = []
    for name, config in sources.items():
        train, test = (
            [replace(p, environment=name) for p in problems] for problems in load_problems(config)
        )
        practice += train
        held_out.append(test)
    aside = [problem for turn in zip_longest(*held_out) for problem in turn if problem is not None]
    trained = {problem.question: problem.environment for problem in practice}
    clash = min((p for p in aside if p.question in trained), key=lambda p: p.question, default=None)
    if clash is not None:
        _refuse_overlap(
            practice,
            aside,
            f"environments.{trained[clash.question]} trains on what environments.{clash.environment} holds out",
            "Remove them from one of the two; generated environments want `operations` without one in common, or all "
            "the same `size`, `seed`, `operations` and `hold_out`.",
        )
    return practice, aside


def load_problems(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the held-out ones, in a fixed order, with no question in both.

    Raises:
        ValueError: a file is missing or malformed (with file and line number), a library is missing, training and
            held-out questions overlap, or no row names a teacher under ``teacher_key``.
    """
    if config.source == "generated":
        problems = generate_problems(config.size, config.seed, config.operations)
        train, held_out = split_by_question(problems, config.hold_out, config.seed)
        origin = "the generated problems"
    elif config.source == "hub":
        train, held_out = _from_hub(config)
        origin = config.hub_id
    else:
        path = config.path.expanduser()
        origin = str(path)
        if path.is_dir():
            train, held_out = (
                read_jsonl(path / f"{split}.jsonl", config.teacher_key)
                for split in ("train", "test")
            )
        else:
            train, held_out = split_by_question(
                read_jsonl(path, config.teacher_key), config.hold_out, config.seed
            )
    if not config.calculator_annotations:
        train, held_out = (
            [_without_annotations(p) for p in problems] for problems in (train, held_out)
        )
    for name, problems in (("training", train), ("held-out", held_out)):
        if not problems:
            raise ValueError(
                f"{origin} leaves no {name} problems; raise [data] size or change hold_out"
            )
    _refuse_overlap(train, held_out, origin)
    if config.teacher_key is not None and all(problem.teacher is None for problem in train):
        raise ValueError(
            f"{origin}: no row to train on has the key {config.teacher_key!r}; correct teacher_key, or leave it out to have "
            "all rows go where `teacher` says"
        )
    return train, held_out


def _refuse_overlap(
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    origin: str,
    remedy: str = "Remove them from one side.",
) -> None:
    shared = {p.question for p in train} & {p.question for p in held_out}
    if shared:
        raise ValueError(
            f"{origin}: {len(shared)} question(s) are both trained on and held out, so accuracy would be flattered. "
            f"{remedy} The first: {min(shared)!r}"
        )


def split_by_question(
    problems: list[Problem], hold_out: float, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Set aside the share ``hold_out`` of the distinct questions; problems of one question stay on one side."""
    questions = sorted({p.question for p in problems})
    random.Random(f"hold-out {seed}").shuffle(questions)
    aside = set(questions[: max(1, round(hold_out * len(questions)))])
    return [p for p in problems if p.question not in aside], [
        p for p in problems if p.question in aside
    ]


def read_jsonl(path: Path, teacher_key: str | None = None) -> list[Problem]:
    """The problems of one JSONL file, one JSON object per line; empty lines are passed over.

    Args:
        teacher_key: under which a row names its teacher.

    Raises:
        ValueError: the file is missing, or lines are malformed: ``file:line: what is wrong``, the first five of them.
    """
    if not path.is_file():
        raise ValueError(
            f"no such file: {path}. [data] path is a folder with train.jsonl and test.jsonl, or one JSONL file; "
            "GSM8K's are at https://github.com/openai/grade-school-math"
        )
    problems, complaints = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                problems.append(_problem_of_line(line, teacher_key))
            except ValueError as error:
                complaints.append(f"{path}:{number}: {error}")
    if complaints:
        more = f"\n(and {len(complaints) - 5} more malformed lines)" if len(complaints) > 5 else ""
        raise ValueError("\n".join(complaints[:5]) + more)
    return problems


def _problem_of_line(line: bytes, teacher_key: str | None) -> Problem:
    try:
        row = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    return _problem_of_row(row, teacher_key)


def _problem_of_row(row: Any, teacher_key: str | None) -> Problem:
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


def _from_hub(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            '[data] source = "hub" needs the datasets library: pip install "prime-composer[hub]"'
        ) from error
    splits = datasets.load_dataset(config.hub_id, config.hub_name)
    found = []
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(
                f"{config.hub_id} has no split {split!r}; its splits are {sorted(splits)}"
            )
        problems = []
        for number, row in enumerate(splits[split], start=1):
            try:
                problems.append(_problem_of_row(row, config.teacher_key))
            except ValueError as error:
                raise ValueError(
                    f"{config.hub_id}, split {split}, row {number}: {error}"
                ) from error
        found.append(problems)
    return found[0], found[1]


def _without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))
