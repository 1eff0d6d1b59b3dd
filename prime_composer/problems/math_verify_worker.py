"""Compare answers with Math-Verify, in a process that ``math_verifier.py`` starts by this path.

Each line of standard input is a JSON list: the reference, the answer, and the seconds that it may
take, of CPU time and on the clock. Each line of standard output is the verdict, null where memory
or time ran out. Python cannot interrupt its arithmetic with large integers, so a child answers, and
the kernel ends it when one of its alarms rings; the next child has the library imported already.
"""

import json
import os
import re
import resource
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space

DELIMITED = re.compile(r"\$|\\boxed")  # what tells the library that a text has a formula
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[^\W\d_]{2}")  # once commands are left out: a formula has letters alone
OF_FORMULA = re.compile(r"[A-Za-z\\^{}()\[\]]")  # what a formula has and a plain number lacks


def answer_questions() -> None:
    """Answer one question after the other, until standard input ends."""
    # Verdicts have a descriptor of their own: whatever a library prints goes nowhere.
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from math_verify import parse

        parse(r"$\frac{1}{2}$", parsing_timeout=None)  # its patterns are compiled once, here
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), file=verdicts, flush=True)
        return
    print(json.dumps("ready"), file=verdicts, flush=True)
    while child := os.fork():  # one that an alarm ends costs no import of the library
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return
        print(json.dumps(None), file=verdicts, flush=True)
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        print(json.dumps(equals(*json.loads(line))), file=verdicts, flush=True)


def as_formula(reference: str) -> str:
    """Return a reference between dollar signs where it is a bare formula, and else unchanged.

    Without them the library reads a part of it: 2 of 2\\sqrt{3}, 10 of 10^{-3}, nothing of x^2.
    """
    bare = DELIMITED.search(reference.replace("\\$", "")) is None
    words = WORD.search(COMMAND.sub(" ", reference)) is not None
    return f"${reference}$" if bare and not words and OF_FORMULA.search(reference) else reference


def equals(reference: str, text: str, cpu_seconds: float, wall_seconds: float) -> bool | None:
    """Return whether an answer equals the reference; None where memory ran out."""
    from math_verify import parse, verify

    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    try:
        gold = parse(as_formula(reference), parsing_timeout=None)
        return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))
    except (MemoryError, RecursionError):
        return None
    except Exception:  # the library's parsers raise what they like on text that is no mathematics
        return False
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


if __name__ == "__main__":
    answer_questions()
