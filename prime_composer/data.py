"""Problems in GSM8K's format: from JSONL files, from the hub, or generated; prompts; answer checking; batch order.

A problem is a question and a worked answer that ends in ``#### <number>`` (Cobbe et al., "Training Verifiers to Solve
Math Word Problems", 2021, https://arxiv.org/abs/2110.14168). Nothing heavy is imported here: ``datasets`` and
``math_verify`` come in only where a recipe asks for them.
"""

import json
import random
import re
import threading
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

FINAL_MARK = "####"


class DataConfig(BaseModel):
    """Which problems the student practises on and is tested on, how they become prompts, how answers are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["generated", "jsonl", "hub"] = "generated"
    """``generated``: word problems made on the spot, no file or network. ``jsonl``: GSM8K JSONL files at ``path``.
    ``hub``: a data set of the Hugging Face hub, through the ``datasets`` library."""

    path: Path | None = None
    """For ``jsonl``: a folder that holds ``train.jsonl`` and ``test.jsonl``, or one JSONL file, of which ``hold_out``
    is set aside. One object per line with the strings "question" and "answer"; the answer ends in ``#### <number>``."""

    hub_id: str = "openai/gsm8k"
    """For ``hub``: the data set's id; its splits are ``train`` and ``test``."""

    hub_name: str = "main"
    """For ``hub``: the configuration of that data set."""

    size: int = Field(default=8000, ge=20, le=100_000)
    """For ``generated``: how many distinct problems, held-out ones included."""

    seed: int = 0
    """For ``generated``: the seed of the problems."""

    hold_out: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the distinct questions set aside for testing, where the source has no test split of its own."""

    calculator_annotations: bool = False
    """Whether GSM8K's inline calculator annotations, ``<<48/2=24>>``, stay in the worked answers."""

    prompt_template: str = "Question: {question}\nAnswer:"
    """The prompt, with ``{question}`` where the question goes. With ``chat_template`` it is the user's message."""

    chat_template: bool = False
    """Whether the prompt goes through the tokenizer's own chat template, as one user message. For chat models."""

    answer_check: Literal["gsm8k", "math_verify"] = "gsm8k"
    """``gsm8k``: the number after the first ``####`` must equal the reference's, exactly, as a decimal number.
    ``math_verify``: the Math-Verify library extracts an answer from free text and LaTeX and compares it."""

    @field_validator("prompt_template")
    @classmethod
    def _names_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("prompt_template must contain {question}, where the question goes")
        return template

    @model_validator(mode="after")
    def _path_belongs_to_jsonl(self) -> "DataConfig":
        if self.source == "jsonl" and self.path is None:
            raise ValueError(
                'source = "jsonl" needs path, a folder with train.jsonl and test.jsonl '
                "(GSM8K's own: https://github.com/openai/grade-school-math)"
            )
        if self.source != "jsonl" and self.path is not None:
            raise ValueError(f'path is read only with source = "jsonl", and source = {self.source!r}')
        return self


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in ``#### <number>``."""

    question: str
    answer: str

    @property
    def final(self) -> str:
        """What stands after the last ``####``: the reference's number, as written."""
        return self.answer.rpartition(FINAL_MARK)[2].strip()


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


# --------------------------------------------------------------------------------------------------------- loading


