"""Problems, prompts, answer checking and batch order."""

import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.files import read_file
from prime_composer.problems.generated import generate_problems
from prime_composer.problems.loading import load_problem_set, load_problems, split_by_question
from prime_composer.problems.order import environment_batches, prompt_batches

GOOD = '{"question": "How many?", "answer": "One and one.\\n#### 2"}'


def test_generated_answers_are_worked_out_correctly():
    """Every step of a generated answer is right, and the last one is the result."""
    for problem in generate_problems(600, seed=3):
        steps = problem.answer.splitlines()
        for step in steps[:-1]:
            left, operator, right, result = re.fullmatch(
                r"(\d+) ([-+*]) (\d+) = (\d+)", step
            ).groups()
            assert eval(f"{left} {operator} {right}") == int(result)
        assert steps[-1] == f"#### {result}"
        assert 1 <= len(steps) - 1 <= 3


def test_split_keeps_repeated_questions_together():
    problems = [Problem(f"question {i % 10}", f"#### {i}") for i in range(40)]
    train, held_out = split_by_question(problems, 0.3, seed=0)
    assert len(train) == 28 and len(held_out) == 12
    assert not {p.question for p in train} & {p.question for p in held_out}


def test_jsonl_folder_has_its_split_and_drops_annotations(tmp_path):
    """A folder has its own split. Calculator annotations are dropped unless requested."""
    answer = "He has 2+3 = <<2+3=5>>5.\n#### 5"
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "a", "answer": answer}) + "\n\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "b", "answer": answer, "id": 7}))
    train, held_out = load_problems(DataConfig(source="jsonl", path=tmp_path))
    assert (train, held_out) == (
        [Problem("a", "He has 2+3 = 5.\n#### 5")],
        [Problem("b", "He has 2+3 = 5.\n#### 5")],
    )
    train, _ = load_problems(DataConfig(source="jsonl", path=tmp_path, calculator_annotations=True))
    assert train == [Problem("a", answer)]


