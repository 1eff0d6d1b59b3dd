"""Keep the student's answers to the first held-out questions, for the report of the run."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ANSWERS_FILE = "answers.jsonl"
"""One line per evaluation, in the run directory. A resumed run may write a step again."""

KEPT = 3
"""Questions whose answers are kept."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer of the student.

    Attributes:
        question: of the problem.
        reference: the data's own answer.
        text: what the student answered.
        correct: whether the recipe's check accepts it.
    """

    question: str
    reference: str
    text: str
    correct: bool


def write_answers(run_dir: Path, step: int, answers: Sequence[Answer]) -> None:
    """Append the answers of a step's evaluation.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    line = {"step": step, "answers": [dataclasses.asdict(answer) for answer in answers]}
    with (run_dir / ANSWERS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_answers(run_dir: Path) -> dict[int, list[Answer]]:
    """Return step -> answers, of a step that was written twice the newer ones.

    Lines that are none of ours are left out, such as one that a crash cut. A run of an older
    version has no such file, and no answers.
    """
    try:
        lines = (run_dir / ANSWERS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    answers: dict[int, list[Answer]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            answers[int(record["step"])] = [Answer(**answer) for answer in record["answers"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return answers
