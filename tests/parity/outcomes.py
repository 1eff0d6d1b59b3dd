"""Runs the driver inside one prime-rl tree, or reads what was recorded of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.prime_rl_checkout import pythonpath

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens.json"


def era_of(version):
    return "v0.6" if version == "v0.6.0" else "v0.7"


def tree_env(tree, *more, **variables):
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PRIME_COMPOSER", "PYTHONPATH")
    }
    return {**clean, "PYTHONPATH": pythonpath(tree, *more), "TORCHDYNAMO_DISABLE": "1", **variables}


def live(tree, version, folder):
    """What prime-rl's functions and ours return in this tree; an error's text where its config package is missing."""
    path = folder / f"{version}.pt"
    command = [sys.executable, str(HERE / "driver.py"), era_of(version), str(path)]
    done = subprocess.run(command, env=tree_env(tree), capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-4000:]
    return torch.load(path, weights_only=True)


def golden(version):
    recorded = json.loads(GOLDENS.read_text())["versions"][version]
    functions = {}
    for kind, by_case in recorded.items():
        for case, row in by_case.items():
            functions[kind, case] = {
                "theirs": {
                    "loss": number(row["loss"]),
                    "grad": [torch.stack([number(x) for x in row["grad"]])],
                    "metrics": {name: number(value) for name, value in row["metrics"].items()},
                }
            }
    return {"functions": functions, "compute_loss": {}, "missing": []}


def number(text):
    """A float32 written by ``float.hex``."""
    return torch.tensor(float.fromhex(text), dtype=torch.float32)
