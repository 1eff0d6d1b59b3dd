"""What a teacher with another tokenizer reads, and the tables of both tokenizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_composer.backends.hf_model import ModelUnavailable, load_tokenizer, read_eos_token_ids
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.cross_tokenizer.token_bytes import TokenBytes, UnsupportedTokenizer
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import (
    answer_text,
    around_answer,
    ends_of_chat,
    prompt_text,
)
from prime_composer.teachers.compatibility import PreflightError, check_tokenizers
from prime_composer.teachers.own_prompt import TeacherPrompts

COUNTED_PROBLEMS = 2000
"""Problems on whose texts two tokenizers are compared."""

COUNTED_ANSWERS = 200
"""Texts on which the teacher's tokens per student token, and where both begin, are counted."""

LONGER = 1.2
"""Margin on that number."""


class PromptsAndTexts(TeacherPrompts):
    """The prompts of a teacher with another tokenizer, and the data's texts in both."""

    def __init__(self, student: Any, *args: Any):
        super().__init__(*args)
        self.student = student

    def texts(self) -> list[str]:
        """Return prompts and worked answers of the first problems to train on, as text."""
        return [
            text
            for problem in self.problem_set.practice[:COUNTED_PROBLEMS]
            for text in (prompt_text(problem, self.config_of(problem)), self.answer(problem))
        ]

    def answer(self, problem: Problem) -> str:
        """Return the data's answer as it follows the prompt."""
        return answer_text(problem.answer, self.config_of(problem))

    def written(self, problems: Sequence[Problem]) -> list[str]:
        """Return the data's answers of the first problems; their prompts where it has none."""
        counted = problems[:COUNTED_ANSWERS]
        texts = [self.answer(problem) for problem in counted if problem.answer.strip()]
        return texts or [prompt_text(problem, self.config_of(problem)) for problem in counted]

    def tokens_per_student_token(self, problems: Sequence[Problem]) -> float:
        """Return how many of the teacher's tokens one of the student's may take, with a margin."""
        texts = self.written(problems)
        own, other = (
            sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
            for tokenizer in (self.tokenizer, self.student)
        )
        return max(1.0, LONGER * own / max(1, other))


def make_pair(
    teacher: Any,
    student: Any,
    teacher_ends: Iterable[int],
    texts: Iterable[str],
    table: str,
    sizes: tuple[int, int] = (0, 0),
    leads: tuple[bytes, bytes] = (b"", b""),
    student_end: int | None = None,
) -> TokenizerPair:
    """Return the tables of two tokenizers of transformers.

    Args:
        texts: texts as the teacher writes them.
        sizes: entries of the teacher's and the student's heads.
        leads: what the teacher and the student write in front of an answer (``lead_of``).
        student_end: the student's id that ends an answer; None takes its tokenizer's.
    """
    own = f'[{table}] tokenizer = "own"'
    student_end = student.eos_token_id if student_end is None else student_end
    codes, ends = [], ([*teacher_ends], [student_end])
    both = ((teacher, "the teacher"), (student, "the student"))
    for (tokenizer, who), size, silent in zip(both, sizes, ends, strict=True):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PreflightError(
                f"{own}: {who}'s tokenizer is not of the library `tokenizers`, so its tokens' "
                f"bytes are unknown; choose {who.replace('the', 'a')} with a tokenizer.json."
            )
        try:
            codes.append(TokenBytes(backend, who, size, silent))
        except UnsupportedTokenizer as error:
            raise PreflightError(
                f"{own}: {error}; choose {who.replace('the', 'a')} with a byte-level BPE "
                "tokenizer, or one of sentencepiece's with byte_fallback."
            ) from None
    if not ends[0]:
        raise PreflightError(
            f"{own}: neither the teacher's model nor its tokenizer names an end of text; set "
            "eos_token_id in its generation_config.json."
        )
    if student_end is None:
        raise PreflightError(f"{own}: the student's tokenizer has no end of text; set eos_token.")
    texts = [*texts]
    if are_one(teacher, student, texts[:COUNTED_ANSWERS]):
        raise PreflightError(
            f"{own}, and both tokenizers are the same: leave it out, the comparison is exact and "
            "cheaper without it."
        )
    return TokenizerPair(codes[0], codes[1], ends[0], student_end, texts, leads)


def aligned_share(pair: TokenizerPair, texts: Iterable[str]) -> float:
    """Return the share of the student's tokens that begin where one of the teacher's does."""
    lead = pair.student_lead.decode()
    plans = [plan_of(pair, pair.student.encode(lead + text)) for text in texts]
    found = [one.aligned for plan in plans for one in plan.positions if one is not None]
    return sum(found) / len(found) if found else 1.0


def lead_of(
    tokenizer: Any,
    problem_set: ProblemSet,
    table: str,
    config_of: Callable[[Problem], DataConfig] | None = None,
) -> bytes:
    """Return what a model writes in front of an answer, and is no part of it: a space, or nothing.

    The chat template decides: some write a space between its prompt and the answer, so that the
    first token begins with one. Without a template the answer has the space itself.
    """
    first = {problem.environment: problem for problem in reversed(problem_set.practice)}
    config_of = config_of or problem_set.config_of
    leads = {_lead(tokenizer, one, config_of(one)) for one in first.values()}
    if len(leads) > 1:
        raise PreflightError(
            f'[{table}] tokenizer = "own": with a chat template an answer follows a space, and '
            "without one it does not; set chat_template to one value in all tables of data."
        )
    return leads.pop() if leads else b""


def _lead(tokenizer: Any, problem: Problem, config: DataConfig) -> bytes:
    if not config.chat_template:
        return b""
    before, _ = around_answer(problem, config, tokenizer)
    return b" " if before == " " else b""


def are_one(teacher: Any, student: Any, texts: Sequence[str]) -> bool:
    """Return whether two tokenizers have the same tokens, and split these and other texts alike."""
    try:
        check_tokenizers(student, teacher)
    except PreflightError:
        return False
    return all(
        teacher.encode(text, add_special_tokens=False)
        == student.encode(text, add_special_tokens=False)
        for text in texts
    )


def check_pairs(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to resume under another pair of tokenizers: the teacher's numbers would be others.

    Both arguments have digests by table (``Engine.tokenizer_pairs``).
    """
    for table, digest in now.items():
        if stored.get(table) != digest:
            raise PreflightError(
                f'[{table}] tokenizer = "own": the checkpoint was trained with other tokenizers, '
                "or other texts to count on; bring those back, or start a new run."
            )


def ends_of(model: str | Path) -> list[int] | None:
    """Return what ends a text by a model's files and its chat template, in ascending order.

    None: the model is not on this machine.
    """
    with suppress(ModelUnavailable):
        return sorted({*read_eos_token_ids(model)} | ends_of_chat(load_tokenizer(model)))
    return None


def own_tokenizer_of(model: str | Path, table: str) -> Any:
    """Return the tokenizer of a teacher that has its own."""
    try:
        tokenizer = load_tokenizer(model)
    except ModelUnavailable as error:
        raise PreflightError(
            f'[{table}] tokenizer = "own" needs the teacher\'s tokenizer: give `model` its '
            f"directory or hub id. {error}"
        ) from None
    if tokenizer is None:
        raise PreflightError(
            f'[{table}] tokenizer = "own": {model} has no tokenizer; add its files.'
        )
    return tokenizer
