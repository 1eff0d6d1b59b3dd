"""Problems, prompts, answer checking and batch order."""

import json
import os
import re
from collections import Counter
from decimal import Decimal

import pytest
from pydantic import ValidationError

from prime_composer.problems import generated as data
from prime_composer.problems.answers import final_number, is_correct
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.generated import generate_problems
from prime_composer.problems.loading import load_problem_set, load_problems, split_by_question
from prime_composer.problems.order import environment_batches, prompt_batches
from prime_composer.problems.prompts import render_prompt
from prime_composer.problems.rows import read_jsonl

GOOD = '{"question": "How many?", "answer": "One and one.\\n#### 2"}'


def problem_with(final):
    return Problem("How many?", f"It is so.\n#### {final}")


def test_no_generated_question_is_both_trained_on_and_held_out():
    train, held_out = load_problems(DataConfig(size=600))
    assert len(train) == 540 and len(held_out) == 60
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert len({p.question for p in train + held_out}) == 600


def test_generated_answers_are_worked_out_correctly():
    for problem in generate_problems(600, seed=3):
        steps = problem.answer.splitlines()
        for step in steps[:-1]:
            left, operator, right, result = re.fullmatch(
                r"(\d+) ([-+*]) (\d+) = (\d+)", step
            ).groups()
            assert eval(f"{left} {operator} {right}") == int(result)
        assert steps[-1] == f"#### {result}"
        assert 1 <= len(steps) - 1 <= 3


def test_the_numbers_of_a_generated_question_are_the_ones_that_its_answer_uses():
    for problem in generate_problems(600, seed=4):
        asked = re.findall(r"\d+", problem.question)
        used = Counter(re.findall(r"\d+", problem.answer))
        assert all(used[number] >= count for number, count in Counter(asked).items())


def test_the_six_templates_come_equally_often():
    kinds = Counter(re.sub(r"\d+|^\w+", "#", p.question) for p in generate_problems(600, seed=0))
    by_shape = Counter()
    for shape, count in kinds.items():
        verb = next(
            w for w in ("buys", "gives", "fills", "boxes of", "loses", "dawn") if w in shape
        )
        by_shape[verb] += count
    assert len(by_shape) == 6 and min(by_shape.values()) >= 90


def test_the_same_seed_makes_the_same_problems_and_another_seed_others():
    assert generate_problems(100, 0) == generate_problems(100, 0)
    assert generate_problems(100, 0) != generate_problems(100, 1)
    assert load_problems(DataConfig(size=100)) == load_problems(DataConfig(size=100))


def test_asking_for_more_questions_than_the_templates_make_names_the_key(monkeypatch):
    for name, values in {
        "NAMES": ["Ada"],
        "ITEMS": ["books"],
        "TEMPLATES": {data._boxes: 1},
    }.items():
        monkeypatch.setattr(data, name, values)
    assert len(generate_problems(60, 0)) == 60
    with pytest.raises(ValueError, match=r"\[data\] size = 100.*only 64 distinct"):
        generate_problems(100, 0)


def test_repeated_questions_of_one_file_stay_on_one_side():
    problems = [Problem(f"question {i % 10}", f"#### {i}") for i in range(40)]
    train, held_out = split_by_question(problems, 0.3, seed=0)
    assert len(train) == 28 and len(held_out) == 12
    assert not {p.question for p in train} & {p.question for p in held_out}


def test_a_folder_brings_its_own_split_and_annotations_go_unless_wanted(tmp_path):
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


def test_one_file_is_split_by_the_hold_out_share(tmp_path):
    file = tmp_path / "all.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(20))
    )
    train, held_out = load_problems(DataConfig(source="jsonl", path=file, hold_out=0.25))
    assert len(train) == 15 and len(held_out) == 5


def test_a_question_in_both_files_of_a_folder_is_refused(tmp_path):
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
def test_a_malformed_line_is_reported_with_file_line_and_what_is_wrong(tmp_path, line, complaint):
    file = tmp_path / "train.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl:3: {complaint}"):
        read_jsonl(file)


