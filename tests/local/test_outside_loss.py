"""A loss from outside the package, ``my_loss:huber`` of tests/examples, trains and resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import main
from prime_composer.local.tracker import read_metrics
from tests.command import numbers, toml
from tests.local.helpers import copy_first_half, run

Raw = Callable[..., dict[str, Any]]
EXAMPLES = Path(__file__).parents[1] / "examples"
HUBER = {"type": "my_loss:huber", "delta": 2.0}


@pytest.fixture
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``my_loss`` importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples_on_path")
def test_outside_loss_trains_and_resumes(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Its own metric falls, and a resumed run repeats the numbers of the whole one."""
    raw = tiny_recipe(
        loss=HUBER,
        trainer={"steps": 24, "batch_size": 64, "lr": 2e-2},
        eval={"every": 0, "size": 2, "kl_size": 0},
        checkpoint={"every": 2, "keep": 20},
    )
    run(raw, tmp_path / "whole")
    gaps = [record["my_loss:huber/gap"] for record in read_metrics(tmp_path / "whole")[1:]]
    assert sum(gaps[-3:]) < 0.9 * sum(gaps[:3])
    whole = numbers(tmp_path / "whole")
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == whole


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


@pytest.mark.usefixtures("examples_on_path")
def test_outside_loss_is_checked_by_the_command_line(
    tiny_recipe: Raw, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``prime-rl check`` fills in its defaults, and refuses a wrong knob by name."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml(tiny_recipe(loss={"type": "my_loss:huber"})))
    assert main(["check", str(recipe)]) == 0
    assert '"delta": 1.0' in capsys.readouterr().out
    assert main(["check", str(recipe), "--set", "loss.delta=-1"]) == 2
    assert "loss.delta" in capsys.readouterr().err
