"""Problems in GSM8K's format: from JSONL files, from the hub, or generated; prompts; answer checking; batch order.

A problem is a question and a worked answer that ends in ``#### <number>`` (Cobbe et al., "Training Verifiers to Solve
Math Word Problems", 2021, https://arxiv.org/abs/2110.14168). Nothing heavy is imported here: ``datasets`` and
``math_verify`` come in only where a recipe asks for them.
"""

import json
import math
import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

FINAL_MARK = "####"

PROBLEMS = "problems"
"""The environment's name where a recipe has a single ``[data]``."""


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

    operations: tuple[Literal[1, 2, 3], ...] = Field(default=(1, 2, 3), min_length=1)
    """For ``generated``: how many operations a problem may take."""

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

    ratio: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Share of the prompts, relative to the other ``[environments]``; 1 each by default, as in prime-rl."""

    teacher: str | dict[str, float] | None = None
    """With ``[teachers]``: the one that scores these problems' rollouts; or a table ``name = weight``, a mixture of
    theirs. Unset: all of them, by their own weights."""

    teacher_key: str | None = None
    """For ``jsonl`` and ``hub``, with ``[teachers]``: the key under which each row names its own teacher; a row without
    it goes where ``teacher`` says."""

    @field_validator("teacher")
    @classmethod
    def _weights_are_weights(cls, teacher: str | dict[str, float] | None) -> str | dict[str, float] | None:
        if isinstance(teacher, dict) and (not teacher or not all(0 < w < float("inf") for w in teacher.values())):
            raise ValueError("a mixture is a table of name = weight, each weight above 0")
        return teacher

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
        if self.source == "generated" and self.teacher_key is not None:
            raise ValueError("teacher_key names a key of the data's rows, and generated problems have none: use `teacher`")
        return self


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in ``#### <number>``.

    Attributes:
        environment: which of the recipe's environments it belongs to.
        teacher: the teacher that the data names for it.
    """

    question: str
    answer: str
    environment: str = PROBLEMS
    teacher: str | None = None

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


def load_environments(sources: Mapping[str, DataConfig]) -> tuple[list[Problem], list[Problem]]:
    """The problems of all environments to train on, one environment after the other, and the held-out ones, the
    environments in turn, so that a part of them is of all.

    Raises:
        ValueError: as ``load_problems``, or one environment trains on what another one holds out.
    """
    practice: list[Problem] = []
    held_out: list[list[Problem]] = []
    for name, config in sources.items():
        train, test = ([replace(p, environment=name) for p in problems] for problems in load_problems(config))
        practice += train
        held_out.append(test)
    aside = [problem for turn in zip_longest(*held_out) for problem in turn if problem is not None]
    trained = {problem.question: problem.environment for problem in practice}
    clash = min((p for p in aside if p.question in trained), key=lambda p: p.question, default=None)
    if clash is not None:
        _refuse_overlap(
            practice,
            aside,
            f"environments.{trained[clash.question]} trains on what environments.{clash.environment} holds out",
            "Remove them from one of the two; generated environments want `operations` without one in common, or all "
            "the same `size`, `seed`, `operations` and `hold_out`.",
        )
    return practice, aside


