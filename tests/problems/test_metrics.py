"""Metrics of the field: values of the libraries' own tests, and values counted by hand."""

import importlib.metadata
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_composer.problems import metrics
from prime_composer.problems.config import GRADED, DataConfig, Problem
from prime_composer.problems.loading import load_problem_set, load_problems
from prime_composer.problems.metrics import (
    require_library,
    reward,
    sentence_score,
    signature,
    signatures_of,
    total_score,
)

pytest.importorskip("rouge_score", reason="rouge-score is not installed (extra: metrics)")
pytest.importorskip("sacrebleu", reason="sacrebleu is not installed (extra: metrics)")

CLOSE = {"rel": 1e-9, "abs": 1e-12}


@pytest.mark.parametrize(
    ("metric", "text", "reference", "value"),
    [
        # rouge-score's own tests (rouge_scorer_test.py): "testing one two" against these.
        ("rouge2", "testing one", "testing one two", 2 / 3),
        ("rougeL", "testing two", "testing one two", 4 / 5),
        # Of 4 and of 5 pairs of words, 3 agree: 2 * 3 / (4 + 5).
        ("rouge2", "the cat sat on mat", "the cat sat on the mat", 6 / 9),
        # Case and punctuation do not count. Without the stemmer "cats" is not "cat".
        ("rouge2", "The CAT, sat!", "the cat sat", 1.0),
        ("rougeL", "cats", "cat", 0.0),
        ("rouge2", "", "the cat sat", 0.0),
        ("bleu", "", "a b c", 0.0),
        # sacrebleu's own tests (test_chrf.py) for single pairs.
        ("chrf", "eine Mauer zu errichten", "eine Mauer zu errichten", 1.0),
        # By hand: letters 3 of 4, 3 of 3; pairs 2 of 3, 2 of 2; triples 1 of 2, 1 of 1; the
        # reference has no group of four, so orders are 1 to 3. F2 of P = 23/36 and R = 1.
        ("chrf", "abcd", "abc", 5 * (23 / 36) / (4 * 23 / 36 + 1)),
    ],
)
def test_rouge_and_chrf_are_f_measures(
    metric: str, text: str, reference: str, value: float
) -> None:
    """F = 2 PR / (P + R), of pairs of words or of the longest common subsequence.

    chrF is the F2 of groups of up to six letters without white space.
    """
    assert sentence_score(metric, text, reference) == pytest.approx(value, **CLOSE)


def bleu_by_hand(matches: list[tuple[int, int]], length: int, reference: int) -> float:
    """Return exp(mean log precision), with sacrebleu's smoothing: no match counts 1/2, then 1/4."""
    smoothed, penalty = [], 1.0
    for matched, total in matches:
        penalty *= 2.0 if matched == 0 else 1.0
        smoothed.append((matched or 1 / penalty) / total)
    brevity = 1.0 if length >= reference else math.exp(1 - reference / length)
    return brevity * math.exp(sum(map(math.log, smoothed)) / len(smoothed))


@pytest.mark.parametrize(
    ("text", "reference", "matches", "lengths"),
    [
        # 5 words; pairs the-cat, cat-sat, sat-on; triples 2; the first four.
        ("the cat sat on mat", "the cat sat on the mat", [(5, 5), (3, 4), (2, 3), (1, 2)], (5, 6)),
        # A full stop is a token of tok:13a, and case counts.
        ("The cat sat.", "the cat sat.", [(3, 4), (2, 3), (1, 2), (0, 1)], (4, 4)),
        # Effective order: an answer of two words has no triples.
        ("the cat", "the cat sat", [(2, 2), (1, 1)], (2, 3)),
    ],
)
def test_sentence_bleu_is_that_of_the_formula(
    text: str, reference: str, matches: list[tuple[int, int]], lengths: tuple[int, int]
) -> None:
    """Clipped n-gram precisions up to 4, smoothed, and the brevity penalty."""
    value = bleu_by_hand(matches, *lengths)
    assert sentence_score("bleu", text, reference) == pytest.approx(value, **CLOSE)