def test_a_line_that_is_not_utf8_is_reported(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not UTF-8"):
        read_jsonl(file)


def test_many_malformed_lines_show_the_first_five_and_count_the_rest(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("oops\n" * 8)
    with pytest.raises(ValueError) as error:
        read_jsonl(file)
    assert str(error.value).count("not JSON") == 5
    assert "and 3 more malformed lines" in str(error.value)


def test_a_missing_file_says_what_path_should_be(tmp_path):
    with pytest.raises(ValueError, match="no such file: .*train.jsonl.*a folder with"):
        load_problems(DataConfig(source="jsonl", path=tmp_path))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"source": "jsonl"}, "needs path"),
        ({"path": "somewhere"}, "only with source"),
        ({"prompt_template": "Answer this:"}, "must contain {question}"),
        ({"answer_chek": "gsm8k"}, "answer_chek"),
        ({"hold_out": 1.0}, "hold_out"),
    ],
)
def test_a_wrong_data_table_names_the_key(settings, complaint):
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
def test_the_number_after_the_mark_is_read(text, number):
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
def test_the_gsm8k_rule_compares_exact_numbers(text, reference, correct):
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
def test_math_verify_reads_free_text_and_latex(text, reference, correct):
    assert (
        is_correct(text, problem_with(reference), DataConfig(answer_check="math_verify")) is correct
    )


def test_math_verify_works_outside_the_main_thread():
    from concurrent.futures import ThreadPoolExecutor

    config = DataConfig(answer_check="math_verify")
    with ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(is_correct, "The answer is 18.", problem_with("18"), config).result()
            is True
        )


@pytest.mark.skipif(
    "PRIME_COMPOSER_GSM8K" not in os.environ,
    reason="PRIME_COMPOSER_GSM8K does not name GSM8K's folder",
)
def test_the_real_gsm8k_loads_whole_and_its_own_answers_pass_the_check():
    config = DataConfig(source="jsonl", path=os.environ["PRIME_COMPOSER_GSM8K"])
    train, held_out = load_problems(config)
    assert (len(train), len(held_out)) == (7473, 1319)  # the sizes of Cobbe et al., 2021, Section 2
    assert all(is_correct(problem.answer, problem, config) for problem in train + held_out)
    assert not any("<<" in problem.answer for problem in train + held_out)


def test_the_reference_is_what_follows_the_last_mark():
    assert Problem("q", "#### is a mark\n#### 1,234 ").final == "1,234"


class LetterTokenizer:
    chat_template = None

    def encode(self, text):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return self.encode(
            "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"
        )


def test_a_prompt_is_the_template_around_the_question():
    problem = Problem("What is {x}?", "#### 1")
    ids = render_prompt(problem, DataConfig(), LetterTokenizer())
    assert "".join(map(chr, ids)) == "Question: What is {x}?\nAnswer:"


def test_a_chat_prompt_goes_through_the_tokenizers_own_template():
    tokenizer = LetterTokenizer()
    config = DataConfig(chat_template=True, prompt_template="{question} Think.")
    with pytest.raises(ValueError, match="chat_template = true.*has none"):
        render_prompt(Problem("Why?", "#### 1"), config, tokenizer)
    tokenizer.chat_template = "there is one"
    ids = render_prompt(Problem("Why?", "#### 1"), config, tokenizer)
    assert "".join(map(chr, ids)) == "<user>Why? Think.<assistant>"


@pytest.mark.parametrize(("n", "batch"), [(12, 4), (10, 4), (7, 16), (5, 5), (1, 3)])
def test_each_epoch_asks_every_problem_exactly_once(n, batch):
    stream = [i for step in range(6 * n) for i in prompt_batches(n, batch, 0, step)]
    for epoch in range(6):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_a_batch_depends_on_seed_and_step_alone():
    late = prompt_batches(100, 8, 5, 40)
    assert [prompt_batches(100, 8, 5, step) for step in range(50)][40] == late
    assert prompt_batches(100, 8, 6, 40) != late
    assert prompt_batches(100, 100, 5, 0) != prompt_batches(100, 100, 5, 1)


