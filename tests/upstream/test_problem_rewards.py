"""The recipe's problems as an environment: what prime-rl gets for an answer, and under which name.

verifiers is a stand-in with its two interfaces' names, so that these run without a checkout.
"""

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel

from prime_composer.problems import metrics
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problems
from prime_composer.problems.metrics import sentence_score
from prime_composer.upstream.environment import (
    data_settings,
    load_environment,
    load_split,
    make_classes,
)

pytest.importorskip("rouge_score", reason="rouge-score is not installed (extra: metrics)")
pytest.importorskip("sacrebleu", reason="sacrebleu is not installed (extra: metrics)")

T = TypeVar("T")
C = TypeVar("C")

CASES = {
    "math": ({"size": 20}, "correct"),
    "summary": ({"kind": "summary", "metric": "rouge2", "size": 20}, "rouge2"),
    "translation": ({"kind": "translation", "metric": "bleu", "size": 20}, "bleu"),
    "exact": ({"kind": "translation", "metric": "exact", "size": 20}, "correct"),
}


class Task(Generic[T]):
    def __init__(self, data: Any, config: Any) -> None:
        self.data = data


class Taskset(Generic[T, C]):
    def __init__(self, config: Any) -> None:
        self.config = config


class TaskData(BaseModel):
    idx: int
    prompt: str


class TasksetConfig(BaseModel):
    task: Any = None


@pytest.fixture(autouse=True)
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that the environment imports."""
    first: Any = ModuleType("verifiers")
    first.SingleTurnEnv = first.Rubric = SimpleNamespace
    second: Any = ModuleType("verifiers.v1")
    second.TaskData, second.Task, second.Taskset = TaskData, Task, Taskset
    second.TasksetConfig, second.Trace = TasksetConfig, SimpleNamespace
    second.reward = lambda weight: lambda function: function
    first.v1 = second
    datasets: Any = ModuleType("datasets")
    datasets.Dataset = SimpleNamespace(from_list=list)
    for name, module in (("verifiers", first), ("verifiers.v1", second), ("datasets", datasets)):
        monkeypatch.setitem(sys.modules, name, module)


def half_right(settings: dict[str, Any], answer: str) -> float:
    """Return what the first half of a right answer is worth."""
    metric = settings.get("metric", "gsm8k")
    return sentence_score(metric, half(answer), answer) if metric in metrics.GRADED else 0.0


def half(answer: str) -> str:
    return answer[: len(answer) // 2]


@pytest.mark.parametrize("case", CASES)
def test_first_interface_rewards_by_the_metric(case: str) -> None:
    """The function that scores is named after what it measures: prime-rl logs that name."""
    settings, name = CASES[case]
    environment = load_environment(**settings)
    (score,) = environment.rubric.funcs
    assert score.__name__ == name
    row = environment.dataset[0]
    said = [{"role": "assistant", "content": row["answer"]}]
    assert score(said, row["answer"], row["info"]) == 1.0
    value = half_right(settings, row["answer"])
    assert score(half(row["answer"]), row["answer"], row["info"]) == value
    assert len(environment.dataset) == 18 and len(environment.eval_dataset) == 2


@pytest.mark.parametrize("case", CASES)
def test_second_interface_rewards_by_the_metric(case: str) -> None:
    """A mapping gives a reward its own name."""
    settings, name = CASES[case]
    classes: dict[str, Any] = make_classes()
    taskset = classes["ProblemTaskset"](classes["ProblemTasksetConfig"](**settings))
    task = taskset.load()[0]
    train, _ = load_problems(DataConfig(**settings))
    assert (task.data.question, task.data.answer) == (train[0].question, train[0].answer)

    def rewarded(text: str | None) -> Any:
        return asyncio.run(task.correct(SimpleNamespace(last_reply=text)))

    named = (lambda value: value) if name == "correct" else (lambda value: {name: value})
    assert rewarded(task.data.answer) == named(1.0)
    assert rewarded(half(task.data.answer)) == named(half_right(settings, task.data.answer))
    assert rewarded(None) == named(0.0)


def test_environment_settings_make_the_same_problems() -> None:
    """What the export writes is read as the same table."""
    for settings, _ in CASES.values():
        config = DataConfig(**settings)
        assert DataConfig.model_validate(data_settings(config)) == config


def test_environment_without_the_library_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """prime-rl's environment workers say so when they load the problems."""
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs rouge-score: pip install"):
        load_split(DataConfig(kind="summary", metric="rouge2", size=20), "train", None)
