"""Compare two runs bit by bit: records, weights, and the optimizer's state."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.command import numbers

CHECKPOINTS = "checkpoints"
UNCOMPARED = {"safe_step"}
"""State that no number of a run depends on: it says when the probes were sent."""


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return run_dir / CHECKPOINTS / f"step_{step:06d}"


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order."""
    return sorted(int(path.name.split("_")[1]) for path in run_dir.glob("checkpoints/step_??????"))


def differences(run_dir: Path, expected: Path, step: int | None = None) -> list[str]:
    """Return what differs between two runs up to a step, one sentence each."""
    steps = steps_of(run_dir)
    if not steps:
        return [f"{run_dir} has no checkpoint"]
    step = steps[-1] if step is None else step
    found = record_differences(run_dir, expected, step)
    ours, theirs = (
        load_file(checkpoint_of(folder, step) / "model.safetensors")
        for folder in (run_dir, expected)
    )
    if ours.keys() != theirs.keys():
        found.append("weights have other names")
    else:
        found += [f"weight {name}" for name in ours if not torch.equal(ours[name], theirs[name])]
    ours, theirs = (
        torch.load(checkpoint_of(folder, step) / "trainer.pt", weights_only=True)
        for folder in (run_dir, expected)
    )
    if name := first_difference(ours, theirs):
        found.append(f"the trainer's state differs: {name}")
    return found


def record_differences(run_dir: Path, expected: Path, step: int) -> list[str]:
    """Return what differs between the records of two runs up to a step."""
    ours, theirs = (
        [record for record in numbers(folder) if record["step"] <= step]
        for folder in (run_dir, expected)
    )
    if ours == theirs:
        return []
    return [f"records up to step {step} differ: {first_difference(ours, theirs)}"]


def first_difference(ours: Any, theirs: Any, name: str = "") -> str | None:
    """Return the path of the first difference of nested tables, lists and tensors."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{name}: keys {sorted(map(str, ours.keys() ^ theirs.keys()))}"
        pairs = [(f"{name}.{key}", ours[key], theirs[key]) for key in ours if key not in UNCOMPARED]
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{name}: {len(ours)} entries and {len(theirs)}"
        pairs = [
            (f"{name}[{index}]", *pair) for index, pair in enumerate(zip(ours, theirs, strict=True))
        ]
    elif isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return None if torch.equal(ours, theirs) else name
    else:
        return None if ours == theirs else f"{name}: {ours!r} and {theirs!r}"
    return next((place for key, a, b in pairs if (place := first_difference(a, b, key))), None)