def test_total_bleu_is_over_the_corpus() -> None:
    """n-grams are added up over all answers before they are divided: no mean of sentences."""
    texts = ["the cat sat on mat", "a big dog"]
    references = ["the cat sat on the mat", "the small dog"]
    rewards = [sentence_score("bleu", *pair) for pair in zip(texts, references, strict=True)]
    value = bleu_by_hand([(6, 8), (3, 6), (2, 4), (1, 2)], 8, 9)
    assert total_score("bleu", texts, references, rewards) == pytest.approx(value, **CLOSE)
    assert abs(value - sum(rewards) / 2) > 0.05


def test_reward_exact_is_one_or_zero() -> None:
    """White space around the text is not the answer; ``####`` means nothing to it."""
    config, problem = DataConfig(metric="exact"), Problem("q", "#### a heading")
    assert reward(" #### a heading\n", problem, config) == 1.0
    assert reward("a heading", problem, config) == 0.0


def test_reward_graded_compares_with_the_whole_answer() -> None:
    """Only the math metrics cut the reference at ``####``."""
    problem = Problem("q", "one two #### three four")
    assert reward("one two three four", problem, DataConfig(metric="rougeL")) == 1.0
    assert problem.reference("gsm8k") == "three four"


def test_signature_is_that_of_the_library() -> None:
    """sacrebleu's own string; one like it for rouge-score."""
    import sacrebleu

    assert signature("bleu") == (
        f"BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert signature("chrf") == (
        f"chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}"
    )
    installed = importlib.metadata.version("rouge-score")
    assert signature("rouge2") == f"rouge2|fmeasure|stemmer:no|version:rouge-score-{installed}"
    assert signature("gsm8k") is signature("exact") is None
    sources = [DataConfig(), DataConfig(metric="rougeL"), DataConfig(metric="exact")]
    assert signatures_of(sources) == {"rougeL": signature("rougeL")}


