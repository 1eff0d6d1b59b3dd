"""Data as people have it: conversations, parquet, folders, rows from Python, and no answers."""

import csv
import gzip
import json
import math
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_composer.extras import pip_install
from prime_composer.problems.answers import contains, is_correct
from prime_composer.problems.config import DataConfig, Message, Problem
from prime_composer.problems.files import read_file
from prime_composer.problems.loading import load_problem_set, load_problems
from prime_composer.problems.prompts import prompt_messages, render_prompt
from prime_composer.problems.rows import problem_of_row, problem_or_none

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: parquet)")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra: parquet)")

CHAT = {"messages_key": "messages", "metric": "contains"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


def read(row: Any, **settings: Any) -> Problem:
    settings = {"source": "rows", **settings}
    return problem_of_row(row, DataConfig(**settings))


def questions(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"{n}?", "answer": str(n)} for n in range(start, start + count)]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversation_ends_in_its_answer() -> None:
    system = {"role": "system", "content": "Be brief."}
    row = chat(system, user("Hi"), assistant("Yes?"), user(" How old? "), assistant(" 57\n"))
    problem = read(row, **CHAT)
    assert (problem.question, problem.answer) == ("How old?", "57")
    said = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Yes?"))
    assert problem.context == said
    config = DataConfig(source="rows", **CHAT)
    assert config.chat_template
    wanted = [system, user("Hi"), assistant("Yes?"), user("How old?")]
    assert prompt_messages(problem, config) == wanted


def test_system_prompt_is_first_unless_a_row_has_its_own() -> None:
    plain = {"source": "rows", "metric": "exact", "prompt_template": "{question}"}
    config = DataConfig(**plain, system="Be brief.", system_key="s")
    first = lambda problem: prompt_messages(problem, config)[0]["content"]  # noqa: E731
    row = {"question": "q", "answer": "a"}
    assert first(problem_of_row({**row, "s": "Shout."}, config)) == "Shout."
    for nothing in ({}, {"s": ""}, {"s": None}, {"s": math.nan}):
        assert first(problem_of_row({**row, **nothing}, config)) == "Be brief."


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": "hi"}, r'"messages" must be a list of messages.*JSON.*prompt_key'),
        (chat(user("q"), {"role": "tool", "content": "x"}), "message 2 has role 'tool'.*by id"),
        (chat(user("q"), {**assistant("x"), "tool_calls": [{}]}), "message 2 has tool_calls"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}),
            "message 1: a part of content is no text.*leave such rows out",
        ),
        (chat(user("q"), {"role": "system", "content": "x"}, user("q")), "message 2 is of the sys"),
        (chat(assistant("a")), "before the answer it ends with nothing"),
        (chat(user("q"), assistant("a"), assistant("b")), "ends with a message of the assistant"),
        (chat(user("q")), 'does not end in a message of the assistant.*metric = "none"'),
        ({"text": "q"}, r"the keys are \['text'\]; name one of them in \[data\] messages_key"),
    ],
)
def test_conversation_that_is_none_names_the_message(row: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(row, **CHAT)


SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "How old?"},
            {"from": "gpt", "value": "57"}]  # fmt: skip


