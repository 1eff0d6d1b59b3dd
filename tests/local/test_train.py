"""The one-machine loop on models of a few thousand parameters, on the transformers backend."""

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.local.answers import read_answers
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.student import lr_factor
from prime_composer.local.tracker import read_metrics
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step import gradients as gradients_module
from prime_composer.step.gradients import NonFiniteLoss
from tests.command import numbers
from tests.fork_server import REPO, ForkServer
from tests.local.helpers import Silent, run, weights

Raw = Callable[..., dict[str, Any]]


def test_lr_factor_warms_up_and_decays() -> None:
    """The learning rate warms up linearly and decays as the schedule is written."""
    linear = TrainerConfig(steps=6, warmup_steps=2, schedule="linear")
    assert [lr_factor(linear, step) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = TrainerConfig(steps=4, schedule="cosine")
    assert [lr_factor(cosine, step) for step in (1, 3)] == pytest.approx([1.0, 0.5])
    constant = TrainerConfig(steps=3, warmup_steps=1)
    assert [lr_factor(constant, step) for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_train_measures_logs_and_keeps_checkpoints(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Every step is shown and logged; evaluations and checkpoints come when they are due."""
    display = Silent()
    outcome = run(tiny_recipe(trainer__steps=5, checkpoint__keep=2), tmp_path / "run", display)
    assert display.steps == [1, 2, 3, 4, 5] and not outcome.interrupted and outcome.steps == 5
    assert sorted(outcome.evaluations) == [0, 2, 4, 5]
    assert {"eval/accuracy", "eval/reverse_kl", "teacher/accuracy"} <= outcome.evaluations[0].keys()
    assert display.started == outcome.evaluations[0]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [4, 5]
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5]
    expected = {"loss", "grad_norm", "lr", "topk_reverse_kl/kl", "rollout/truncated"}
    assert expected <= records[3].keys()


KILLED = """
import json, os, signal, sys
from pathlib import Path
from prime_composer.local import checkpoint
from tests.local.helpers import run

save = checkpoint.torch.save
def torn(state, file):
    if state["step"] < 4:
        return save(state, file)
    file.write(b"torn")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.torch.save = torn
run(json.loads(sys.argv[1]), Path(sys.argv[2]))
"""


def test_train_killed_run_resumes_to_the_same_numbers(
    whole: Path, tiny_recipe: Raw, tmp_path: Path, engine_forks: ForkServer
) -> None:
    """SIGKILL in a checkpoint's file, after the steps 3 and 4, loses nothing that was saved."""
    raw = tiny_recipe()
    killed = engine_forks.run("-c", KILLED, json.dumps(raw), tmp_path / "cut", cwd=REPO)
    assert killed.returncode == -signal.SIGKILL
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "cut")] == [2]
    assert read_metrics(tmp_path / "cut")[-1]["step"] >= 3
    run(raw, tmp_path / "cut", resume=True)
    assert not list((tmp_path / "cut" / "checkpoints").glob("*.tmp"))
    assert_same_run(tmp_path / "cut", whole)


def assert_same_run(run_dir: Path, expected: Path) -> None:
    assert numbers(run_dir) == numbers(expected)
    assert read_answers(run_dir) == read_answers(expected)
    assert read_answers(run_dir, "teacher") == read_answers(expected, "teacher")
    assert_same_weights(run_dir, expected)


def assert_same_weights(run_dir: Path, expected: Path) -> None:
    expected_weights = weights(expected)
    for name, value in weights(run_dir).items():
        assert torch.equal(expected_weights[name], value)


def infinite_score(inputs: LossInputs) -> None:
    inputs.support.teacher_logprobs[0] = math.inf


def infinite_gradient(inputs: LossInputs) -> None:
    inputs.support.student_logprobs.register_hook(lambda gradient: gradient * math.nan)


@pytest.mark.parametrize(
    ("poison", "message"),
    [(infinite_score, "step 4"), (infinite_gradient, "step 4: the gradient of .* is nan")],
)
def test_train_diverging_run_keeps_the_last_good_checkpoint(
    poison: Callable[[LossInputs], None],
    message: str,
    tiny_recipe: Raw,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of step 4 is not finite, or its gradient alone is not: no weight changes."""
    original = gradients_module.student_inputs

    def poisoned(*args: Any) -> LossInputs:
        inputs = original(*args)
        if len(display.steps) == 3:
            poison(inputs)
        return inputs

    display = Silent()
    monkeypatch.setattr(gradients_module, "student_inputs", poisoned)
    with pytest.raises(NonFiniteLoss, match=message):
        run(tiny_recipe(trainer__steps=6), tmp_path / "run", display)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [2]