@pytest.mark.parametrize("metric", [*GRADED, "math_verify"])
def test_metric_without_its_library_has_the_pip_line(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is named; a metric of our own needs none."""
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    pip = r"pip install -e '.+\[metrics\]'"
    with pytest.raises(ValueError, match=rf'\[data\] metric = "{metric}" needs .*: {pip}'):
        require_library(metric)
    require_library("exact")


def test_metric_that_gives_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is no reward, for one answer or for all."""
    nan = SimpleNamespace(score=math.nan)
    broken = SimpleNamespace(sentence_score=lambda *_: nan, corpus_score=lambda *_: nan)
    monkeypatch.setattr(metrics, "_sacrebleu", lambda metric, of_sentences: broken)
    with pytest.raises(ValueError, match=r'\[data\] metric = "bleu" gave nan for \'odd\''):
        sentence_score("bleu", "odd", "b")
    with pytest.raises(ValueError, match=r'metric = "chrf" gave nan for \'2 answers\''):
        total_score("chrf", ["a", "b"], ["a", "b"], [1.0, 1.0])


# Columns and rows ---------------------------------------------------------------------------------

XSUM = [
    {"document": f"A council in town {i} has met today. It was long.",
     "summary": f"Council {i} met.", "id": str(i)} for i in range(30)
]  # fmt: skip
WMT = [{"translation": {"de": f"Guten Tag {i}.", "en": f"Good day {i}."}} for i in range(30)]
FLAN = [
    {"inputs": f"Is {i} even?\n\nOPTIONS:\n- yes\n- no", "targets": "no" if i % 2 else "yes",
     "task": "t"} for i in range(30)
]  # fmt: skip
"""Rows of the form of EdinburghNLP/xsum, wmt/wmt14 and a FLAN export; the texts are made up."""

FORMS = {
    "xsum": (XSUM, {"prompt_key": "document", "answer_key": "summary", "metric": "rouge2",
                    "prompt_template": "summarize: {question}\nsummary:"}),
    "wmt": (WMT, {"prompt_key": "translation.en", "answer_key": "translation.de", "metric": "bleu",
                  "prompt_template": "translate English to German: {question}\nGerman:"}),
    "flan": (FLAN, {"prompt_key": "inputs", "answer_key": "targets", "metric": "exact",
                    "prompt_template": "{question}\n"}),
}  # fmt: skip


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_the_papers_tasks_are_read_by_their_columns(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XSum, WMT14 and FLAN: all rows of a JSONL file, and the first ones of a hub data set."""
    rows, settings = FORMS[form]
    path = written(tmp_path / "rows.jsonl", rows)
    train, held_out = load_problems(DataConfig(source="jsonl", path=path, **settings))
    assert (len(train), len(held_out)) == (27, 3)
    expected = {
        "xsum": [(row["document"], row["summary"]) for row in XSUM],
        "wmt": [(f"Good day {i}.", f"Guten Tag {i}.") for i in range(30)],
        "flan": [(row["inputs"], row["targets"]) for row in FLAN],
    }[form]
    pairs = {(problem.question, problem.answer) for problem in train + held_out}
    assert pairs == {*expected}
    splits = {"train": rows[:20], "test": rows[20:]}
    library = SimpleNamespace(load_dataset=lambda *names: splits if names == ("a/b", "c") else {})
    monkeypatch.setitem(sys.modules, "datasets", library)
    parts = load_problems(DataConfig(source="hub", hub_id="a/b", hub_name="c", limit=4, **settings))
    found = [[(problem.question, problem.answer) for problem in part] for part in parts]
    assert found == [expected[:4], expected[20:24]]


def test_clean_leaves_out_and_counts(tmp_path: Path) -> None:
    """Empty texts, references that the metric cannot use, and training rows that are held out."""
    good = [{"question": f"question {i}", "answer": f"answer {i}"} for i in range(8)]
    bad = [{"question": "", "answer": "a b"}, {"question": "q", "answer": "one"}]
    written(tmp_path / "train.jsonl", [*good[:6], *bad])
    written(tmp_path / "test.jsonl", [*good[5:], bad[0]])
    table = {"source": "jsonl", "path": tmp_path, "metric": "rouge2"}
    with pytest.raises(ValueError, match=r"train\.jsonl:7: .* is empty"):
        load_problems(DataConfig(**table))
    problems = load_problem_set({"news": DataConfig(clean=True, **table)})
    assert (len(problems.practice), len(problems.held_out)) == (5, 3)
    assert problems.left_out == {"news": 4}
    malformed = [*good, {"question": "q"}]
    written(tmp_path / "train.jsonl", malformed)
    with pytest.raises(ValueError, match=r'train\.jsonl:9: "answer" is missing'):
        load_problems(DataConfig(clean=True, **table))


def test_limit_and_prompt_chars_cut_rows_and_texts(tmp_path: Path) -> None:
    """The first rows, empty lines not counted, and the first characters of each prompt."""
    path = tmp_path / "rows.jsonl"
    written(path, [{"question": f"{i:03} and more", "answer": "#### 1"} for i in range(30)])
    path.write_text("\n\n" + path.read_text() + "\nnot JSON\n")
    config = DataConfig(source="jsonl", path=path, limit=10, prompt_chars=4)
    train, held_out = load_problems(config)
    assert {problem.question for problem in train + held_out} == {f"{i:03}" for i in range(10)}


def test_annotations_are_kept_outside_of_math(tmp_path: Path) -> None:
    """``<<...>>`` is GSM8K's calculator; in another text it is text."""
    rows = [{"question": f"question {i}", "answer": "use <<b>> here #### 5"} for i in range(20)]
    path = written(tmp_path / "rows.jsonl", rows)
    for metric, answer in (("exact", "use <<b>> here #### 5"), ("gsm8k", "use  here #### 5")):
        train, _ = load_problems(DataConfig(source="jsonl", path=path, metric=metric))
        assert train[0].answer == answer