@pytest.mark.parametrize(
    "stored",
    [
        SHAREGPT,
        json.dumps(SHAREGPT),
        [{"role": "system", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
         user("How old?"), {"role": "model", "content": [{"type": "text", "text": "57"}]}],
        np.array(SHAREGPT, dtype=object),
    ],
    ids=["sharegpt", "JSON", "parts", "arrays"],
)  # fmt: skip
def test_conversation_is_read_as_people_store_it(stored: Any) -> None:
    problem = read({"messages": stored}, **CHAT)
    assert (problem.question, problem.answer) == ("How old?", "57")
    assert problem.context == (Message("system", "Be brief."),)


def test_reasoning_beside_an_answer_goes_to_the_template() -> None:
    """It is under the name that templates read, in the history and in the answer."""
    thought = {"reasoning_content": "30 and 27."}
    row = chat(user("Hi"), assistant("Yes?") | thought, user("Sum?"), assistant("57") | thought)
    problem = read(row, **CHAT)
    assert problem.answer == "57" and problem.reasoning == "30 and 27."
    history = prompt_messages(problem, DataConfig(source="rows", **CHAT))
    assert history[1] == assistant("Yes?") | thought


def test_row_without_the_columns_names_the_key_for_messages() -> None:
    with pytest.raises(ValueError, match='or set messages_key = "messages"'):
        read(chat(user("q"), assistant("a")))
    with pytest.raises(ValueError, match=r"\[data\] messages_key = \"question\""):
        read({"question": [user("q")], "answer": "#### 1"})


@pytest.mark.parametrize("answer", [42, 42.0, "42", "so it is \\boxed{42}"])
def test_bare_reference_is_read_by_math_verify(answer: Any) -> None:
    """A number is no text in JSON and in a table, and "####" is not needed."""
    config = DataConfig(source="rows", metric="math_verify")
    problem = problem_of_row({"question": "q", "answer": answer}, config)
    assert is_correct("The answer is 42.", problem, config)
    assert not is_correct("The answer is 43.", problem, config)


WRITTEN = [
    (57.0, "57"),
    (np.float32(-3.0), "-3"),
    (np.int64(57), "57"),
    (Decimal("57.00"), "57"),
    (Decimal("1E16"), "10000000000000000"),
    (2**53 + 1, "9007199254740993"),
    (57.5, "57.5"),
    (Decimal("0.10"), "0.10"),
]


@pytest.mark.parametrize(("answer", "written"), WRITTEN)
@pytest.mark.parametrize("metric", ["exact", "contains"])
def test_number_of_a_table_is_read_as_people_write_it(
    answer: Any, written: str, metric: str
) -> None:
    """pandas makes a column of integers floats where one is missing, and parquet has decimals."""
    config = DataConfig(source="rows", metric=metric)
    problem = problem_of_row({"question": "q", "answer": answer}, config)
    assert problem.answer == written
    assert is_correct(written, problem, config)


def test_float_that_may_have_lost_digits_is_refused() -> None:
    """A column of ids with a missing value is of floats in pandas: this one was 2^53 + 1."""
    with pytest.raises(ValueError, match=r'"answer" is the float .*text.*Int64'):
        read({"question": "q", "answer": float(2**53 + 1)}, metric="exact")


class NotAvailable:
    """Answers comparisons as pandas's NA does."""

    def __ne__(self, other: object) -> "NotAvailable":  # type: ignore[override]
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


@pytest.mark.parametrize("missing", [None, math.nan, Decimal("sNaN"), NotAvailable()])
def test_missing_question_or_conversation_is_an_empty_one(missing: Any) -> None:
    """Left out with ``clean``; in the column of teachers, it names none."""
    for row, settings in (
        ({"question": missing, "answer": "a"}, {"metric": "exact"}),
        ({"messages": missing}, CHAT),
    ):
        with pytest.raises(ValueError, match='" is empty.*clean = true'):
            read(row, **settings)
        config = DataConfig(source="rows", clean=True, **settings)
        assert problem_or_none(row, config) is None
    row = {"question": "q", "answer": "a", "t": missing}
    assert read(row, metric="exact", teacher_key="t").teacher is None


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ""}, {"answer": math.nan}])
def test_prompt_without_an_answer_needs_no_metric(row: dict[str, Any]) -> None:
    row = {"question": "q", **row}
    assert read(row, metric="none").answer == ""
    with pytest.raises(ValueError, match='"answer" is .*metric = "none" for prompts without'):
        read(row, metric="exact")


@pytest.mark.parametrize(
    ("text", "reference", "is_in"),
    [
        ("Anna is 57 years old.", "57", True),
        ("It costs 57.5.", "57", False),
        ("It costs 1,057 or so", "057", False),
        ("In new\n YORK.", "New York", True),
        ("a part of it", "art", False),
        ("costs US$5", "$5", True),
        ("a", "(a|b)", False),
        ("straße", "STRASSE", False),
    ],
)
def test_contains_reads_whole_words_and_numbers(text: str, reference: str, is_in: bool) -> None:
    assert contains(text, reference) is is_in


