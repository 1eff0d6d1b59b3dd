"""Problems, prompts, answer checking and batch order."""

import json
import os
import re
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from prime_composer.problems import generated as data
from prime_composer.problems.answers import final_number, is_correct
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.files import read_file
from prime_composer.problems.generated import generate_problems
from prime_composer.problems.loading import load_problem_set, load_problems, split_by_question
from prime_composer.problems.order import environment_batches, prompt_batches
from prime_composer.problems.prompts import render_prompt

GOOD = '{"question": "How many?", "answer": "One and one.\\n#### 2"}'


def problem_with(final):
    return Problem("How many?", f"It is so.\n#### {final}")


def test_generated_problems_are_split_without_overlap():
    """No generated question is both trained on and held out."""
    train, held_out = load_problems(DataConfig(size=600))
    assert len(train) == 540 and len(held_out) == 60
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert len({p.question for p in train + held_out}) == 600


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


def test_generated_answers_use_the_numbers_of_the_question():
    """The numbers of a generated question appear in its answer."""
    for problem in generate_problems(600, seed=4):
        asked = re.findall(r"\d+", problem.question)
        used = Counter(re.findall(r"\d+", problem.answer))
        assert all(used[number] >= count for number, count in Counter(asked).items())


def test_generated_problems_use_all_templates_equally():
    """The six templates are used equally often."""
    kinds = Counter(re.sub(r"\d+|^\w+", "#", p.question) for p in generate_problems(600, seed=0))
    by_shape = Counter()
    for shape, count in kinds.items():
        verb = next(
            w for w in ("buys", "gives", "fills", "boxes of", "loses", "dawn") if w in shape
        )
        by_shape[verb] += count
    assert len(by_shape) == 6 and min(by_shape.values()) >= 90


def test_generated_problems_depend_on_the_seed():
    """The same seed gives the same problems, and another seed gives others."""
    assert generate_problems(100, 0) == generate_problems(100, 0)
    assert generate_problems(100, 0) != generate_problems(100, 1)
    assert load_problems(DataConfig(size=100)) == load_problems(DataConfig(size=100))


def test_generated_problems_too_many_names_the_key(monkeypatch):
    """More questions than the templates can make are refused, naming the key."""
    for name, values in {
        "NAMES": ["Ada"],
        "ITEMS": ["books"],
        "TEMPLATES": {data._boxes: 1},
    }.items():
        monkeypatch.setattr(data, name, values)
    assert len(generate_problems(60, 0)) == 60
    with pytest.raises(ValueError, match=r"\[data\] size = 100.*only 64 distinct"):
        generate_problems(100, 0)


def test_split_keeps_repeated_questions_together():
    """Problems with the same question stay on the same side."""
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


def test_jsonl_file_is_split_by_hold_out(tmp_path):
    """A single file is split by the share hold_out."""
    file = tmp_path / "all.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(20))
    )
    train, held_out = load_problems(DataConfig(source="jsonl", path=file, hold_out=0.25))
    assert len(train) == 15 and len(held_out) == 5


def test_jsonl_folder_with_shared_question_is_refused(tmp_path):
    """A question in both files of a folder is refused."""
    (tmp_path / "train.jsonl").write_text(GOOD)
    (tmp_path / "test.jsonl").write_text(GOOD)
    with pytest.raises(ValueError, match="both trained on and held out.*How many"):
        load_problems(DataConfig(source="jsonl", path=tmp_path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "q", "answer"', "not JSON: .* at column 27"),
        ("[1, 2]", "expected an object.*found list"),
        ('{"question": "q"}', "\"answer\" is missing; the keys are \\['question'\\]"),
        ('{"question": 7, "answer": "#### 1"}', '"question" must be a string, found int'),
        ('{"question": "  ", "answer": "#### 1"}', '"question" is empty'),
        ('{"question": "q", "answer": "It is 1."}', '"answer" has no "#### <number>"'),
        ('{"question": "q", "answer": "#### many"}', "what follows .* is not a number: 'many'"),
    ],
)
def test_jsonl_malformed_line_is_reported_with_its_place(tmp_path, line, complaint):
    """A malformed line is reported with file, line and what is wrong."""
    file = tmp_path / "train.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl:3: {complaint}"):
        read_file(file)