def test_jsonl_folder_with_shared_question_is_refused(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(GOOD)
    with pytest.raises(ValueError, match="both trained on and held out.*How many"):
        load_problems(DataConfig(source="jsonl", path=tmp_path))


def test_jsonl_whole_letters_in_escapes_are_read(tmp_path):
    """A pair of surrogates is a letter, also beside a byte order mark."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + rb'{"question": "\ud83d\ude00?", "answer": "#### 1"}')
    assert read_file(file) == [Problem("\U0001f600?", "#### 1")]


def test_jsonl_many_malformed_lines_are_counted(tmp_path):
    """The first five are shown."""
    file = tmp_path / "train.jsonl"
    file.write_text("oops\n" * 8)
    with pytest.raises(ValueError, match="and 3 more malformed rows") as error:
        read_file(file)
    assert str(error.value).count("not JSON") == 5


def test_jsonl_missing_file_says_what_path_is(tmp_path):
    with pytest.raises(ValueError, match="no such file: .*absent.*or a folder of them"):
        load_problems(DataConfig(path=tmp_path / "absent"))
    with pytest.raises(ValueError, match="has no file that ends in .jsonl,.*.parquet"):
        load_problems(DataConfig(path=tmp_path))


@pytest.mark.parametrize(("n", "batch"), [(10, 4), (7, 16)])
def test_prompt_batches_ask_each_problem_once_an_epoch(n, batch):
    stream = [i for step in range(6 * n) for i in prompt_batches(n, batch, 0, step)]
    for epoch in range(6):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_prompt_batches_depend_on_seed_and_step():
    late = prompt_batches(100, 8, 5, 40)
    assert [prompt_batches(100, 8, 5, step) for step in range(50)][40] == late
    assert prompt_batches(100, 8, 6, 40) != late
    assert prompt_batches(100, 100, 5, 0) != prompt_batches(100, 100, 5, 1)


def test_hub_without_library_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install .+\[hub\]'$"):
        load_problems(DataConfig(source="hub"))


def test_hub_splits_become_problems(monkeypatch):
    """A malformed row is named."""
    asked = []
    rows = {
        "train": [{"question": "a", "answer": "#### 1"}],
        "test": [{"question": "b", "answer": "#### 2"}],
    }
    library = SimpleNamespace(load_dataset=lambda *names: asked.append(names) or rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    train, held_out = load_problems(DataConfig(source="hub"))
    assert asked == [("openai/gsm8k", "main")]
    assert (train, held_out) == ([Problem("a", "#### 1")], [Problem("b", "#### 2")])
    rows["test"] = [{"question": "b", "answer": "two"}]
    with pytest.raises(ValueError, match="openai/gsm8k, split test, row 1: .*####"):
        load_problems(DataConfig(source="hub"))


def test_environment_batches_follow_the_ratios():
    """A step is shared out by the ratios, and each environment walks through its own problems."""
    sizes, ratios, batch = (30, 7, 50), (1.0, 2.0, 0.5), 8
    owner = [0] * 30 + [1] * 7 + [2] * 50
    asked = [environment_batches(sizes, ratios, batch, 3, step) for step in range(350)]
    for step in asked:
        assert len(step) == batch
        for environment, ratio in enumerate(ratios):
            count = sum(owner[i] == environment for i in step)
            assert abs(count - batch * ratio / sum(ratios)) < 1
    flat = [i for step in asked for i in step]
    for environment, ratio in enumerate(ratios):
        indices = [i for i in flat if owner[i] == environment]
        assert len(indices) / len(flat) == pytest.approx(ratio / sum(ratios), abs=0.005)
        # Every problem once before any comes again.
        size = sizes[environment]
        assert all(
            len(set(indices[at : at + size])) == size
            for at in range(0, len(indices) - size + 1, size)
        )
    assert environment_batches(sizes, ratios, batch, 3, 5) == asked[5]
    assert environment_batches(sizes, ratios, batch, 4, 5) != asked[5]


def test_generated_operations_choose_the_templates():
    for operations in ((1,), (2, 3)):
        for problem in generate_problems(60, 0, operations):
            assert problem.answer.count(" = ") in operations


def test_load_problem_set_orders_environments():
    sources = {"a": DataConfig(size=40, operations=(1,)), "b": DataConfig(size=20, operations=(2,))}
    problems = load_problem_set(sources)
    assert [p.environment for p in problems.practice] == ["a"] * 36 + ["b"] * 18
    assert [p.environment for p in problems.held_out] == ["a", "b", "a", "b", "a", "a"]
    assert problems.config_of(problems.held_out[1]) is sources["b"]


ROWS = {"source": "jsonl", "metric": "exact"}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "`operations` or `topics` without one in common, or .* `size`, `seed`"),
        (ROWS, "Remove them from one side"),
    ],
)
def test_load_problem_set_refuses_overlap(changes, remedy, tmp_path):
    """No environment may hold out what another one trains on."""
    own = {"size": 40} | changes
    if changes is ROWS:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f'{{"question": "{i}?", "answer": "{i}"}}\n' for i in range(40)))
        own = ROWS | {"path": path}
    sources = {"a": DataConfig(**own), "b": DataConfig(hold_out=0.5, **own)}
    said = "environments.a trains on what environments.b holds out: .* both trained on and held out"
    with pytest.raises(ValueError, match=f"{said}.*{remedy}"):
        load_problem_set(sources)


def test_rows_may_name_their_teachers(tmp_path):
    """As a string; a key that no row has is refused."""
    rows = [{"question": f"{i}?", "answer": f"#### {i}", "by": "x"} for i in range(20)]
    del rows[1]["by"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(source="jsonl", path=path, teacher_key="by")
    assert [problem.teacher for problem in read_file(path, config)[:3]] == ["x", None, "x"]
    assert {problem.teacher for problem in read_file(path)} == {None}
    train, held_out = load_problems(config)
    assert Counter(problem.teacher for problem in train + held_out) == {"x": 19, None: 1}
    with pytest.raises(ValueError, match="no row has the key 'bye'; correct teacher_key"):
        load_problems(config.model_copy(update={"teacher_key": "bye"}))
    path.write_text(json.dumps({**rows[0], "by": 3}))
    said = r"rows.jsonl:1: \"by\" must be the name of a teacher, found int"
    with pytest.raises(ValueError, match=said):
        read_file(path, config)


FACTS = {"kind": "facts", "metric": "short_answer"}
SUMMARY = {"kind": "summary", "metric": "rouge2"}

WRONG_TABLES = [
    ({"source": "jsonl"}, "needs path"),
    ({"source": "hub", "path": "somewhere"}, "only with source"),
    ({"prompt_template": "Answer this:"}, "must contain {question}"),
    # Metrics that read what is not there, and keys of other sources.
    ({"kind": "translation", "metric": "math_verify"}, 'set metric = "bleu"'),
    (FACTS | {"metric": "gsm8k"}, 'kind = "facts" has none: set metric = "short_answer"'),
    (SUMMARY | {"operations": [1]}, 'operations is read only with kind = "arithmetic"'),
    (SUMMARY | {"source": "hub"}, 'kind is read only with source = "generated"'),
    (FACTS | {"kind": "lookup", "metric": "exact", "topics": ["ages"]}, 'only with kind = "facts"'),
    (FACTS | {"topics": ["ages", "capitals"]}, 'topics has "capitals", which no .* use = "eval"'),
    ({"use": "eval", "hold_out": 0.5}, 'use = "eval" everything is held out: leave hold_out'),
    ({"use": "eval", "ratio": 2.0}, "ratio is a share of the prompts to train on"),
    ({"messages_key": "m"}, "messages_key names a key of the data's rows.*or set path"),
    ({"system_key": "s"}, "system_key names a key.*use `system`"),
    ({"path": "x", "system": "s", "chat_template": False}, "leave chat_template = false out"),
    ({"path": "x", "messages_key": "m", "prompt_key": "p"}, "messages_key and prompt_key"),
]


@pytest.mark.parametrize(("table", "complaint"), WRONG_TABLES)
def test_data_table_that_does_not_fit_names_the_key(table, complaint):
    """It says which keys do not go together, and what to write."""
    with pytest.raises(ValidationError, match=complaint):
        DataConfig.model_validate(table)
