"""Every objective through the one-machine loop."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.tracker import read_metrics
from prime_composer.losses import LOSS_TYPES
from tests.local.helpers import copy_first_half, run

Raw = Callable[..., dict[str, Any]]

KNOBS = {
    "topk_reverse_kl": {"k": 8},
    "topk_forward_kl": {"k": 8},
    "generalized_jsd": {"k": 8, "beta": 0.3},
    "head_tail_reverse_kl": {"k": 8},
    "taid": {"k": 8, "total_steps": 2},
    "entropy_aware_opd": {"tau": 0.5, "alpha": 1.0, "k": 8},
    "self_distillation": {"k": 8},
}
DISTILLATION = [
    name
    for name, config in LOSS_TYPES.items()
    if config.channel == "distillation" and name not in ("sft", "compose") and ":" not in name
]


def records(raw: dict[str, Any], run_dir: Path, resume: bool = False) -> list[dict[str, float]]:
    run(raw, run_dir, resume=resume)
    return read_metrics(run_dir)


@pytest.mark.parametrize("name", DISTILLATION)
def test_distillation_loss_trains_and_logs_at_every_step(
    name: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Each loss has a finite value, a gradient, and the same metrics at every step."""
    raw = tiny_recipe(loss={"type": name, **KNOBS.get(name, {})}, trainer__steps=2)
    raw["eval"] = {"every": 0, "size": 2, "kl_size": 2}
    _, *steps = records(raw, tmp_path / "run")
    keys = [{key for key in record if key.startswith(f"{name}/")} for record in steps]
    assert keys[0] == keys[1] and keys[0]
    assert all(record["grad_norm"] > 0 and math.isfinite(record["loss"]) for record in steps)


def test_taid_schedule_moves_and_survives_a_resume(tiny_recipe: Raw, tmp_path: Path) -> None:
    """The schedule advances with optimizer steps, and a resumed run continues it."""
    raw = tiny_recipe(
        loss={"type": "taid", "k": 8, "total_steps": 4},
        trainer={"steps": 4, "batch_size": 6, "micro_batch_tokens": 60},
        checkpoint={"every": 2},
    )
    whole = [record["taid/t"] for record in records(raw, tmp_path / "whole")[1:]]
    assert whole == sorted(whole) and whole[-1] > whole[0]
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    resumed = records(raw, tmp_path / "cut", resume=True)
    assert [record["taid/t"] for record in resumed[1:]] == whole


def test_self_distillation_resumes_with_the_teachers_weights(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    """A moving teacher's weights are in the checkpoint: a resumed run has the same losses."""
    raw = tiny_recipe(
        teacher={"policy": {"hint": "feedback", "update": "sync", "sync_every": 1}},
        loss={"type": "self_distillation", "k": 8, "chosen_by": "student"},
        rollout__max_model_len=256,
        trainer={"steps": 4, "batch_size": 6, "lr": 1e-2},
        checkpoint={"every": 2, "keep": 2},
    )
    whole = records(raw, tmp_path / "whole")
    assert {"teacher/accuracy", "eval/accuracy"} <= whole[0].keys()
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    resumed = records(raw, tmp_path / "cut", resume=True)
    assert [record["loss"] for record in resumed[1:]] == [record["loss"] for record in whole[1:]]


def test_rollouts_without_a_hint_train_nothing(tiny_recipe: Raw, tmp_path: Path) -> None:
    """The tiny student is never right, so no rollout has a correct sibling; they are counted."""
    raw = tiny_recipe(
        teacher={"policy": {"hint": "sibling"}},
        loss={"type": "self_distillation", "k": 8},
        rollout={"backend": "transformers", "max_tokens": 8, "max_model_len": 256, "group_size": 2},
        trainer={"steps": 1, "batch_size": 4},
    )
    step = records(raw, tmp_path / "run")[1]
    assert step["rollout/reward"] == 0 and step["rollout/without_hint"] == 1.0
    assert "loss" not in step and step["grad_norm"] == 0


NEAR = {"weight": 1.0, "loss": {"type": "generalized_jsd", "k": 4}}
OFF = {"type": "compose", "rl": {"weight": 0.0}}


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "sft"},
        {"type": "self_distillation", "k": 4, "max_ratio": "off"},
        {**OFF, "distillation": {"near": NEAR}},
    ],
    ids=["sft", "self_distillation", "compose"],
)
def test_loss_that_reads_no_sampler_trains_on_solutions(
    loss: dict[str, Any], tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Losses that read no sampling log-probs train on the data's solutions."""
    raw = tiny_recipe(loss=loss, trainer__steps=1, rollout__student_fraction=0.0)
    step = records(raw, tmp_path / "run")[1]
    assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