def test_jsonl_line_not_utf8_is_reported(tmp_path):
    """A line that is not UTF-8 is reported with its place."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not UTF-8"):
        read_file(file)


LONE = r'{"question": "half \ud800 a letter", "answer": "#### 1"}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (f"{GOOD}\n{LONE}\n".encode(), r":2: the lone surrogate '\\ud800' is half a letter"),
        (f"{GOOD}\n{'[' * 100_000}\n".encode(), ":2: too deeply nested"),
        (f"{GOOD}\n{GOOD}\n".encode("utf-16"), ":1: the file is UTF-16; save it as UTF-8"),
        (f"{GOOD}\n{'9' * 10_000}\n".encode(), ":2: not read: Exceeds the limit"),
        (b'{"question": "q"' + b', "k": 1' * 3 + b', "' + b"x" * 100_000 + b'": 1}', "is missing"),
        (f'{{"question": "q", "answer": "#### {"z" * 100_000}"}}'.encode(), "not a number: 'zz"),
    ],
    ids=["lone surrogate", "deep", "UTF-16", "long integer", "long key", "long answer"],
)
def test_jsonl_of_odd_bytes_is_one_sentence(tmp_path, content, complaint):
    """It names file and line, and shows a short piece of a long line."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"train\.jsonl.*{complaint}") as caught:
        read_file(file)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_jsonl_whole_letters_in_escapes_are_read(tmp_path):
    """A pair of surrogates is a letter, also beside a byte order mark."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + rb'{"question": "\ud83d\ude00?", "answer": "#### 1"}')
    assert read_file(file) == [Problem("\U0001f600?", "#### 1")]


def test_jsonl_that_cannot_be_read_says_why(tmp_path, monkeypatch):
    """A file without permission is one sentence."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "train.jsonl"
    file.write_text(GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"train\.jsonl cannot be read: Permission denied"):
        read_file(file)


def test_jsonl_many_malformed_lines_are_counted(tmp_path):
    """Of many malformed lines the first five are shown and the rest counted."""
    file = tmp_path / "train.jsonl"
    file.write_text("oops\n" * 8)
    with pytest.raises(ValueError) as error:
        read_file(file)
    assert str(error.value).count("not JSON") == 5
    assert "and 3 more malformed rows" in str(error.value)


def test_jsonl_missing_file_says_what_path_is(tmp_path):
    """A missing file is reported with what `path` should be."""
    with pytest.raises(ValueError, match="no such file: .*absent.*or a folder of them"):
        load_problems(DataConfig(path=tmp_path / "absent"))
    with pytest.raises(ValueError, match="has no file that ends in .jsonl,.*.parquet"):
        load_problems(DataConfig(path=tmp_path))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"source": "jsonl"}, "needs path"),
        ({"source": "hub", "path": "somewhere"}, "only with source"),
        ({"prompt_template": "Answer this:"}, "must contain {question}"),
        ({"answer_chek": "gsm8k"}, "answer_chek"),
        ({"hold_out": 1.0}, "hold_out"),
    ],
)
def test_data_table_wrong_value_names_the_key(settings, complaint):
    """A wrong value in [data] is refused, naming the key."""
    with pytest.raises(ValidationError, match=complaint):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### 0.25", "0.25"),
        ("#### .5", "0.5"),
        ("#### $18.00", "18"),
        ("#### $-3", "-3"),
        ("#### -$3", "-3"),
        ("####7", "7"),
        ("#### 18.", "18"),
        ("#### 12 apples", "12"),
        ("#### 1\n#### 2", "1"),
        ("18", None),
        ("####", None),
        ("#### eighteen", None),
        ("#### \n7", None),
    ],
)
def test_final_number_reads_the_number_after_the_mark(text, number):
    """The number after the first mark is read exactly."""
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "reference", "correct"),
    [
        (" 9 + 9 = 18\n#### 18", "18", True),
        ("#### 18.00", "18", True),
        ("#### $1,080", "1,080", True),
        ("#### 1080", "1,080", True),
        ("#### 180", "18", False),
        ("#### 1", "18", False),
        ("#### -18", "18", False),
        ("the answer is 18", "18", False),
        ("#### 17\n#### 18", "18", False),
        ("", "18", False),
        ("#### 0.1", "0.10", True),
        ("#### 0.3", "0.30000000000000004", False),
    ],
)
def test_is_correct_gsm8k_compares_exact_numbers(text, reference, correct):
    """The GSM8K rule compares exact decimal numbers."""
    assert is_correct(text, problem_with(reference), DataConfig()) is correct


