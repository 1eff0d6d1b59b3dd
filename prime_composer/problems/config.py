"""Describe the data of a recipe: its ``[data]`` table, and a problem.

A problem is a question and its answer, if there is one. That of a math problem is worked, and ends
in ``#### <number>``, the format of GSM8K (Cobbe et al., "Training Verifiers to Solve Math Word
Problems", 2021, https://arxiv.org/abs/2110.14168).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    get_args,
    runtime_checkable,
)

from pydantic import AfterValidator, Field, field_validator, model_validator

from prime_composer.tables import Table

FINAL_MARK = "####"

MathMetric = Literal["gsm8k", "math_verify"]  # A number or formula is compared

GradedMetric = Literal["rouge2", "rougeL", "bleu", "chrf"]  # Any value in [0, 1]

Metric = Literal[
    MathMetric, Literal["exact", "contains", "short_answer"], GradedMetric, Literal["none"]
]

Topic = Literal["ages", "towns", "jobs", "copies", "capitals"]  # A capital is not in the prompt

MATH: tuple[str, ...] = get_args(MathMetric)
GRADED: tuple[str, ...] = get_args(GradedMetric)

USUAL_METRIC = {"summary": "rouge2", "translation": "bleu", "facts": "short_answer"}
"""``kind`` of generated problems -> the metric that fits, where that is not "exact"."""

PROBLEMS = "problems"  # The environment's name where a recipe has a single ``[data]``


def _checked_weights(
    teacher: str | dict[str, float] | None,
) -> str | dict[str, float] | None:
    """Return an environment's ``teacher``. Each weight of a mixture has to be above 0."""
    if isinstance(teacher, dict) and (
        not teacher or not all(0 < weight < float("inf") for weight in teacher.values())
    ):
        raise ValueError("a mixture is a table of name = weight, each weight above 0")
    return teacher


# Keys of ``[data]`` that need a chat template
CHAT_KEYS = ("messages_key", "system", "system_key", "template_args")

# (key, another one, the value with which the first is read)
READ_ONLY_WITH = (
    ("path", "source", "files"),
    ("kind", "source", "generated"),
    ("operations", "kind", "arithmetic"),
    ("topics", "kind", "facts"),
)

TeacherWeights = Annotated[str | dict[str, float] | None, AfterValidator(_checked_weights)]
"""Type of an environment's ``teacher``: a name, or a mixture ``name = weight``."""


class Used:
    """What the keys ``use`` and ``ratio`` of a table of problems or tasks mean."""

    if TYPE_CHECKING:
        use: Literal["both", "train", "eval"]
        model_fields_set: set[str]

    @property
    def trains(self) -> bool:
        return self.use != "eval"

    @property
    def evaluates(self) -> bool:
        return self.use != "train"

    def refusals(self) -> Iterator[str]:
        if not self.trains and "ratio" in self.model_fields_set:
            yield 'ratio is a share of the prompts to train on, and use is "eval"'