def load_problems(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the held-out ones, in a fixed order, with no question in both.

    Raises:
        ValueError: a file is missing or malformed (with file and line number), a library is missing, or training and
            held-out questions overlap.
    """
    if config.source == "generated":
        train, held_out = split_by_question(generate_problems(config.size, config.seed), config.hold_out, config.seed)
        origin = "the generated problems"
    elif config.source == "hub":
        train, held_out = _from_hub(config)
        origin = config.hub_id
    else:
        path = config.path.expanduser()
        origin = str(path)
        if path.is_dir():
            train, held_out = read_jsonl(path / "train.jsonl"), read_jsonl(path / "test.jsonl")
        else:
            train, held_out = split_by_question(read_jsonl(path), config.hold_out, config.seed)
    if not config.calculator_annotations:
        train, held_out = ([_without_annotations(p) for p in problems] for problems in (train, held_out))
    for name, problems in (("training", train), ("held-out", held_out)):
        if not problems:
            raise ValueError(f"{origin} leaves no {name} problems; raise [data] size or change hold_out")
    shared = {p.question for p in train} & {p.question for p in held_out}
    if shared:
        raise ValueError(
            f"{origin}: {len(shared)} question(s) are both trained on and held out, so accuracy would be flattered. "
            f"Remove them from one side. The first: {min(shared)!r}"
        )
    return train, held_out


def split_by_question(problems: list[Problem], hold_out: float, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Set aside the share ``hold_out`` of the distinct questions; problems of one question stay on one side."""
    questions = sorted({p.question for p in problems})
    random.Random(f"hold-out {seed}").shuffle(questions)
    aside = set(questions[: max(1, round(hold_out * len(questions)))])
    return [p for p in problems if p.question not in aside], [p for p in problems if p.question in aside]


def read_jsonl(path: Path) -> list[Problem]:
    """The problems of one JSONL file, one JSON object per line; empty lines are passed over.

    Raises:
        ValueError: the file is missing, or lines are malformed: ``file:line: what is wrong``, the first five of them.
    """
    if not path.is_file():
        raise ValueError(
            f"no such file: {path}. [data] path is a folder with train.jsonl and test.jsonl, or one JSONL file; "
            "GSM8K's are at https://github.com/openai/grade-school-math"
        )
    problems, complaints = [], []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                problems.append(_problem_of_line(line))
            except ValueError as error:
                complaints.append(f"{path}:{number}: {error}")
    if complaints:
        more = f"\n(and {len(complaints) - 5} more malformed lines)" if len(complaints) > 5 else ""
        raise ValueError("\n".join(complaints[:5]) + more)
    return problems


def _problem_of_line(line: bytes) -> Problem:
    try:
        row = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    return _problem_of_row(row)


def _problem_of_row(row: Any) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f'expected an object with "question" and "answer", found {type(row).__name__}')
    for key in ("question", "answer"):
        if key not in row:
            raise ValueError(f'"{key}" is missing; the keys are {sorted(row)}')
        if not isinstance(row[key], str):
            raise ValueError(f'"{key}" must be a string, found {type(row[key]).__name__}')
        if not row[key].strip():
            raise ValueError(f'"{key}" is empty')
    problem = Problem(question=row["question"].strip(), answer=row["answer"].strip())
    if FINAL_MARK not in problem.answer:
        raise ValueError(f'"answer" has no "{FINAL_MARK} <number>" at its end')
    if final_number(problem.answer[problem.answer.rindex(FINAL_MARK) :]) is None:
        raise ValueError(f'what follows "{FINAL_MARK}" in "answer" is not a number: {problem.final!r}')
    return problem


def _from_hub(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            '[data] source = "hub" needs the datasets library: pip install "prime-composer[hub]"'
        ) from error
    splits = datasets.load_dataset(config.hub_id, config.hub_name)
    found = []
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{config.hub_id} has no split {split!r}; its splits are {sorted(splits)}")
        problems = []
        for number, row in enumerate(splits[split], start=1):
            try:
                problems.append(_problem_of_row(row))
            except ValueError as error:
                raise ValueError(f"{config.hub_id}, split {split}, row {number}: {error}") from error
        found.append(problems)
    return found[0], found[1]


def _without_annotations(problem: Problem) -> Problem:
    return Problem(problem.question, re.sub(r"<<[^<>]*>>", "", problem.answer))


# ------------------------------------------------------------------------------------------------------- generated

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jo Kim Leo Mia Nia Omar Pia Quinn Rosa Sam Tara Uma Vic Wanda Yan".split()
)
ITEMS = "apples books cards coins eggs hats keys lamps mugs nuts pens pins rings shells stamps toys".split()