def test_parquet_and_jsonl_are_the_same_problems(tmp_path: Path) -> None:
    rows = [chat(user(f"{n}?"), assistant(str(n))) for n in range(40)]
    loaded = [
        load_problems(DataConfig(path=path, **CHAT))
        for path in (
            write_parquet(tmp_path / "rows.parquet", rows),
            write_jsonl(tmp_path / "rows.jsonl", rows),
        )
    ]
    assert loaded[0] == loaded[1] and [len(part) for part in loaded[0]] == [36, 4]
    given = load_problem_set({"problems": DataConfig(source="rows", **CHAT)}, iter(rows))
    assert (given.practice, given.held_out) == loaded[0]


def test_folder_is_two_parts_or_one_pool(tmp_path: Path) -> None:
    """Files named train and test are the parts, in shards too. Any others are one pool."""
    table = {"path": tmp_path, "metric": "exact", "hold_out": 0.5}
    write_parquet(tmp_path / "part-0.parquet", questions(4))
    write_jsonl(tmp_path / "part-1.jsonl", questions(4, 4))
    (tmp_path / "notes.txt").write_text("no rows")
    assert [len(part) for part in load_problems(DataConfig(**table))] == [4, 4]
    write_parquet(tmp_path / "train-00000-of-00002.parquet", questions(3, 10))
    write_jsonl(tmp_path / "train-00001-of-00002.jsonl", questions(3, 13))
    assert [len(part) for part in load_problems(DataConfig(**table))] == [3, 3]
    write_parquet(tmp_path / "test.parquet", questions(5, 20))
    train, held_out = load_problems(DataConfig(**table))
    assert [problem.answer for problem in train] == ["10", "11", "12", "13", "14", "15"]
    assert len(held_out) == 5
    limited, some = load_problems(DataConfig(**table, limit=4))
    assert (len(limited), len(some)) == (4, 4) and limited == train[:4]


def test_bad_rows_are_named_by_file_row_and_key(tmp_path: Path) -> None:
    rows = [*questions(2), {"question": "q", "answer": None}]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(ValueError, match=r'rows\.parquet, row 3: "answer" is empty'):
        load_problems(DataConfig(path=path, metric="exact"))
    with pytest.raises(ValueError, match=r'^test row 2: "prompt" is missing'):
        load_problem_set(
            {"problems": DataConfig(source="rows", metric="exact", prompt_key="prompt")},
            {
                "train": [{"prompt": "a", "answer": "b"}],
                "test": [{"prompt": "c", "answer": "d"}, {}],
            },
        )


def test_parquet_without_pyarrow_has_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", questions(3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=re.escape(f"pyarrow library: {pip_install('parquet')}")):
        load_problems(DataConfig(path=path, metric="exact"))


def test_rows_are_an_iterable_or_two_parts() -> None:
    config = {"problems": DataConfig(source="rows", metric="exact", hold_out=0.25)}
    problems = load_problem_set(config, (row for row in questions(8)))
    assert (len(problems.practice), len(problems.held_out)) == (6, 2)
    problems = load_problem_set(config, {"train": questions(8), "test": questions(3, 8)})
    assert (len(problems.practice), len(problems.held_out)) == (8, 3)
    with pytest.raises(ValueError, match=r"a mapping of \['a'\]; give a list of rows"):
        load_problem_set(config, {"a": questions(2)})
    with pytest.raises(ValueError, match=r"the rows come from Python, prime_composer\.distill"):
        load_problem_set(config)


def test_same_question_in_two_conversations_is_two_problems() -> None:
    """A system message or an earlier turn makes another prompt of it."""
    again = chat(user("Why?"), assistant("a"))
    other = chat({"role": "system", "content": "Shout."}, user("Why?"), assistant("a"))
    config = {"problems": DataConfig(source="rows", **CHAT)}
    problems = load_problem_set(config, {"train": [again], "test": [other]})
    assert len(problems.practice) == len(problems.held_out) == 1
    with pytest.raises(ValueError, match="both trained on and held out"):
        load_problem_set(config, {"train": [again], "test": [again]})