@pytest.mark.parametrize(
    ("text", "reference", "correct"),
    [
        ("So the total is $\\boxed{18}$.", "18", True),
        ("The answer is 1,080.", "1,080", True),
        ("$\\frac{1}{2}$", "0.5", True),
        ("So the total is $\\boxed{19}$.", "18", False),
        ("I cannot tell.", "18", False),
    ],
)
def test_is_correct_math_verify_reads_text_and_latex(text, reference, correct):
    """Math-Verify reads free text and LaTeX."""
    assert is_correct(text, problem_with(reference), DataConfig(metric="math_verify")) is correct


def test_is_correct_math_verify_works_in_a_thread():
    """Math-Verify works outside the main thread, where signals are not available."""
    from concurrent.futures import ThreadPoolExecutor

    config = DataConfig(metric="math_verify")
    with ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(is_correct, "The answer is 18.", problem_with("18"), config).result()
            is True
        )


@pytest.mark.skipif(
    "PRIME_COMPOSER_GSM8K" not in os.environ,
    reason="PRIME_COMPOSER_GSM8K does not name GSM8K's folder",
)
def test_gsm8k_loads_whole_and_its_answers_are_correct():
    """The real GSM8K loads whole, and its own answers pass the check."""
    config = DataConfig(source="jsonl", path=os.environ["PRIME_COMPOSER_GSM8K"])
    train, held_out = load_problems(config)
    assert (len(train), len(held_out)) == (7473, 1319)  # the sizes of Cobbe et al., 2021, Section 2
    assert all(is_correct(problem.answer, problem, config) for problem in train + held_out)
    assert not any("<<" in problem.answer for problem in train + held_out)


def test_problem_final_follows_the_last_mark():
    """The reference answer is the text after the last mark."""
    assert Problem("q", "#### is a mark\n#### 1,234 ").final == "1,234"


class LetterTokenizer:
    chat_template = None

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


def test_render_prompt_fills_the_template():
    """A prompt is the template around the question."""
    problem = Problem("What is {x}?", "#### 1")
    ids = render_prompt(problem, DataConfig(), LetterTokenizer())
    assert "".join(map(chr, ids)) == "Question: What is {x}?\nAnswer:"


def test_render_prompt_uses_the_chat_template():
    """A chat prompt goes through the tokenizer's own template."""
    tokenizer = LetterTokenizer()
    config = DataConfig(chat_template=True, prompt_template="{question} Think.")
    with pytest.raises(ValueError, match="chat_template = true.*has none"):
        render_prompt(Problem("Why?", "#### 1"), config, tokenizer)
    tokenizer.chat_template = "there is one"
    ids = render_prompt(Problem("Why?", "#### 1"), config, tokenizer)
    assert "".join(map(chr, ids)) == "<user>Why? Think.<assistant>"


@pytest.mark.parametrize(("n", "batch"), [(12, 4), (10, 4), (7, 16), (5, 5), (1, 3)])
def test_prompt_batches_ask_each_problem_once_an_epoch(n, batch):
    """Each epoch asks every problem exactly once."""
    stream = [i for step in range(6 * n) for i in prompt_batches(n, batch, 0, step)]
    for epoch in range(6):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_prompt_batches_depend_on_seed_and_step():
    """A batch is a function of seed and step alone."""
    late = prompt_batches(100, 8, 5, 40)
    assert [prompt_batches(100, 8, 5, step) for step in range(50)][40] == late
    assert prompt_batches(100, 8, 6, 40) != late
    assert prompt_batches(100, 100, 5, 0) != prompt_batches(100, 100, 5, 1)


