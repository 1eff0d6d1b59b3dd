"""A loss from outside the package, ``my_loss:huber`` of tests/examples, trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.tracker import read_metrics
from tests.local.helpers import run

Raw = Callable[..., dict[str, Any]]
EXAMPLES = Path(__file__).parents[1] / "examples"
HUBER = {"type": "my_loss:huber", "delta": 2.0}


@pytest.fixture
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``my_loss`` importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples_on_path")
def test_outside_loss_trains(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Its own metric falls."""
    raw = tiny_recipe(
        loss=HUBER,
        trainer={"steps": 12, "batch_size": 32, "lr": 2e-2},
        eval={"every": 0, "size": 2, "kl_size": 0},
    )
    run(raw, tmp_path / "run")
    gaps = [record["my_loss:huber/gap"] for record in read_metrics(tmp_path / "run")[1:]]
    assert sum(gaps[-3:]) < 0.9 * sum(gaps[:3])


@pytest.mark.usefixtures("examples_on_path")
def test_outside_loss_is_a_channel_of_compose(tiny_recipe: Raw, tmp_path: Path) -> None:
    """As a channel its metrics are logged by the channel's name, and its value is in the sum."""
    distillation = {"huber": {"weight": 0.5, "loss": HUBER}}
    raw = tiny_recipe(
        loss={"type": "compose", "distillation": distillation},
        rollout__group_size=2,
        trainer={"steps": 2, "batch_size": 4},
    )
    run(raw, tmp_path / "run")
    record = read_metrics(tmp_path / "run")[2]
    assert record["compose/huber/gap"] > 0
    expected = record["compose/rl/loss"] + 0.5 * record["compose/huber/loss"]
    assert record["loss"] == pytest.approx(expected, abs=1e-6)