def test_template_that_refuses_a_role_names_the_question() -> None:
    class Refusing:
        chat_template = "there is one"

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

        def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> Any:
            raise RuntimeError("System role not supported")

    config = DataConfig(source="rows", system="Be brief.", metric="none")
    said = r"\(system, user\) of the question '.*Why\?.*': System role"
    with pytest.raises(ValueError, match=said):
        render_prompt(Problem("Why?", ""), config, Refusing())


def test_csv_and_gzip_give_what_jsonl_gives(tmp_path: Path) -> None:
    """A value of a CSV file may have line breaks, and any length."""
    rows = [{"question": f'{n}, "so"\n?', "answer": "long " * 40_000 + str(n)} for n in range(3)]
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "c.csv"
    with table.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    config = DataConfig(path=tmp_path, metric="exact")
    first, *others = (read_file(path, config) for path in (plain, zipped, table))
    assert len(first) == 3 and others == [first, first]


GOOD = b'{"question": "How many?", "answer": "One and one.\\n#### 2"}\n'
OF_ROUGE = {"prompt_key": "t.fr", "metric": "rouge2"}
ROUGE = {"metric": "rouge2"}

BROKEN = [
    # What stands in the third line of a JSONL file; the settings, and the complaint.
    ('{"question": "q", "answer"', {}, ":3: not JSON in UTF-8: .*column 27"),
    ("[1, 2]", {}, ':3: a row must be an object with "question" and "answer", found list'),
    ('{"question": 7, "answer": "#### 1"}', {}, ':3: "question" must be a string, found int'),
    ('{"question": "q", "answer": "It is 1."}', {}, ':3: "answer" has no "#### <number>"'),
    (b'{"question": "\xff", "answer": "#### 1"}', {}, ":3: not JSON in UTF-8"),
    (r'{"question": "half \ud800", "answer": "#### 1"}', {}, r":3: not JSON in UTF-8: .*'\\ud800'"),
    ("[" * 100_000, {}, ":3: not JSON in UTF-8"),
    ("9" * 10_000, {}, ":3: not JSON in UTF-8: Exceeds the limit"),
    (f'{{"question": "q", "{"x" * 100_000}": 1}}', {}, ":3: .* is missing"),
    (f'{{"question": "q", "answer": "#### {"z" * 100_000}"}}', {}, ":3: .*not a number: 'zz"),
    ('{"t": {"de": "a", "en": "b"}}', OF_ROUGE,
     r":3: \"t.fr\" is missing; .* \['t.de', 't.en'\]; name one of them in \[data\] prompt_key"),
    ('{"question": "q", "answer": ["a", "b"]}', ROUGE,
     r':3: "answer" must be a string, found list; correct the data, .*\[data\] answer_key'),
    ('{"question": "q", "answer": "yes"}', ROUGE,
     r':3: "answer" has 1 of the 2 words \(a-z, 0-9\) that rouge2 needs.*clean = true'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "settings", "complaint"), BROKEN, ids=range(len(BROKEN)))
def test_line_that_does_not_fit_is_one_sentence(
    tmp_path: Path, line: str | bytes, settings: dict[str, Any], complaint: str
) -> None:
    """File, line, column, what is wrong and what mends it; a long line is shown in short."""
    good = GOOD.replace(b'"question"', b'"t": {"fr": "a"}, "question"')
    path = tmp_path / "train.jsonl"
    path.write_bytes(good + b"\n" + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl{complaint}") as caught:
        read_file(path, DataConfig(path=path, **settings))
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", b"question,answer\n1,2,3\n", "a.csv, row 1 has not as many values"),
        ("a.csv", b"question,answer\n\xff,2\n", "a.csv cannot be read as CSV in UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz cannot be read.*gzip"),
        ("a.jsonl", GOOD.decode().encode("utf-16"), ":1: the file is UTF-16; save it as UTF-8"),
        ("a.parquet", b"PAR", "a.parquet cannot be read as parquet"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read_file(path, DataConfig(path=path, metric="exact"))