def test_hub_without_library_names_the_pip_command(monkeypatch):
    """The hub without its library is refused, naming the pip command."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install .+\[hub\]'$"):
        load_problems(DataConfig(source="hub"))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)"),
        FileNotFoundError("Dataset 'openai/gsm8k' doesn't exist on the Hub\nlong story"),
    ],
)
def test_hub_out_of_reach_names_a_local_copy(monkeypatch, error):
    """Without a network, the message names the data set and how to use a local copy."""

    def load_dataset(*names):
        raise error

    library = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(ValueError) as caught:
        load_problems(DataConfig(source="hub"))
    message = str(caught.value)
    assert "hub_id = 'openai/gsm8k' could not be read from the Hugging Face hub" in message
    assert str(error).partition("\n")[0] in message and "long story" not in message
    assert "--set data.source=files --set data.path=FOLDER" in message


def test_hub_splits_become_problems(monkeypatch):
    """The splits of a hub data set become problems. A malformed row is named."""
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


def test_environment_batches_of_one_are_prompt_batches():
    """A single environment is asked in the order of prompt_batches."""
    assert environment_batches((40,), (2.0,), 8, 1, 7) == prompt_batches(40, 8, 1, 7)


def test_generated_operations_choose_the_templates():
    """`operations` selects the templates."""
    for operations in ((1,), (2, 3)):
        for problem in generate_problems(60, 0, operations):
            assert problem.answer.count(" = ") in operations


def test_load_problem_set_orders_environments():
    """Environments are concatenated for training and held out in turn."""
    sources = {"a": DataConfig(size=40, operations=(1,)), "b": DataConfig(size=20, operations=(2,))}
    problems = load_problem_set(sources)
    assert [p.environment for p in problems.practice] == ["a"] * 36 + ["b"] * 18
    assert [p.environment for p in problems.held_out] == ["a", "b", "a", "b", "a", "a"]
    assert problems.config_of(problems.held_out[1]) is sources["b"]


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "`operations` without one in common, or the same `operations`, `size`, `seed`"),
        ({"kind": "reversal", "metric": "exact"}, "Give both the same `size`, `seed` and `hold_o"),
    ],
)
def test_load_problem_set_refuses_overlap(changes, remedy):
    """No environment may hold out what another one trains on; the remedy fits what is generated."""
    sources = {
        "a": DataConfig(size=40, **changes),
        "b": DataConfig(size=40, hold_out=0.5, **changes),
    }
    said = "environments.a trains on what environments.b holds out: .* both trained on and held out"
    with pytest.raises(ValueError, match=f"{said}.*{remedy}"):
        load_problem_set(sources)


def test_load_problem_set_overlap_of_files_names_no_keys(tmp_path):
    """Of problems that are not generated, the remedy is to remove them."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "{i}?", "answer": "{i}"}}\n' for i in range(40)))
    same = {"source": "jsonl", "path": path, "metric": "exact"}
    sources = {"a": DataConfig(**same), "b": DataConfig(hold_out=0.5, **same)}
    with pytest.raises(ValueError, match="Remove them from one of the two. The first: "):
        load_problem_set(sources)


def test_teacher_key_that_no_row_has_is_refused(tmp_path):
    """A teacher_key that no row has is refused."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question": f"{i}?", "answer": f"#### {i}", "by": "x"}) for i in range(20)
        )
    )
    train, _ = load_problems(DataConfig(source="jsonl", path=path, teacher_key="by"))
    assert {problem.teacher for problem in train} == {"x"}
    with pytest.raises(ValueError, match="no row has the key 'bye'; correct teacher_key"):
        load_problems(DataConfig(source="jsonl", path=path, teacher_key="bye"))


def test_read_jsonl_row_may_name_its_teacher(tmp_path):
    """A row may name its teacher, as a string."""
    rows = [
        {"question": "a?", "answer": "#### 1", "by": "x"},
        {"question": "b?", "answer": "#### 2"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [
        p.teacher for p in read_file(path, DataConfig(teacher_key="by", source="jsonl", path=path))
    ] == ["x", None]
    assert [p.teacher for p in read_file(path)] == [None, None]
    path.write_text(json.dumps({**rows[0], "by": 3}))
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: \"by\" must be the name of a teacher, found int"
    ):
        read_file(path, DataConfig(teacher_key="by", source="jsonl", path=path))
