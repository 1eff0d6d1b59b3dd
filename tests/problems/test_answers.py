"""What the answer checkers read, case by case; the table of recipes/grading.md is a part of it.

The cases are those of a campaign of 76 written answers. Every expected value is written by hand.
"""

import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_composer.problems import math_verifier
from prime_composer.problems.answers import check_reference, is_correct
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.files import read_file
from prime_composer.problems.loading import load_problems
from prime_composer.problems.math_verifier import MathVerifier, TimeBudget

BY_NUMBER = DataConfig()
BY_LIBRARY = DataConfig(metric="math_verify")
BIG = "1234567890123456789012345678901"


def problem_with(final: str) -> Problem:
    return Problem("How many?", f"It is so.\n#### {final}")


CASES = {
    # (reference, what follows "#### "): whether it is correct.
    # Digits that are a part of something else were read as a prefix.
    ("1", "1/2"): False,
    ("5", "5-3"): False,
    ("5", "5*3=15"): False,
    ("5", "5 or 6"): False,
    ("5", "5, 6"): False,
    ("5", "5 to 6"): False,
    ("18", "18 17 16 15"): False,
    ("1.5", "1.5.2"): False,
    ("10", "10:30"): False,
    ("2", "2 1/2"): False,
    ("3", "3x"): False,
    ("3", "3 x 10^2"): False,
    ("1", "1e3"): False,
    ("10", "10²"): False,
    ("1", "1 000"): False,
    # Commas that separate no thousands.
    ("12", "1,2"): False,
    ("12", "1,,2"): False,
    ("1234", "12,34"): False,
    ("314", "3,14"): False,
    ("1234567", "1,234,567"): True,
    ("1234567", "12,34,567"): True,
    ("1234.5", "1,234.50"): True,
    # Numbers are compared exactly, whatever their length.
    (BIG + "1", BIG + "2"): False,
    ("-" + BIG + "1", "-" + BIG + "1"): True,
    ("0.1", "0.10000000000000000000000001"): False,
    ("18", "18.00"): True,
    # What does not change the number may stand around it.
    ("5", "£5"): True,
    ("5", r"\$5"): True,
    ("5", "+5"): True,
    ("-5", "−5"): True,
    ("-5", "-$5"): True,
    ("5", "--5"): False,
    ("5", "５"): True,
    ("18", "$18.00"): True,
    ("0.5", ".5"): True,
    ("1,080", "1080"): True,
    ("18", "-18"): False,
    ("18", ""): False,
    ("5", "5 apples"): True,
    ("5", "5km"): True,
    ("5", "5 - the total"): True,
    ("5", "5\nQuestion: 7 apples"): True,
    # A unit of one letter is a unit, and a letter of an unknown is a part of a formula.
    ("5", "5m"): True,
    ("5", "5m/s"): True,
    ("25", "25m^2"): True,
    ("5", "5m = 500cm"): True,
    ("3", "3y"): False,
    ("3", "3a+2"): False,
    ("5", "5m - 3"): False,
    ("5", "5h30m"): False,
    # What equals the number does not change it.
    ("18", "18 = 9*2"): True,
    ("18", "18=9*2"): True,
    ("2", "18 = 9*2"): False,
    ("9", "9*2 = 18"): False,
    # The rule of the field, where a person might decide otherwise.
    ("5", "5k"): True,
    ("50", "50%"): True,
    ("5", "**5**"): False,
    ("5", r"\boxed{5}"): False,
    ("5", "\n5"): False,
    ("5", "x = 5"): False,
    ("-5", "(5)"): False,
    ("5", "5\n#### 6"): True,
    ("6", "?\n#### 6"): True,
    ("6", "1/2\n#### 6"): False,
}


@pytest.mark.parametrize(("reference", "written"), CASES, ids=range(len(CASES)))
def test_gsm8k_reads_one_number_after_the_mark(reference: str, written: str) -> None:
    """The first ####, one number; a part of another expression is none."""
    correct = is_correct(f"So.\n#### {written}", problem_with(reference), BY_NUMBER)
    assert correct is CASES[reference, written]


@pytest.mark.parametrize("text", ["5", "The answer is 5.", "### 5", r"\boxed{5}", "", "####5"])
def test_gsm8k_without_the_mark_reads_nothing(text: str) -> None:
    """The space after the mark may be missing."""
    assert is_correct(text, problem_with("5"), BY_NUMBER) is (text == "####5")


