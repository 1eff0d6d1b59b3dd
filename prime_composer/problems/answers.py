"""Check answers that are right or wrong. ``metrics.py`` has those of any other value.

The table of what the default rule reads is in recipes/grading.md.
"""

import re
import unicodedata
from decimal import Decimal

from prime_composer.problems.config import FINAL_MARK, MATH, DataConfig, Problem
from prime_composer.problems.math_verifier import VERIFIER, TimeBudget

_SPACE = r"[ \t]*"
_SIGN = "[-\u2212+]?"
_CURRENCY = r"(?:\\?\$|[£€¥₹])?"

_FIRST = re.compile(
    rf"{re.escape(FINAL_MARK)}{_SPACE}({_SIGN}){_SPACE}{_CURRENCY}{_SPACE}({_SIGN})"
    r"(\d[\d,]*(?:\.\d+)?|\.\d+)"
)
"""The first number after ``####``: its sign, before or after a currency, and its digits."""

_GROUPED = re.compile(r"\d*(?:\.\d+)?|\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?")
"""Digits whose commas, if any, separate thousands or lakhs."""

_GOES_ON = re.compile(
    rf"""
    [.,:]\d                                      # 1.5.2   10:30
    | {_SPACE}[\d²³¹\u00bc-\u00be\u2070-\u2079\u2150-\u215f]      # 18 17 16   2 1/2   10²
    | [^\W\d_]+\d | [xyznXYZ](?![^\W\d_])         # 1e3   3x, while 5m is 5
    | [A-Za-z]{_SPACE}[-+*/×÷·⋅\u2212]{_SPACE}[({{]*\.?\d  # 3a + 2
    | {_SPACE}(?:[-+*/^×÷·⋅:,;&\u2212\u2013]+|[xX]|or\b|and\b|to\b|\\[a-z]+)
      {_SPACE}{_SIGN}{_CURRENCY}[({{]*\.?\d          # 1/2   5-3   3 x 10^2   5 or 6
    """,
    re.VERBOSE,
)
"""What makes the digits before it a part of something else: another number, a formula, a list."""

_SCALED = re.compile(
    rf"{_SPACE}(?:\\?%|(?:percent|dozen|hundred|thousand|million|billion|trillion|[kKMB])\b)"
)
"""What gives the digits before it another value. The rule of the field does not read it."""

_NUMBER = r"(?<!\w)[-\u2212]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\w)"

_PART = re.compile(rf"(?P<number>{_NUMBER})|[^\W_]+(?:['\u2019][^\W_]+)*")
"""A number, or a word with its apostrophes. A hyphen separates: ``57-year-old``."""

ARTICLES = ("a", "an", "the")

DOUBTS = ("or", "nor", "either", "neither", "not", "never", "cannot", "whether")
"""Words of an answer that offers several, or denies one."""

ROUGE_WORD = re.compile(r"[a-z0-9]+")  # A word of rouge-score, in lower case

WORDS_NEEDED = {"rouge2": 2, "rougeL": 1}  # Fewer in a reference give any answer 0


def verdict(reference: str, reward: float) -> str:
    """Return the verifier's feedback on a rollout, by the reference of its problem."""
    return "This is correct." if reward > 0 else f"This is wrong; the right answer is {reference}."


def is_correct(
    text: str, problem: Problem, config: DataConfig, budget: TimeBudget | None = None
) -> bool:
    """Return whether a completion answers the problem, by the rule of ``config.metric``."""
    if config.metric == "exact":
        return text.strip() == problem.answer.strip()
    if config.metric == "short_answer":
        return says(text, problem.answer)
    if config.metric == "contains":
        return contains(text, problem.answer)
    if config.metric == "math_verify":
        return VERIFIER.verify(problem.final, text, TimeBudget() if budget is None else budget)
    answer = final_number(text)
    return answer is not None and answer == final_number(f"{FINAL_MARK} {problem.final}")


def says(text: str, reference: str) -> bool:
    """Return whether an answer, of any length, gives a short reference and nothing beside it.

    Both are read as words and numbers in a row, after the normalization of SQuAD (Rajpurkar et al.,
    2016, https://arxiv.org/abs/1606.05250): no case, no punctuation, no articles; here no accents
    either, and numbers are compared as numbers. The row of the reference has to occur in that of
    the answer, so that "Mary is 57 years old." gives 57, and 157 does not. An answer that hedges is
    wrong: with another number than those of the reference ("57 or 58"), or with one of ``DOUBTS``
    that the reference lacks ("in Ulm or Bonn", "not in Ulm").
    """
    wanted, given = _parts(reference), _parts(text)
    numbers = {part for part in wanted if isinstance(part, Decimal)}
    if numbers and any(isinstance(part, Decimal) and part not in numbers for part in given):
        return False
    if any(_doubts(part) and part not in wanted for part in given):
        return False
    starts = range(len(given) - len(wanted) + 1)
    return any(given[start : start + len(wanted)] == wanted for start in starts)


def _parts(text: str) -> list[str | Decimal]:
    """Return the words and numbers of a text, normalized."""
    plain = unicodedata.normalize("NFD", text).casefold()
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    parts: list[str | Decimal] = []
    for match in _PART.finditer(plain):
        if match["number"]:
            parts.append(Decimal(match[0].replace(",", "").replace("\u2212", "-")))
        elif match[0] not in ARTICLES:
            parts.append(match[0].replace("\u2019", "'"))
    return parts


def _doubts(part: str | Decimal) -> bool:
    return isinstance(part, str) and (part in DOUBTS or part.endswith("n't"))


def contains(text: str, reference: str) -> bool:
    """Return whether a text has a reference within it; neither case nor kind of white space counts.

    ``57`` is not in ``157`` or ``57.5``, and ``art`` is not in ``part``.
    """
    words = reference.split()
    if not words:
        return False
    inner = r"\s+".join(map(re.escape, words))
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", words[0]) else ""
    after = r"(?!\w)(?![.,]\d)" if re.search(r"\w\Z", words[-1]) else ""
    return re.search(f"{before}{inner}{after}", text, re.IGNORECASE) is not None


def final_number(text: str) -> Decimal | None:
    """Return the number after the first ``####``, exactly, or None.

    The rule is that of https://github.com/openai/grade-school-math (``extract_answer`` in
    grade_school_math/dataset.py): the first ``#### (-?[0-9.,]+)``, commas dropped. There are three
    differences. A currency, a plus or the sign U+2212 may precede the number. Numbers are compared
    as numbers (18 equals 18.00). Digits that are a part of something else are no answer: ``1/2``,
    ``5 or 6``, ``1e3``.
    """
    found = _read(text)
    return None if found is None else found[0]


def _read(text: str) -> tuple[Decimal, int] | None:
    """Return the number after the first ``####`` and where it ends."""
    match = _FIRST.search(text)
    if match is None or (match[1] and match[2]):
        return None
    digits = match[3].rstrip(",")
    end = match.start(3) + len(digits)
    if _GROUPED.fullmatch(digits) is None or _GOES_ON.match(text, end) is not None:
        return None
    number = Decimal(digits.replace(",", ""))
    # Not unary minus, which rounds to 28 digits.
    return number.copy_negate() if (match[1] or match[2]) in ("-", "\u2212") else number, end


def check_reference(answer: str, metric: str, key: str = "answer") -> None:
    """Check that an answer of the data is, or ends in, a reference for a metric.

    ``gsm8k`` needs a number after ``####`` that it does not misread. Math-Verify takes any text
    there, or a text without the mark. ROUGE counts words, and ROUGE-2 pairs of them.
    """
    if metric in WORDS_NEEDED:
        needed, words = WORDS_NEEDED[metric], len(ROUGE_WORD.findall(answer.lower()))
        if words < needed:
            raise ValueError(
                f'"{key}" has {words} of the {needed} words (a-z, 0-9) that {metric} needs, so '
                f"that every answer would get 0: {answer[:60]!r}; choose another metric, or leave "
                "such rows out with clean = true"
            )
    if metric == "short_answer" and not _parts(answer):
        raise ValueError(
            f'"{key}" has no word or number for metric = "short_answer" but articles: '
            f'{answer[:60]!r}; compare with metric = "exact", or leave such rows out with '
            "clean = true"
        )
    if metric not in MATH:
        return
    _, mark, final = answer.rpartition(FINAL_MARK)
    shown = final.strip()
    if metric == "math_verify":
        if not shown:
            raise ValueError(f'nothing follows the last "{FINAL_MARK}" in "{key}"')
        return
    if not mark:
        raise ValueError(
            f'"{key}" has no "{FINAL_MARK} <number>" at its end, which metric = "{metric}" reads; '
            'write one, or choose another metric: "math_verify" reads the answer itself, '
            '"contains" and "exact" compare texts, and "none" grades nothing'
        )
    found = _read(mark + final)
    if found is None or _SCALED.match(mark + final, found[1]) is not None:
        raise ValueError(
            f'what follows "{FINAL_MARK}" in "{key}" is not a number: {shown[:60]!r}; write it as '
            'a decimal number, or compare with metric = "math_verify"'
        )