def load_problems(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the held-out ones, in a fixed order, with no question in both.

    Raises:
        ValueError: a file is missing or malformed (with file and line number), a library is missing, training and
            held-out questions overlap, or no row names a teacher under ``teacher_key``.
    """
    if config.source == "generated":
        problems = generate_problems(config.size, config.seed, config.operations)
        train, held_out = split_by_question(problems, config.hold_out, config.seed)
        origin = "the generated problems"
    elif config.source == "hub":
        train, held_out = _from_hub(config)
        origin = config.hub_id
    else:
        path = config.path.expanduser()
        origin = str(path)
        if path.is_dir():
            train, held_out = (read_jsonl(path / f"{split}.jsonl", config.teacher_key) for split in ("train", "test"))
        else:
            train, held_out = split_by_question(read_jsonl(path, config.teacher_key), config.hold_out, config.seed)
    if not config.calculator_annotations:
        train, held_out = ([_without_annotations(p) for p in problems] for problems in (train, held_out))
    for name, problems in (("training", train), ("held-out", held_out)):
        if not problems:
            raise ValueError(f"{origin} leaves no {name} problems; raise [data] size or change hold_out")
    _refuse_overlap(train, held_out, origin)
    if config.teacher_key is not None and all(problem.teacher is None for problem in train):
        raise ValueError(
            f"{origin}: no row to train on has the key {config.teacher_key!r}; correct teacher_key, or leave it out to have "
            "all rows go where `teacher` says"
        )
    return train, held_out


def _refuse_overlap(
    train: Sequence[Problem], held_out: Sequence[Problem], origin: str, remedy: str = "Remove them from one side."
) -> None:
    shared = {p.question for p in train} & {p.question for p in held_out}
    if shared:
        raise ValueError(
            f"{origin}: {len(shared)} question(s) are both trained on and held out, so accuracy would be flattered. "
            f"{remedy} The first: {min(shared)!r}"
        )


def split_by_question(problems: list[Problem], hold_out: float, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Set aside the share ``hold_out`` of the distinct questions; problems of one question stay on one side."""
    questions = sorted({p.question for p in problems})
    random.Random(f"hold-out {seed}").shuffle(questions)
    aside = set(questions[: max(1, round(hold_out * len(questions)))])
    return [p for p in problems if p.question not in aside], [p for p in problems if p.question in aside]


def read_jsonl(path: Path, teacher_key: str | None = None) -> list[Problem]:
    """The problems of one JSONL file, one JSON object per line; empty lines are passed over.

    Args:
        teacher_key: under which a row names its teacher.

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
                problems.append(_problem_of_line(line, teacher_key))
            except ValueError as error:
                complaints.append(f"{path}:{number}: {error}")
    if complaints:
        more = f"\n(and {len(complaints) - 5} more malformed lines)" if len(complaints) > 5 else ""
        raise ValueError("\n".join(complaints[:5]) + more)
    return problems


def _problem_of_line(line: bytes, teacher_key: str | None) -> Problem:
    try:
        row = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    return _problem_of_row(row, teacher_key)


def _problem_of_row(row: Any, teacher_key: str | None) -> Problem:
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
    teacher = None if teacher_key is None else row.get(teacher_key)
    if teacher is not None and not isinstance(teacher, str):
        raise ValueError(f'"{teacher_key}" must be the name of a teacher, found {type(teacher).__name__}')
    return replace(problem, teacher=teacher)


def _from_hub(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError('[data] source = "hub" needs the datasets library: pip install "prime-composer[hub]"') from error
    splits = datasets.load_dataset(config.hub_id, config.hub_name)
    found = []
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{config.hub_id} has no split {split!r}; its splits are {sorted(splits)}")
        problems = []
        for number, row in enumerate(splits[split], start=1):
            try:
                problems.append(_problem_of_row(row, config.teacher_key))
            except ValueError as error:
                raise ValueError(f"{config.hub_id}, split {split}, row {number}: {error}") from error
        found.append(problems)
    return found[0], found[1]


def _without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))


# ------------------------------------------------------------------------------------------------------- generated

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jo Kim Leo Mia Nia Omar Pia Quinn Rosa Sam Tara Uma Vic Wanda Yan".split()
ITEMS = "apples books cards coins eggs hats keys lamps mugs nuts pens pins rings shells stamps toys".split()


def generate_problems(size: int, seed: int, operations: Sequence[int] = (1, 2, 3)) -> list[Problem]:
    """``size`` problems with distinct questions, from six templates of one to three ``operations``.

    The templates take turns; every number, worked step and answer is a positive integer below 100.

    Raises:
        ValueError: the templates cannot make that many distinct questions.
    """
    rng = random.Random(f"problems {seed}")
    templates = [template for template, count in TEMPLATES.items() if count in operations]
    problems: dict[str, Problem] = {}
    for attempt in range(20 * size):
        if len(problems) == size:
            break
        problem = templates[attempt % len(templates)](rng, rng.choice(NAMES), rng.choice(ITEMS))
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


TEMPLATES = {_buys: 1, _gives: 1, _boxes: 1, _boxes_and_more: 2, _finds_and_loses: 2, _daily: 3}
"""Each with its number of operations."""


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
        raise ValueError('[data] answer_check = "math_verify" needs Math-Verify: pip install "prime-composer[engine]"') from error
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
    return [_permutation(n_problems, seed, i // n_problems)[i % n_problems] for i in range(first, first + batch_prompts)]


def environment_batches(sizes: Sequence[int], ratios: Sequence[float], batch_prompts: int, seed: int, step: int) -> list[int]:
    """``prompt_batches`` over several environments, whose problems stand one after the other: the same promises.

    A step's prompts are shared out by ``ratios``, each environment's count within one of its exact share (systematic
    sampling, with an offset drawn anew each step, so that the shares are exact on average); each environment walks
    through permutations of its own problems.
    """
    if len(sizes) == 1:
        return prompt_batches(sizes[0], batch_prompts, seed, step)
    counts = [_shares(tuple(ratios), batch_prompts, seed, earlier) for earlier in range(step + 1)]
    batch, start = [], 0
    for environment, size in enumerate(sizes):
        first = sum(count[environment] for count in counts[:step])
        for i in range(first, first + counts[step][environment]):
            batch.append(start + _permutation(size, seed, i // size)[i % size])
        start += size
    return batch


@cache
def _shares(ratios: tuple[float, ...], batch_prompts: int, seed: int, step: int) -> list[int]:
    """How many of a step's prompts each environment gets."""
    offset = random.Random(f"environments {seed} {step}").random()
    total, reached, before, counts = sum(ratios), 0.0, 0, []
    for ratio in ratios:
        reached += ratio
        # How many of the points offset, offset + 1, ... lie below this environment's end of the line.
        below = min(batch_prompts, max(0, math.ceil(batch_prompts * reached / total - offset)))
        counts.append(below - before)
        before = below
    counts[-1] += batch_prompts - before
    return counts


@lru_cache(maxsize=32)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)
