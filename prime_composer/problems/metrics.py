"""Grade answers by the metrics of the field: the reward of one, the value of many, a signature.

All values are shares of 1: a BLEU of 27.3 is 0.273.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from prime_composer.extras import pip_install
from prime_composer.problems.answers import is_correct
from prime_composer.problems.config import GRADED, DataConfig, Problem
from prime_composer.problems.math_verifier import TimeBudget

LIBRARIES = {
    "math_verify": "math_verify",
    **dict.fromkeys(("rouge2", "rougeL"), "rouge_score"),
    **dict.fromkeys(("bleu", "chrf"), "sacrebleu"),
}
"""Metric -> the module that computes it."""

TITLES = {
    "accuracy": "accuracy",
    **{"rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "bleu": "BLEU", "chrf": "chrF"},
}
"""Score in ``metrics.jsonl`` -> its name for people."""


def reward(
    text: str, problem: Problem, config: DataConfig, budget: TimeBudget | None = None
) -> float:
    """Return the reward of an answer, in [0, 1]; 0 or 1 where it is right or wrong."""
    if not config.scored:
        return 0.0
    if config.graded:
        return sentence_score(config.metric, text, problem.reference(config.metric))
    return float(is_correct(text, problem, config, budget))


def sentence_score(metric: str, text: str, reference: str) -> float:
    """Return a graded metric of one answer.

    ROUGE is the F-measure. Sentence BLEU is sacrebleu's: exponential smoothing and effective order.
    """
    if LIBRARIES[metric] == "rouge_score":
        return _share(_rouge(metric).score(reference, text)[metric].fmeasure, metric, text)
    scorer = _sacrebleu(metric, of_sentences=True)
    return _share(scorer.sentence_score(text, [reference]).score / 100, metric, text)


def total_score(
    metric: str, texts: Sequence[str], references: Sequence[str], rewards: Sequence[float]
) -> float:
    """Return the metric over all answers, at least one.

    That of BLEU and chrF is one number over the whole corpus. The others are means of the rewards.
    """
    if LIBRARIES.get(metric) != "sacrebleu":
        return sum(rewards) / len(rewards)
    scorer = _sacrebleu(metric, of_sentences=False)
    score = scorer.corpus_score(list(texts), [list(references)]).score
    return _share(score / 100, metric, f"{len(texts)} answers")


def signature(metric: str) -> str | None:
    """Return what a number of a graded metric has to be published with, None for another metric."""
    if metric not in GRADED:
        return None
    if LIBRARIES[metric] == "rouge_score":
        require_library(metric)
        return f"{metric}|fmeasure|stemmer:no|version:rouge-score-{version('rouge-score')}"
    scorer = _sacrebleu(metric, of_sentences=False)
    # The signature counts the references of the latest answers.
    name = scorer.corpus_score(["a"], [["a"]]).name
    return f"{name}|{scorer.get_signature()}"


def signatures_of(sources: Iterable[DataConfig]) -> dict[str, str]:
    """Return the signature of each graded metric of a recipe's environments."""
    named = {config.metric: signature(config.metric) for config in sources}
    return {metric: text for metric, text in named.items() if text is not None}


def require_library(metric: str) -> None:
    """Refuse a metric whose library is not installed, with the pip line."""
    library = LIBRARIES.get(metric)
    if library is not None and find_spec(library) is None:
        name = library.replace("_", "-")
        raise ValueError(f'[data] metric = "{metric}" needs {name}: {pip_install("metrics")}')


def _share(value: float, metric: str, text: str) -> float:
    """Return a number of a library, which rounding may have put above 1."""
    if not math.isfinite(value):
        raise ValueError(
            f'[data] metric = "{metric}" gave {value} for {text[:60]!r}, which is no reward: look '
            "at this answer, and at the library's version"
        )
    return min(1.0, max(0.0, value))


@cache
def _rouge(metric: str) -> Any:
    """Return rouge-score's scorer. Without the stemmer, which is its default, and T5's."""
    require_library(metric)
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([metric], use_stemmer=False)


@cache
def _sacrebleu(metric: str, of_sentences: bool) -> Any:
    """Return sacrebleu's scorer. BLEU of single sentences has effective order."""
    require_library(metric)
    from sacrebleu.metrics import BLEU, CHRF

    return BLEU(effective_order=of_sentences) if metric == "bleu" else CHRF()
