"""Describe the data of a recipe: its ``[data]`` table, and a problem.

A problem is a question and a worked answer that ends in ``#### <number>``, the format of GSM8K
(Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021,
https://arxiv.org/abs/2110.14168).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

FINAL_MARK = "####"

PROBLEMS = "problems"
"""The environment's name where a recipe has a single ``[data]``."""


def checked_weights(
    teacher: str | dict[str, float] | None,
) -> str | dict[str, float] | None:
    """Return an environment's ``teacher`` as it is.

    Raises:
        ValueError: it is a mixture without a positive weight for each.
    """
    if isinstance(teacher, dict) and (
        not teacher or not all(0 < weight < float("inf") for weight in teacher.values())
    ):
        raise ValueError("a mixture is a table of name = weight, each weight above 0")
    return teacher


class DataConfig(BaseModel):
    """The problems to train on and to test on, their prompts, and how answers are checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    source: Literal["generated", "jsonl", "hub"] = "generated"
    """``generated``: word problems made on the spot, no file or network. ``jsonl``: JSONL files at
    ``path``. ``hub``: a data set of the Hugging Face hub, through the ``datasets`` library."""

    path: Path | None = None
    """For ``jsonl``: a folder that contains ``train.jsonl`` and ``test.jsonl``, or one JSONL file,
    of which ``hold_out`` is set aside. Each line is an object with the strings "question" and
    "answer". The answer ends in ``#### <number>``."""

    hub_id: str = "openai/gsm8k"
    """For ``hub``: the data set's id. Its splits are ``train`` and ``test``."""

    hub_name: str = "main"
    """For ``hub``: the configuration of that data set."""

    size: int = Field(default=8000, ge=20, le=100_000)
    """For ``generated``: number of distinct problems, held-out ones included."""

    seed: int = 0
    """For ``generated``: seed of the problems."""

    operations: tuple[Literal[1, 2, 3], ...] = Field(default=(1, 2, 3), min_length=1)
    """For ``generated``: the numbers of operations that a problem may take."""

    hold_out: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the distinct questions set aside for testing, where the source has no test split."""

    calculator_annotations: bool = False
    """Keep GSM8K's inline calculator annotations, ``<<48/2=24>>``, in the worked answers."""

    prompt_template: str = "Question: {question}\nAnswer:"
    """The prompt, with ``{question}`` where the question goes. With ``chat_template`` it is the
    user's message."""

    chat_template: bool = False
    """Send the prompt as one user message through the tokenizer's chat template. For chat
    models."""

    answer_check: Literal["gsm8k", "math_verify"] = "gsm8k"
    """``gsm8k``: the number after the first ``####`` must equal the reference's, exactly, as a
    decimal number. ``math_verify``: the Math-Verify library extracts an answer from free text and
    LaTeX."""

    ratio: float = Field(default=1.0, gt=0.0)
    """Share of the prompts, relative to the other ``[environments]``."""

    teacher: str | dict[str, float] | None = None
    """With ``[teachers]``: the one that scores these problems' rollouts, or a table ``name =
    weight``, a mixture of several. Unset: all of them, by their own weights."""

    teacher_key: str | None = None
    """For ``jsonl`` and ``hub``, with ``[teachers]``: the key under which a row names its teacher.
    A row without it is scored as ``teacher`` says."""

    @field_validator("teacher")
    @classmethod
    def _check_weights(
        cls, teacher: str | dict[str, float] | None
    ) -> str | dict[str, float] | None:
        return checked_weights(teacher)

    @field_validator("prompt_template")
    @classmethod
    def _check_prompt_template(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("prompt_template must contain {question}, where the question goes")
        return template

    @model_validator(mode="after")
    def _check_source(self) -> "DataConfig":
        if self.source == "jsonl" and self.path is None:
            raise ValueError(
                'source = "jsonl" needs path, a folder with train.jsonl and test.jsonl '
                "(GSM8K's own: https://github.com/openai/grade-school-math)"
            )
        if self.source != "jsonl" and self.path is not None:
            raise ValueError(
                f'path is read only with source = "jsonl", and source = {self.source!r}'
            )
        if self.source == "generated" and self.teacher_key is not None:
            raise ValueError(
                "teacher_key names a key of the data's rows, and generated problems have none: "
                "use `teacher`"
            )
        return self


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in ``#### <number>``.

    Attributes:
        environment: the recipe's environment that it belongs to.
        teacher: the teacher that its row names, if any.
    """

    question: str
    answer: str
    environment: str = PROBLEMS
    teacher: str | None = None

    @property
    def final(self) -> str:
        """The text after the last ``####``: the reference's number, as written."""
        return self.answer.rpartition(FINAL_MARK)[2].strip()


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...
