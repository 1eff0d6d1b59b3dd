"""Engines of this process on vLLM's second model runner: a process has one runner for good."""

import os
import subprocess
import sys

import pytest

from tests.vllm_process import SECOND_RUNNER

TESTS = ("tests/samplers/test_samplers.py", "tests/teachers/test_scorers.py")
CHOSEN = (
    "temperature_one or tied_head or conditioned or support_is or candidate or whole_distribution"
)
"""One test of each way to compute. Triton's interpreter, which is slow, cannot run top p at all."""


@pytest.mark.vllm
def test_samplers_and_scorers_pass_their_tests_on_the_second_runner():
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "vllm and not slow"]
    done = subprocess.run(
        [sys.executable, *words, *TESTS, "-k", CHOSEN],
        env=os.environ | SECOND_RUNNER,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