class DataConfig(Used, Table):
    """The problems to train on and to test on, their prompts, and how answers are graded."""

    source: Literal["generated", "files", "jsonl", "hub", "rows"] = "generated"
    """``generated``: without files or network. ``files`` (or ``jsonl``): the files at ``path``,
    which implies it. ``hub``: a data set of the Hugging Face hub, through ``datasets``. ``rows``:
    given to ``prime_composer.distill``."""

    path: Path | None = None
    """For ``files``: a JSONL (maybe gzipped), CSV or parquet file, or a folder of them. Files whose
    names begin with ``train`` and ``test`` are trained on and held out; otherwise ``hold_out``
    splits the rows."""

    hub_id: str = "openai/gsm8k"
    """For ``hub``: the data set's id. Its splits are ``train`` and ``test``."""

    hub_name: str = "main"
    """For ``hub``: the configuration of that data set."""

    prompt_key: str = Field(default="question", min_length=1)
    """The column of the prompt's text. A dot leads into an object: ``translation.en``."""

    answer_key: str = Field(default="answer", min_length=1)
    """The column of the answer, a text or a number. For ``gsm8k`` it ends in ``#### <number>``.
    With ``metric = "none"`` it may be missing."""

    messages_key: str | None = Field(default=None, min_length=1)
    """The column of a conversation, instead of the two above: a list of ``role`` (system, user,
    assistant) and ``content``, ShareGPT's ``from`` and ``value``, or such a list as a JSON string.
    A last message of the assistant is the answer. Implies ``chat_template``; ``prompt_template``
    stays ``{question}``."""

    system: str | None = Field(default=None, min_length=1)
    """System message of each conversation that has none of its own. Implies ``chat_template``."""

    system_key: str | None = Field(default=None, min_length=1)
    """The column of a row's own system message, which may be empty. Implies ``chat_template``."""

    template_args: dict[str, Any] | None = Field(default=None, min_length=1)
    """Variables of the tokenizer's chat template, for example ``{ enable_thinking = false }``.
    Implies ``chat_template``."""

    limit: int | None = Field(default=None, ge=2)
    """Read only the first so many rows of each part."""

    prompt_chars: int | None = Field(default=None, ge=1)
    """Cut the prompt's text after so many characters."""

    clean: bool = False
    """Leave out and count rows without text, rows whose answer the metric cannot use, and rows to
    train on that are held out as well. Otherwise they are errors."""

    kind: Literal["arithmetic", "summary", "translation", "reversal", "lookup", "facts"] = (
        "arithmetic"
    )
    """For ``generated``: word problems, reports with a summary, English sentences with their German
    translation, words to be reversed, numbers to be looked up, or facts about invented people with
    a question, for chat models."""

    size: int = Field(default=8000, ge=20, le=100_000)
    """For ``generated``: number of distinct problems, held-out ones included."""

    seed: int = 0
    """For ``generated``: seed of the problems."""

    operations: tuple[Literal[1, 2, 3], ...] = Field(default=(1, 2, 3), min_length=1)
    """For ``arithmetic``: the numbers of operations that a problem may take."""

    topics: tuple[Topic, ...] = Field(default=("ages", "towns", "jobs"), min_length=1)
    """For ``facts``: what is asked about, in turn. ``copies`` are sentences to be repeated,
    ``capitals`` those of real countries, which no prompt contains: for ``use = "eval"``."""

    hold_out: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the distinct questions set aside for testing, if the source has no test split."""

    use: Literal["both", "train", "eval"] = "both"
    """Whether its problems are trained on, evaluated, or both. With ``train`` nothing is set aside,
    with ``eval`` everything."""

    calculator_annotations: bool = False
    """Keep GSM8K's inline calculator annotations, ``<<48/2=24>>``, in the worked answers."""

    prompt_template: str = "Question: {question}\nAnswer:"
    """The prompt, with ``{question}`` where the question goes. With ``chat_template`` it is the
    user's message, of a conversation the last one."""

    chat_template: bool = False
    """Send the prompt as a user message through the tokenizer's chat template. For chat models."""

    metric: Metric = "gsm8k"
    """How an answer is graded (recipes/grading.md). ``gsm8k``: the number after ``####``.
    ``math_verify``: free text and LaTeX. ``exact``: the text. ``contains``: the reference occurs.
    ``short_answer``: it occurs, and nothing contradicts it. ``rouge2``, ``rougeL``, ``bleu``,
    ``chrf``: similarity of texts. ``none``: rows need no answers."""

    ratio: float = Field(default=1.0, gt=0.0)
    """Share of the prompts, relative to the other ``[environments]``."""

    teacher: TeacherWeights = None
    """With ``[teachers]``: the one that scores these problems' rollouts, or a table ``name =
    weight``, a mixture of several. Unset: all of them, by their own weights."""

    teacher_key: str | None = None
    """With ``[teachers]``: the column that names a row's teacher. Others are scored as ``teacher``
    says."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        """Set what other keys imply."""
        if not isinstance(table, dict):
            return table
        implied: dict[str, Any] = {}
        if table.get("path") is not None:
            implied["source"] = "files"
        if any(table.get(key) is not None for key in CHAT_KEYS):
            implied["chat_template"] = True
        if table.get("messages_key") is not None:
            implied["prompt_template"] = "{question}"
        filled = implied | table
        return filled | {"source": "files"} if filled.get("source") == "jsonl" else filled

    @field_validator("prompt_template")
    @classmethod
    def _check_prompt_template(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("prompt_template must contain {question}, where the question goes")
        return template

    def refusals(self) -> Iterator[str]:
        if self.source == "files" and self.path is None:
            yield (
                'source = "files" needs path, a JSONL or parquet file, or a folder of them '
                "(GSM8K's own: https://github.com/openai/grade-school-math)"
            )
        for key, other, value in READ_ONLY_WITH:
            now = getattr(self, other)
            if getattr(self, key) != type(self).model_fields[key].default and now != value:
                yield (
                    f'{key} is read only with {other} = "{value}", and {other} = "{now}": leave '
                    "one of them out"
                )
        of_rows = ("teacher_key", "messages_key", "system_key")
        given = [key for key in of_rows if getattr(self, key) is not None]
        if self.source == "generated" and given:
            instead = {"teacher_key": "teacher", "system_key": "system"}.get(given[0])
            yield (
                f"{given[0]} names a key of the data's rows, and generated problems have none: "
                + (f"use `{instead}`" if instead else "leave it out, or set path")
            )
        if self.kind != "arithmetic" and self.metric in MATH:
            usual = USUAL_METRIC.get(self.kind, "exact")
            yield (
                f'metric = "{self.metric}" reads the number after "{FINAL_MARK}", and kind = '
                f'"{self.kind}" has none: set metric = "{usual}"'
            )
        if self.kind == "facts" and "capitals" in self.topics and self.trains:
            yield (
                'topics has "capitals", which no prompt contains, so that training on some says '
                'nothing about others: write them into a table of their own with use = "eval"'
            )
        if self.use != "both" and self.hold_out != DataConfig.model_fields["hold_out"].default:
            what = "nothing" if self.use == "train" else "everything"
            yield f'with use = "{self.use}" {what} is held out: leave hold_out out'
        yield from super().refusals()
        chat = [key for key in CHAT_KEYS if getattr(self, key) is not None]
        if chat and not self.chat_template:
            yield (
                f"{chat[0]} goes through the tokenizer's chat template: leave "
                "chat_template = false out"
            )
        alone = {"prompt_key", "answer_key"} & self.model_fields_set
        if self.messages_key is not None and any(
            getattr(self, key) != type(self).model_fields[key].default for key in alone
        ):
            yield (
                f"messages_key and {min(alone)}: a conversation has its prompt and its answer, so "
                "keep one of them"
            )

    @property
    def scored(self) -> bool:
        """Whether answers are graded at all."""
        return self.metric != "none"

    @property
    def graded(self) -> bool:
        """Whether an answer may get any value in [0, 1]. Otherwise it is right or wrong."""
        return self.metric in GRADED

    @property
    def score_name(self) -> str:
        """The name of the mean over many answers: "accuracy", or that of a graded metric."""
        return self.metric if self.graded else "accuracy"


class Message(NamedTuple):
    """A message before the question."""

    role: str
    content: str
    reasoning: str = ""  # what the assistant thought, where the data has it apart


Asked = tuple[tuple[Message, ...], str]  # The conversation before, and the question


@dataclass(frozen=True)
class Problem:
    """A question and its answer."""

    question: str  # of a conversation its last user's message
    answer: str  # the reference; empty where the data has none
    environment: str = PROBLEMS  # that it belongs to
    teacher: str | None = None  # that its row names, if any
    # the messages of a task's solved rollout, which small models learn from, as JSON
    transcript: str | None = None
    context: tuple[Message, ...] = ()  # the messages before the question
    reasoning: str = ""  # what the answer's author thought, where the data has it apart

    @property
    def asked(self) -> Asked:
        """What no problem that is held out may share with one that is trained on."""
        return self.context, self.question

    @property
    def final(self) -> str:
        """A math problem's reference, as written: the text after the last ``####``, if any."""
        return self.answer.rpartition(FINAL_MARK)[2].strip()

    def reference(self, metric: str) -> str:
        """Return what an answer is compared with."""
        return self.final if metric in MATH else self.answer


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...
