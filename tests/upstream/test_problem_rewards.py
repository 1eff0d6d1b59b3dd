"""The recipe's problems as an environment: what prime-rl gets for an answer, and under which name.

verifiers is a stand-in with its interface's names, so that these run without a checkout.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel

from prime_composer.problems import metrics
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problems
from prime_composer.problems.metrics import sentence_score
from prime_composer.problems.prompts import render_prompt
from prime_composer.upstream.environment import (
    SETTINGS,
    data_settings,
    make_classes,
)

pytest.importorskip("rouge_score", reason="rouge-score is not installed (extra: metrics)")

T = TypeVar("T")
C = TypeVar("C")

CASES = {
    "math": ({"size": 20}, "correct"),
    "summary": ({"kind": "summary", "metric": "rouge2", "size": 20}, "rouge2"),
}


class Task(Generic[T]):
    def __init__(self, data: Any, config: Any) -> None:
        self.data = data


class Taskset(Generic[T, C]):
    def __init__(self, config: Any) -> None:
        self.config = config


class TaskData(BaseModel):
    idx: int
    prompt: str | list[dict[str, str]]


class TasksetConfig(BaseModel):
    """``system_prompt`` is a file in verifiers."""

    id: str | None = None
    task: Any = None
    system_prompt: Path | None = None


@pytest.fixture(autouse=True)
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that the environment imports."""
    package: Any = ModuleType("verifiers")
    package.v1 = v1 = ModuleType("verifiers.v1")
    v1.TaskData, v1.Task, v1.Taskset = TaskData, Task, Taskset
    v1.TasksetConfig, v1.Trace = TasksetConfig, SimpleNamespace
    v1.reward = lambda weight: lambda function: function
    for module in (package, v1):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def half_right(settings: dict[str, Any], answer: str) -> float:
    """Return what the first half of a right answer is worth."""
    metric = settings.get("metric", "gsm8k")
    return sentence_score(metric, half(answer), answer) if metric in metrics.GRADED else 0.0


def half(answer: str) -> str:
    return answer[: len(answer) // 2]


@pytest.mark.parametrize("case", CASES)
def test_environment_rewards_by_the_metric(case: str) -> None:
    """A mapping gives a reward its own name: prime-rl logs it."""
    settings, name = CASES[case]
    classes: dict[str, Any] = make_classes()
    config = DataConfig(**settings)
    written = data_settings(config)  # as the export does
    assert DataConfig.model_validate(written) == config
    taskset = classes["ProblemTaskset"](classes["ProblemTasksetConfig"](**written))
    task = taskset.load()[0]
    train, _ = load_problems(config)
    assert (task.data.question, task.data.answer) == (train[0].question, train[0].answer)

    def rewarded(text: str | None) -> Any:
        return asyncio.run(task.correct(SimpleNamespace(last_reply=text)))

    named = (lambda value: value) if name == "correct" else (lambda value: {name: value})
    assert rewarded(task.data.answer) == named(1.0)
    assert rewarded(half(task.data.answer)) == named(half_right(settings, task.data.answer))
    assert rewarded(None) == named(0.0)


def test_settings_are_no_keys_of_verifiers_own() -> None:
    """Such a key would be read as verifiers means it."""
    assert not set(SETTINGS) & set(TasksetConfig.model_fields)


TURNS = [
    {"role": "user", "content": "Who is Ada?"},
    {"role": "assistant", "content": " A friend. "},
    {"role": "user", "content": "How old is she?"},
    {"role": "assistant", "content": "57"},
]
OWN_SYSTEM = {"role": "system", "content": "Shout."}
CHATS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "own system": (
        {"messages_key": "m", "metric": "contains", "system": "Be brief."},
        [OWN_SYSTEM, *TURNS[:3]],
    ),
    "column": (
        {"prompt_key": "q", "metric": "none", "system_key": "s", "prompt_template": "{question}"},
        [OWN_SYSTEM, {"role": "user", "content": "How old is she?"}],
    ),
    "template": (
        {"prompt_key": "q", "answer_key": "a", "metric": "exact", "system": "Be brief."},
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Question: How old is she?\nAnswer:"},
        ],
    ),
}
"""Settings, and the messages that a model reads. The row is ``row_of``."""


def row_of() -> dict[str, Any]:
    return {"m": [OWN_SYSTEM, *TURNS], "q": "How old is she?", "a": "57", "s": "Shout."}


class SpellsChats:
    """A tokenizer whose tokens are the letters of a chat in JSON."""

    chat_template = "there is one"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode()]

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> str:
        return json.dumps(conversation)


@pytest.mark.parametrize("case", CHATS)
def test_environment_asks_what_one_machine_asks(case: str, tmp_path: Path) -> None:
    """Token for token, whatever the tokenizer, and as the export writes the settings."""
    settings, messages = CHATS[case]
    path = tmp_path / "rows.jsonl"
    numbered = [
        json.dumps(row_of()).replace("57", str(number)).replace("Ada", f"Ada {number}")
        for number in range(20)
    ]
    path.write_text(
        "\n".join(row.replace("How old is", f"{n}: How old is") for n, row in enumerate(numbered))
    )
    config = DataConfig(path=path, **settings)
    written = data_settings(config)
    assert DataConfig.model_validate(written) == config
    train, held_out = load_problems(config)
    assert (len(train), len(held_out)) == (18, 2)
    tokenizer = SpellsChats()
    here = [bytes(render_prompt(problem, config, tokenizer)).decode() for problem in train]
    number = int(train[0].question.split(":")[0])
    first = json.dumps(messages).replace("Ada", f"Ada {number}")
    assert here[0] == first.replace("How old is", f"{number}: How old is")

    classes: dict[str, Any] = make_classes()
    tasks = classes["ProblemTaskset"](classes["ProblemTasksetConfig"](**written)).load()
    asked = [task.data.prompt for task in tasks]
    as_user = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in asked]
    assert [json.dumps(one) for one in as_user] == here


def test_answers_that_are_not_graded_have_no_reward(tmp_path: Path) -> None:
    """And none is logged as 0."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(20)))
    settings = {"source": "files", "path": str(path), "metric": "none"}
    classes: dict[str, Any] = make_classes()
    (task, *_) = classes["ProblemTaskset"](classes["ProblemTasksetConfig"](**settings)).load()
    assert (
        task.data.answer == "" and asyncio.run(task.correct(SimpleNamespace(last_reply="x"))) == {}
    )
