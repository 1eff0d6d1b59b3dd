"""Five hundred steps of the small recipe: memory and descriptors stay where they are."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.load.processes import Level, descriptors, memory
from tests.local.helpers import Silent, run

STEPS = 500

pytestmark = [
    pytest.mark.load,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]


class Watching(Silent):
    """A display that notes memory and descriptors after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[float] = []
        self.descriptors: list[float] = []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        self.memory.append(memory([os.getpid()]))
        self.descriptors.append(descriptors([os.getpid()]))


def test_long_run_keeps_its_memory(
    tiny_recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, checkpoints and TensorBoard included, nothing grows after the warm-up."""
    raw = tiny_recipe(
        trainer__steps=STEPS,
        trainer__batch_size=16,
        rollout__max_tokens=32,
        eval={"every": 50, "size": 8, "kl_size": 8},
        checkpoint={"every": 25, "keep": 2},
        logging={"tensorboard": True},
    )
    watching, start = Watching(), time.monotonic()
    run(raw, tmp_path / "run", watching)
    seconds = time.monotonic() - start
    levels = {"memory": Level.of(watching.memory), "descriptors": Level.of(watching.descriptors)}
    with capsys.disabled():
        print(f"\n{STEPS} steps in {seconds:.0f} s")
        for name, level in levels.items():
            print(f"{name}: {level}")
    assert watching.steps[-1] == STEPS
    assert levels["memory"].end <= 1.03 * levels["memory"].warm + 5
    assert levels["descriptors"].end <= levels["descriptors"].warm
