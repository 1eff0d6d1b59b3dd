"""Damaged JSONL files and answers: read or refused in a short message, with bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_composer.problems.answers import final_number, is_correct
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.files import read_file
from tests.fuzz import EXAMPLES, ODD, bounded, bounded_memory, damaged, damaged_bytes

ROWS = [
    {"question": "How many?", "answer": "One and one.\n#### 2", "by": "a"},
    {"question": "And now?", "answer": "#### -1,234.5", "by": None, "more": {"x": [1]}},
]


def check(path: Path, content: bytes) -> None:
    """Read a file of problems, and grade each with its own answer."""
    path.write_bytes(content)
    try:
        problems = read_file(path, DataConfig(teacher_key="by", source="jsonl", path=path))
    except ValueError as error:
        shown = str(error).replace(str(path), "FILE")
        assert 0 < len(shown) < 1000 and "FILE:" in shown
        return
    for problem in problems:
        problem.question.encode()
        answer = problem.answer[problem.answer.rindex("####") :]
        assert is_correct(answer, problem, DataConfig())


@pytest.mark.parametrize("examples", EXAMPLES)
def test_jsonl_damaged_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    """Values of other types and lengths, in any place."""
    path = tmp_path / "f.jsonl"

    @bounded(examples)
    @given(values=st.lists(ODD, min_size=1, max_size=3), seed=st.integers(0, 10**6))
    def damage(values: list[Any], seed: int) -> None:
        rows = damaged(ROWS, values, seed)
        check(path, "\n".join(json.dumps(row) for row in rows).encode())

    with bounded_memory():
        damage()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_jsonl_of_damaged_bytes_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    """Bytes of the file replaced, also by what no JSON has."""
    path, text = tmp_path / "f.jsonl", "\n".join(json.dumps(row) for row in ROWS).encode()
    pieces = [b"[", b"\\ud800", b"\\udc00", b"\xff\xfe", b"\x00", b"9", b"{", b"#", b"1/", b"\n"]

    @bounded(examples)
    @given(damaged_bytes(text, pieces))
    def damage(content: bytes) -> None:
        check(path, content)

    with bounded_memory():
        damage()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_final_number_reads_any_text_or_nothing(examples: int) -> None:
    """A completion may be any text. What is read equals itself as a reference."""
    letters = st.sampled_from("0123456789,.-+−$£€ \t\n#/*=x^()[]{}%:;½²e\\orandtimes５")

    @bounded(examples)
    @given(st.text(letters, max_size=40), st.integers(1, 300))
    def read(text: str, times: int) -> None:
        number = final_number(f"#### {text * times}")
        if number is not None:
            assert number == final_number(f"#### {number:f}")
            assert is_correct(
                f"#### {text * times}", Problem("q", f"#### {number:f}"), DataConfig()
            )

    with bounded_memory():
        read()
