"""Run a program of this repository in a process of its own, as a user does."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SECONDS = 1500


def output_of(module: str, *words: object) -> str:
    """Return what ``python -m MODULE WORDS`` prints. It may compile, unlike the tests themselves.

    Raises:
        AssertionError: it failed. The message has the end of what it wrote.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # an engine wants most of the memory
    environment = {name: os.environ[name] for name in os.environ if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=SECONDS
    )
    assert done.returncode == 0, f"{module}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