def test_the_hub_without_its_library_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install .prime-composer\[hub\]"):
        load_problems(DataConfig(source="hub"))


def test_hub_splits_become_problems(monkeypatch):
    from types import SimpleNamespace

    asked = []
    rows = {
        "train": [{"question": "a", "answer": "#### 1"}],
        "test": [{"question": "b", "answer": "#### 2"}],
    }
    library = SimpleNamespace(load_dataset=lambda *names: asked.append(names) or rows)
    monkeypatch.setitem(__import__("sys").modules, "datasets", library)
    train, held_out = load_problems(DataConfig(source="hub"))
    assert asked == [("openai/gsm8k", "main")]
    assert (train, held_out) == ([Problem("a", "#### 1")], [Problem("b", "#### 2")])
    rows["test"] = [{"question": "b", "answer": "two"}]
    with pytest.raises(ValueError, match="openai/gsm8k, split test, row 1: .*####"):
        load_problems(DataConfig(source="hub"))


# ------------------------------------------------------------------------------------------------- several environments


def test_environments_share_out_a_step_by_their_ratios_and_walk_through_their_own_problems():
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
        mine = [i for i in flat if owner[i] == environment]
        assert len(mine) / len(flat) == pytest.approx(ratio / sum(ratios), abs=0.005)
        # Every problem once before any comes again.
        size = sizes[environment]
        assert all(
            len(set(mine[at : at + size])) == size for at in range(0, len(mine) - size + 1, size)
        )
    assert environment_batches(sizes, ratios, batch, 3, 5) == asked[5]
    assert environment_batches(sizes, ratios, batch, 4, 5) != asked[5]


def test_a_single_environment_is_asked_as_ever():
    assert environment_batches((40,), (2.0,), 8, 1, 7) == prompt_batches(40, 8, 1, 7)


def test_operations_choose_the_templates():
    for operations in ((1,), (2, 3)):
        for problem in generate_problems(60, 0, operations):
            assert problem.answer.count(" = ") in operations


def test_environments_are_loaded_one_after_the_other_and_held_out_in_turn():
    sources = {"a": DataConfig(size=40, operations=(1,)), "b": DataConfig(size=20, operations=(2,))}
    problems = load_problem_set(sources)
    assert [p.environment for p in problems.practice] == ["a"] * 36 + ["b"] * 18
    assert [p.environment for p in problems.held_out] == ["a", "b", "a", "b", "a", "a"]
    assert problems.config_of(problems.held_out[1]) is sources["b"]


def test_what_one_environment_trains_on_no_other_one_may_hold_out():
    sources = {"a": DataConfig(size=40), "b": DataConfig(size=40, hold_out=0.5)}
    said = r"environments.a trains on what environments.b holds out: .* both trained on and held out.* need `operations`"
    with pytest.raises(ValueError, match=said):
        load_problem_set(sources)


def test_a_teacher_key_that_no_row_has_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question": f"{i}?", "answer": f"#### {i}", "by": "x"}) for i in range(20)
        )
    )
    train, _ = load_problems(DataConfig(source="jsonl", path=path, teacher_key="by"))
    assert {problem.teacher for problem in train} == {"x"}
    with pytest.raises(
        ValueError, match="no row to train on has the key 'bye'; correct teacher_key"
    ):
        load_problems(DataConfig(source="jsonl", path=path, teacher_key="bye"))


def test_a_row_may_name_its_teacher(tmp_path):
    rows = [
        {"question": "a?", "answer": "#### 1", "by": "x"},
        {"question": "b?", "answer": "#### 2"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [p.teacher for p in read_jsonl(path, "by")] == ["x", None]
    assert [p.teacher for p in read_jsonl(path)] == [None, None]
    path.write_text(json.dumps({**rows[0], "by": 3}))
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: \"by\" must be the name of a teacher, found int"
    ):
        read_jsonl(path, "by")
