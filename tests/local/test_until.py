"""Runs that end by a plateau."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.evaluate import Evaluator
from tests.local.helpers import Silent, run

Raw = Callable[..., dict[str, Any]]
METRIC = "eval/accuracy"


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let evaluations measure these accuracies, one after the other, of step 0 first."""
    values: list[float] = []
    monkeypatch.setattr(Evaluator, "student", lambda self: {METRIC: values.pop(0)})
    return values


def until(plateau: int = 2) -> dict[str, Any]:
    return {"metric": METRIC, "plateau": plateau}


def of_until(tiny_recipe: Raw, **changes: Any) -> dict[str, Any]:
    own = {"trainer__steps": 12, "trainer__until": until(), "eval__every": 2}
    return tiny_recipe(**own | {"checkpoint__every": 5} | changes)


def test_run_ends_where_the_metric_is_on_its_plateau(
    accuracies: list[float], tiny_recipe: Raw, tmp_path: Path
) -> None:
    """It is best after step 2; steps 4 and 6 are no better. The step is saved out of turn."""
    accuracies += [0.25, 0.5, 0.25, 0.5]
    display = Silent()
    outcome = run(of_until(tiny_recipe), tmp_path / "run", display)
    assert (outcome.steps, outcome.best, outcome.interrupted) == (6, 2, False)
    assert accuracies == []
    assert list_checkpoints(tmp_path / "run")[-1].step == 6
    (line,) = [text for text in display.texts if "trainer.until" in text]
    assert line.startswith("step 6: ") and "eval/accuracy was better than 0.5, of step 2" in line
    again = Silent()  # resumed, it trains no more
    outcome = run(of_until(tiny_recipe), tmp_path / "run", again, resume=True)
    assert (outcome.steps, outcome.best, outcome.interrupted, again.steps) == (6, 2, False, [])
