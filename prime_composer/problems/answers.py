"""Check answers."""

import re
import threading
from decimal import Decimal

from prime_composer.problems.config import FINAL_MARK, DataConfig, Problem

MATH_VERIFY_SECONDS = 5

_FINAL = re.compile(
    re.escape(FINAL_MARK) + r"[ \t]*(-?)[ \t]*\$?[ \t]*(-?)(\d[\d,]*(?:\.\d+)?|\.\d+)"
)


def is_correct(text: str, problem: Problem, config: DataConfig) -> bool:
    """Return whether a completion answers the problem, by the rule of ``config.answer_check``.

    Raises:
        ValueError: the rule needs Math-Verify and it is not installed.
    """
    if config.answer_check == "gsm8k":
        answer = final_number(text)
        return answer is not None and answer == final_number(f"{FINAL_MARK} {problem.final}")
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            '[data] answer_check = "math_verify" needs Math-Verify: '
            'pip install "prime-composer[engine]"'
        ) from error
    # Math-Verify's time-outs are signals, which only the main thread may set.
    on_main_thread = threading.current_thread() is threading.main_thread()
    limit = MATH_VERIFY_SECONDS if on_main_thread else None
    reference = parse(problem.final, parsing_timeout=limit)
    return bool(verify(reference, parse(text, parsing_timeout=limit), timeout_seconds=limit))


def final_number(text: str) -> Decimal | None:
    """Return the number after the first ``####``, exactly, or None.

    The rule is that of https://github.com/openai/grade-school-math (``extract_answer`` in
    grade_school_math/dataset.py): the first ``#### (-?[0-9.,]+)``, commas dropped. Two differences:
    a dollar sign may precede the number, and numbers are compared as numbers (18 equals 18.00).
    """
    match = _FINAL.search(text)
    if match is None:
        return None
    number = Decimal(match[3].replace(",", ""))
    return -number if bool(match[1]) != bool(match[2]) else number