MISREAD = ["1/2", "50%", "50 %", r"50\%", "3 x 10^2", r"3 \times 10^2", "2 1/2", "3,14", "10:30",
           "5 or 6", "1e3", "3x", "5 million", "5k", "5M", "many", ""]  # fmt: skip


@pytest.mark.parametrize("reference", MISREAD)
def test_reference_that_would_be_misread_is_refused(reference: str, tmp_path: Path) -> None:
    """It is refused with file and line when the data is loaded."""
    path = tmp_path / "train.jsonl"
    escaped = reference.replace("\\", "\\\\")
    path.write_text(
        f'{{"question": "a", "answer": "#### 5"}}\n{{"question": "q", "answer": "#### {escaped}"}}'
    )
    with pytest.raises(ValueError, match=r"train\.jsonl:2: .* is not a number: .*math_verify"):
        read_file(path)


@pytest.mark.parametrize(
    "reference",
    ["5", "-5", "1,234.50", "$5", "5 apples", "5.", " 5", "-$3", "5m", "3L", "18 = 9*2"],
)
def test_reference_that_is_a_number_is_accepted(reference: str) -> None:
    """What the checker reads as a person does loads."""
    check_reference(f"It is so.\n#### {reference}", "gsm8k")


@pytest.mark.parametrize("reference", ["50%", r"$\sqrt{2}$"])
def test_reference_of_math_verify_may_be_a_formula(reference: str) -> None:
    """That library reads formulas, so no reference is refused, nor one without the mark."""
    check_reference(f"It is so.\n#### {reference}", "math_verify")
    check_reference(reference, "math_verify")


LIBRARY_CASES = {
    ("6", "#### 5\n#### 6"): True,
    ("5", "### 5"): True,
    ("5", "The answer is 5."): True,
    ("1,080", "The answer is 1,080."): True,
    ("18", r"$\boxed{19}$"): False,
    ("5", "I cannot tell."): False,
    ("5", "\ud800 5"): True,
    # References that are bare formulas are read whole.
    (r"\frac{1}{2}", r"\boxed{0.5}"): True,
    ("x^2", "$x^3$"): False,
    ("(1,2)", "$(2,1)$"): False,
    (r"2\sqrt{3}", r"$2\sqrt{3}$"): True,
    ("10^{-3}", "0.001"): True,
    ("3 x 10^2", "100"): False,
    (r"\$5", "5"): True,
    ("x = 5", "5"): True,
    # With words, or as plain digits, they are text.
    ("5 apples", "5"): True,
    ("1/3 cup", "1/3"): True,
    ("1 000", "1000"): True,
    (r"$\frac{1}{2}$ cup", "0.5"): True,
    # What it pays, and a person would not.
    ("10", "#### 10:30"): True,
    # What it does not read, and a person would.
    ("5", "####5"): False,
    ("5", "#### +5"): False,
}
"""As Math-Verify 0.9 reads them: the last number wins, and a formula counts as its value."""


WITHOUT_MARK = {
    ("50", "#### 50"): True,
    ("50", "51"): False,
    (r"Half of $x = 8$ is $y = \boxed{4}$.", "It is 4."): True,
    (r"Half of $x = 8$ is $y = \boxed{4}$.", "It is 8."): False,
    ("He has 2 + 3 = 5 apples.", "#### 5"): True,
}
"""Answers of the data without ####: as data sets of MATH's kind have them."""


@pytest.mark.parametrize(("answer", "text"), WITHOUT_MARK)
def test_math_verify_takes_a_reference_without_a_mark(
    answer: str, text: str, tmp_path: Path
) -> None:
    """The whole answer is the reference, from the file to the verdict."""
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": answer}))
    (problem,) = read_file(path, BY_LIBRARY)
    assert is_correct(text, problem, BY_LIBRARY) is WITHOUT_MARK[answer, text]


@pytest.mark.parametrize(("reference", "text"), LIBRARY_CASES, ids=range(len(LIBRARY_CASES)))
def test_math_verify_reads_the_last_answer(reference: str, text: str) -> None:
    """The library's reading, where it differs from the rule by ####."""
    correct = is_correct(text, problem_with(reference), BY_LIBRARY)
    assert correct is LIBRARY_CASES[reference, text]


ENDLESS = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10000000!}"]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verifier, "SECONDS_PER_ANSWER", 0.6)
    monkeypatch.setattr(math_verifier, "SECONDS_WHEN_SPENT", 0.4)


def cpu_of_ended_workers() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_endless_answer_is_wrong_in_time(short_limits: None, capfd: Any) -> None:
    """In any thread it costs its limit, is wrong and counted, and the next answer is checked by the
    same worker, whose library is imported."""
    assert is_correct("5", problem_with("5"), BY_LIBRARY)
    worker = math_verifier.VERIFIER._process
    budget, verdicts = TimeBudget(), []

    def work(endless: str) -> None:
        for text in (endless, r"\boxed{5}"):
            verdicts.append(is_correct(text, problem_with("5"), BY_LIBRARY, budget))

    before = cpu_of_ended_workers()
    work(ENDLESS[0])
    thread = threading.Thread(target=work, args=(ENDLESS[1],))
    thread.start()
    thread.join()
    assert verdicts == [False, True] * 2
    assert budget.timeouts == 2 and budget.spent == pytest.approx(0.6 + 0.6)
    assert math_verifier.VERIFIER._process is worker
    # Each costs its limit, whatever else the machine has to do; and one start, of the worker.
    math_verifier.VERIFIER.close()
    assert 2 * 0.6 <= cpu_of_ended_workers() - before < 10
    assert capfd.readouterr() == ("", "")


def test_budget_spent_shortens_the_rest_of_the_step(short_limits: None) -> None:
    """Of many endless answers the first ones use the budget up, and the others get less time."""
    budget = TimeBudget(seconds=0.6)
    limits = []
    for _ in range(3):
        limits.append(budget.per_answer)
        assert not is_correct(ENDLESS[0], problem_with("5"), BY_LIBRARY, budget)
    assert limits == [0.6, 0.4, 0.4]
    assert is_correct("5", problem_with("5"), BY_LIBRARY, budget)
    assert budget.timeouts == 3 and budget.per_answer == 0.4


@pytest.fixture
def idle_verifier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MathVerifier]:
    """A verifier whose library takes 0.5 seconds without CPU time, as on a busy machine."""
    (tmp_path / "math_verify.py").write_text(
        "import time\n"
        "def parse(text, parsing_timeout): return text\n"
        "def verify(gold, answer, timeout_seconds): time.sleep(0.5); return gold == answer\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(math_verifier, "SECONDS_PER_ANSWER", 0.2)
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def test_answer_on_a_busy_machine_gets_its_verdict(idle_verifier: MathVerifier) -> None:
    """The limit is CPU time: the load of the machine makes no right answer wrong."""
    budget = TimeBudget()
    assert idle_verifier.verify("5", "5", budget)
    assert (budget.timeouts, budget.spent) == (0, 0.0)


def test_answer_without_cpu_time_ends_by_the_clock(
    idle_verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that sleeps is ended too. It costs the budget its limit of CPU time."""
    monkeypatch.setattr(math_verifier, "WALL_SECONDS", 0.3)
    budget = TimeBudget()
    assert not idle_verifier.verify("5", "5", budget)
    assert (budget.timeouts, budget.spent) == (1, 0.2)


def test_worker_that_was_killed_is_started_again(idle_verifier: MathVerifier) -> None:
    """As by the kernel when memory is short. The answer that it had counts as a time-out."""
    verifier, budget = idle_verifier, TimeBudget()
    assert verifier.verify("5", "5", budget)
    process = verifier._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    verdicts = [verifier.verify("5", "5", budget) for _ in range(2)]
    assert verdicts[1] and budget.timeouts == (0 if verdicts[0] else 1)


def test_math_verify_broken_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that cannot import the library says the reason."""
    worker = tmp_path / "worker.py"
    worker.write_text("print('\"ImportError: no sympy\"')")
    monkeypatch.setattr(math_verifier, "WORKER", worker)
    with pytest.raises(ValueError, match=r"does not start .*ImportError: no sympy.* pip install"):
        MathVerifier().verify("5", "5", TimeBudget())


@pytest.mark.skipif(
    "PRIME_COMPOSER_GSM8K" not in os.environ,
    reason="PRIME_COMPOSER_GSM8K does not name GSM8K's folder",
)
def test_gsm8k_grades_its_own_solutions_as_ever() -> None:
    """Every solution of GSM8K is right, and with its reference changed by 1 it is wrong."""
    config = DataConfig(source="jsonl", path=Path(os.environ["PRIME_COMPOSER_GSM8K"]))
    problems = [problem for part in load_problems(config) for problem in part]
    assert len(problems) == 7473 + 1319
    for problem in problems:
        other = Problem("q", f"#### {int(problem.final.replace(',', '')) + 1}")
        assert is_correct(problem.answer, problem, config)
        assert not is_correct(problem.answer, other, config)
        assert "<<" not in problem.answer
