"""Answer checking."""

import re
import threading
from decimal import Decimal

from prime_composer.problems.config import FINAL_MARK, DataConfig, Problem


def is_correct(text: str, problem: Problem, config: DataConfig) -> bool:
    """Whether a completion answers the problem, by the rule of ``config.answer_check``.

    Raises:
        ValueError: the rule needs Math-Verify and it is not installed.
    """
    if config.answer_check == "gsm8k":
        found = final_number(text)
        return found is not None and found == final_number(f"{FINAL_MARK} {problem.final}")
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            '[data] answer_check = "math_verify" needs Math-Verify: pip install "prime-composer[engine]"'
        ) from error
    # Its time-outs work by signals, which only the main thread may set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    reference = parse(problem.final, parsing_timeout=limit)
    return bool(verify(reference, parse(text, parsing_timeout=limit), timeout_seconds=limit))


_FINAL = re.compile(
    re.escape(FINAL_MARK) + r"[ \t]*(-?)[ \t]*\$?[ \t]*(-?)(\d[\d,]*(?:\.\d+)?|\.\d+)"
)


def final_number(text: str) -> Decimal | None:
    """The number after the first ``####``, exactly, or None.

    The rule of https://github.com/openai/grade-school-math (``extract_answer`` in grade_school_math/dataset.py: the
    first ``#### (-?[0-9.,]+)``, commas dropped), except that a dollar sign may stand before the number and that
    numbers are compared as numbers: 18 equals 18.00 and "18." at the end of a sentence.
    """
    match = _FINAL.search(text)
    if match is None:
        return None
    number = Decimal(match[3].replace(",", ""))
    return -number if bool(match[1]) != bool(match[2]) else number
