"""Keep the student's answers to the first held-out questions, for the report of the run."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_composer.local.run_dir.disk import naming

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
        correct: whether the recipe's metric accepts it; None for a graded metric.
        score: the value of a graded metric; None for another one.
        metric: name of the graded metric; None for another one.
    """

    question: str
    reference: str
    text: str
    correct: bool | None
    score: float | None = None
    metric: str | None = None


def write_answers(
    run_dir: Path, step: int, answers: Sequence[Answer], signatures: Mapping[str, str] | None = None
) -> None:
    """Append the answers of a step's evaluation.

    Args:
        run_dir: the run directory.
        step: of the evaluation.
        answers: the first ones.
        signatures: those of the run's graded metrics.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    line: dict[str, Any] = {
        "step": step,
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }
    if signatures:
        line["signatures"] = dict(signatures)
    path = run_dir / ANSWERS_FILE
    with naming(path):
        # A crash may have cut the last line, which this one must not continue.
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(line) + "\n")


def read_answers(run_dir: Path) -> dict[int, list[Answer]]:
    """Return step -> answers, of a step that was written twice the newer ones.

    Lines that are none of ours are left out, such as one that a crash cut. A run of an older
    version has no such file, and no answers.
    """
    answers: dict[int, list[Answer]] = {}
    for record in _records(run_dir):
        try:
            answers[int(record["step"])] = [Answer(**answer) for answer in record["answers"]]
        except (ValueError, TypeError, KeyError):
            continue
    return answers


def read_signatures(run_dir: Path) -> dict[str, str]:
    """Return the signatures of a run's graded metrics, of its newest evaluation."""
    signatures: dict[str, str] = {}
    for record in _records(run_dir):
        own = record.get("signatures") if isinstance(record, dict) else None
        if isinstance(own, dict):
            signatures |= {str(metric): str(text) for metric, text in own.items()}
    return signatures


def _records(run_dir: Path) -> Iterator[Any]:
    """Yield the JSON values of the file, line by line."""
    try:
        lines = (run_dir / ANSWERS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue
