"""Facts about invented people: distinct questions, names that stay apart, how answers are read."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from prime_composer.problems.answers import check_reference, is_correct
from prime_composer.problems.config import DataConfig, Problem, Topic
from prime_composer.problems.generated_facts import CAPITALS, CASTS, TOPICS, generate_facts
from prime_composer.problems.loading import load_problems

IN_PROMPT: tuple[Topic, ...] = ("ages", "towns", "jobs", "copies")


def facts(**settings: Any) -> DataConfig:
    return DataConfig.model_validate({"kind": "facts", "metric": "short_answer"} | settings)


def answered(text: str, reference: str) -> bool:
    return is_correct(text, Problem("?", reference), facts())


@pytest.mark.parametrize("topic", IN_PROMPT)
def test_facts_are_thousands_of_distinct_questions(topic: Topic) -> None:
    """The answer of each stands in its question, as a word of its own."""
    assert set(TOPICS) == set(get_args(Topic))
    train, held_out = load_problems(facts(topics=[topic], size=2000))
    problems = train + held_out
    assert (len(train), len(held_out)) == (1800, 200)
    assert len({problem.question for problem in problems}) == 2000
    for problem in problems:
        assert re.search(rf"\b{re.escape(problem.answer)}(?!\w)", problem.question)
        check_reference(problem.answer, "short_answer")


def test_question_asks_for_the_person_of_its_fact() -> None:
    """Age, town and job of a question are those that its sentences give to the name it asks for."""
    patterns = {
        "ages": r"(?:is|and is) (\d+) years old",
        "towns": r"lives in (\w+)",
        "jobs": r"works as a (\w+)",
    }
    for topic, pattern in patterns.items():
        for problem in generate_facts(200, 1, [topic], held_out=False):  # type: ignore[list-item]
            *facts_told, question = re.split(r"(?<=\.) ", problem.question)
            names = {" ".join(fact.split()[:2]) for fact in facts_told}
            assert len(names) == 1 and names.pop() in question
            assert re.findall(pattern, " ".join(facts_told)) == [problem.answer]


def words_of(problems: list[Problem]) -> set[str]:
    return {word for problem in problems for word in re.findall(r"\w+", problem.question)}


def test_held_out_names_never_occur_in_training() -> None:
    """Neither does a town or a job, whatever topics, seeds and shares the two sides have."""
    train, _ = load_problems(facts(topics=IN_PROMPT, size=8000, hold_out=0.5))
    apart = [load_problems(facts(topics=[t], use="eval", seed=7))[1] for t in IN_PROMPT]
    held_out = [problem for problems in apart for problem in problems]
    _, of_the_same = load_problems(facts(topics=IN_PROMPT, size=8000, hold_out=0.5))
    shared = words_of(train) & words_of([*held_out, *of_the_same])
    names = {word for cast in CASTS.values() for part in cast for word in part}
    assert not shared & names
    assert names <= words_of(train) | words_of(held_out)
    for one, other in zip(CASTS[True], CASTS[False], strict=True):
        assert len(one) == len(set(one)) and not set(one) & set(other)


def test_facts_are_drawn_from_their_seed() -> None:
    # Written down once: another Python, or another order of names, would show.
    first = generate_facts(2, 0, ["ages", "jobs"], held_out=True)
    assert [problem.answer for problem in first] == ["31", "surgeon"]


def test_capitals_are_a_task_for_evaluation_alone() -> None:
    """No prompt contains one, and there is one question per country."""
    train, held_out = load_problems(facts(topics=["capitals"], use="eval", size=80))
    assert train == [] and len(held_out) == 80
    assert "What is the capital of France?" in {problem.question for problem in held_out}
    for problem in held_out:
        assert not answered(problem.question, problem.answer)
    with pytest.raises(ValueError, match=f"only {len(CAPITALS)} distinct questions were drawn"):
        load_problems(facts(topics=["capitals"], use="eval", size=200))


CASES = {
    # (reference, answer): whether it is right. Written by hand.
    ("57", "57"): True,
    ("57", "Mary is 57 years old."): True,
    ("57", "Mary is a 57-year-old baker."): True,
    ("57", "57.0"): True,
    ("57", "57 or 58"): False,
    ("57", "57,58"): False,
    ("57", "Mary is 57 years old and was born in 1968."): False,
    ("57", "157"): False,
    ("57", "57.5"): False,
    ("57", "-57"): False,
    ("57", "fifty-seven"): False,
    ("57", "Your appearance is a gift."): False,
    ("57", "Mary is not 57."): False,
    ("1", "1/2"): False,
    ("5", ".5"): False,
    ("1234", "1,234 people"): True,
    ("5", "5²"): False,
    ("Arveldale", "ARVELDALE!"): True,
    ("Arveldale", "Mary, 57, lives in Arveldale."): True,
    ("Arveldale", "Arveldales"): False,
    ("Arveldale", "In Arveldale or Bremerford."): False,
    ("Arveldale", "She does not live in Arveldale."): False,
    ("Bogotá", "The capital of Colombia is Bogota."): True,
    ("Buenos Aires", "Buenos Aires, Argentina."): True,
    ("Buenos Aires", "Aires Buenos"): False,
    ("the baker", "A baker."): True,
    ("Trick or Treat", "It is called 'Trick or Treat'."): True,
}


@pytest.mark.parametrize(("case", "right"), CASES.items())
def test_short_answer_is_read_from_a_sentence(case: tuple[str, str], right: bool) -> None:
    reference, text = case
    assert answered(text, reference) is right


def test_reference_without_a_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Which?", "answer": "The!"}\n')
    with pytest.raises(ValueError, match='rows.jsonl:1: "answer" has no word or number'):
        load_problems(DataConfig(source="jsonl", path=path, metric="short_answer"))


def rows(path: Path, count: int, word: str) -> None:
    lines = [f'{{"question": "{word} {i}?", "answer": "#### {i}"}}\n' for i in range(count)]
    path.write_text("".join(lines))


def test_use_reads_one_side_of_a_source(tmp_path: Path) -> None:
    """A file is trained on or evaluated as a whole, and a folder needs one of its two files."""
    rows(tmp_path / "test.jsonl", 5, "Test")
    folder = DataConfig(source="jsonl", path=tmp_path, use="eval")
    assert tuple(map(len, load_problems(folder))) == (0, 5)
    with pytest.raises(ValueError, match="no file to train on"):
        load_problems(folder.model_copy(update={"use": "train"}))
    for use, sizes in (("train", (5, 0)), ("eval", (0, 5)), ("both", (4, 1))):
        one = DataConfig.model_validate(
            {"source": "jsonl", "path": tmp_path / "test.jsonl", "use": use}
        )
        assert tuple(map(len, load_problems(one))) == sizes
    assert tuple(map(len, load_problems(DataConfig(size=40, use="train")))) == (40, 0)