def generate_problems(size: int, seed: int) -> list[Problem]:
    """``size`` problems with distinct questions, from six templates of one to three operations.

    The templates take turns; every number, worked step and answer is a positive integer below 100.

    Raises:
        ValueError: the templates cannot make that many distinct questions.
    """
    rng = random.Random(f"problems {seed}")
    problems: dict[str, Problem] = {}
    for attempt in range(20 * size):
        if len(problems) == size:
            break
        problem = TEMPLATES[attempt % len(TEMPLATES)](rng, rng.choice(NAMES), rng.choice(ITEMS))
        problems.setdefault(problem.question, problem)
    if len(problems) < size:
        raise ValueError(f"[data] size = {size}: the templates make only {len(problems)} distinct questions")
    return list(problems.values())


def _worked(question: str, *steps: tuple[int, str, int]) -> Problem:
    """A problem whose answer writes out ``left operator right = result`` step by step, then ``#### result``."""
    lines = []
    for left, operator, right in steps:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
        lines.append(f"{left} {operator} {right} = {result}")
    return Problem(question, "\n".join([*lines, f"{FINAL_MARK} {result}"]))


def _buys(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 19), rng.randint(2, 19)
    return _worked(f"{name} has {a} {items} and buys {b} more. How many in all?", (a, "+", b))


def _gives(rng: random.Random, name: str, items: str) -> Problem:
    a = rng.randint(5, 24)
    b = rng.randint(2, a - 1)
    return _worked(f"{name} has {a} {items} and gives {b} away. How many are left?", (a, "-", b))


def _boxes(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return _worked(f"{name} fills {a} boxes with {b} {items} each. How many in all?", (a, "*", b))


def _boxes_and_more(rng: random.Random, name: str, items: str) -> Problem:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    question = f"{name} has {a} boxes of {b} {items} and finds {c} more. How many in all?"
    return _worked(question, (a, "*", b), (a * b, "+", c))


def _finds_and_loses(rng: random.Random, name: str, items: str) -> Problem:
    a, b = rng.randint(2, 19), rng.randint(2, 19)
    c = rng.randint(2, min(9, a + b - 1))
    question = f"{name} has {a} {items}, finds {b} and loses {c}. How many are left?"
    return _worked(question, (a, "+", b), (a + b, "-", c))


def _daily(rng: random.Random, name: str, items: str) -> Problem:
    a, b, c, d = rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 5), rng.randint(2, 7)
    question = f"{name} makes {a} {items} at dawn and {b} at dusk for {c} days and sells {d}. How many are left?"
    return _worked(question, (a, "+", b), (a + b, "*", c), ((a + b) * c, "-", d))


TEMPLATES = (_buys, _gives, _boxes, _boxes_and_more, _finds_and_loses, _daily)


# --------------------------------------------------------------------------------------------- prompts and answers


def prompt_text(problem: Problem, config: DataConfig) -> str:
    """The prompt as text, before any chat template. Other braces in template or question stay as they are."""
    return config.prompt_template.replace("{question}", problem.question)


def answer_text(answer: str, config: DataConfig) -> str:
    """An answer as it follows the prompt: a chat template ends its line, any other prompt ends without a space."""
    return answer if config.chat_template else f" {answer}"


def render_prompt(problem: Problem, config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """The prompt's token ids.

    Raises:
        ValueError: ``chat_template`` is set and the tokenizer has none.
    """
    text = prompt_text(problem, config)
    if not config.chat_template:
        return list(tokenizer.encode(text))
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("[data] chat_template = true, but this model's tokenizer has none; set it to false")
    message = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False))


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


_FINAL = re.compile(re.escape(FINAL_MARK) + r"[ \t]*(-?)[ \t]*\$?[ \t]*(-?)(\d[\d,]*(?:\.\d+)?|\.\d+)")


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


# ------------------------------------------------------------------------------------------------------ batch order


def prompt_batches(n_problems: int, batch_prompts: int, seed: int, step: int) -> list[int]:
    """The indices of the problems that step ``step`` (from 0) asks: a function of its arguments alone.

    The steps walk through one permutation of all problems after another, so each epoch asks every problem once, and
    a resumed run needs no iterator state. A batch may straddle two epochs.
    """
    first = step * batch_prompts
    return [
        _permutation(n_problems, seed, i // n_problems)[i % n_problems] for i in range(first, first + batch_prompts)
    ]


@lru_cache(maxsize=8)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)
