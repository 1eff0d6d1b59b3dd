"""Keep answers to the first held-out questions, the student's and the teacher's, for the report."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prime_composer.backends.errors import naming_file

ANSWERS_FILE = "answers.jsonl"  # One line per evaluation; a resumed run may write a step again

KEPT = 24  # Questions whose answers are kept. The report chooses among them.

Answerer = Literal["answers", "teacher"]  # Key of a line's answers: whose they are


@dataclass(frozen=True)
class KeptAnswer:
    """A greedy answer of the student or its teacher."""

    question: str
    reference: str  # the data's own answer
    text: str
    correct: bool | None  # by the recipe's metric; None for a graded one, and for none
    score: float | None = None  # of a graded metric; None for another one
    metric: str | None = None
    place: int | None = None  # among those held out; None in a run of an older version

    @property
    def asked(self) -> int | str:
        """What the student's and the teacher's answers to one problem have in common."""
        return self.question if self.place is None else self.place


def write_answers(
    run_dir: Path,
    step: int,
    answers: Sequence[KeptAnswer],
    signatures: Mapping[str, str] | None = None,
    of: Answerer = "answers",
) -> None:
    """Append the answers of a step's evaluation, with the signatures of its graded metrics."""
    line: dict[str, Any] = {
        "step": step,
        of: [dataclasses.asdict(answer) for answer in answers],
    }
    if signatures:
        line["signatures"] = dict(signatures)
    path = run_dir / ANSWERS_FILE
    with naming_file(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_answers(run_dir: Path, of: Answerer = "answers") -> dict[int, list[KeptAnswer]]:
    """Return step -> answers of the student or of the teacher.

    Lines that are none of ours are left out, such as one that a crash cut.
    """
    answers: dict[int, list[KeptAnswer]] = {}
    for record in _records(run_dir):
        try:
            answers[int(record["step"])] = [KeptAnswer(**answer) for answer in record[of]]
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
    try:
        lines = (run_dir / ANSWERS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue
