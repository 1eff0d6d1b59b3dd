"""Engines of this process on vLLM's second model runner: a process has one runner for good."""

import os
import subprocess
import sys

import pytest

from tests.vllm_process import SECOND_RUNNER

TESTS = ("tests/samplers/test_samplers.py", "tests/teachers/test_scorers.py")
NOT_INTERPRETED = "test_mu_below_top_p_one_is_cut_and_renormalized"
"""Triton's interpreter cannot run vLLM's kernel for top p (an int there has no ``to``)."""


@pytest.mark.vllm
def test_samplers_and_scorers_pass_their_tests_on_the_second_runner():
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "vllm and not slow"]
    done = subprocess.run(
        [sys.executable, *words, *TESTS, "-k", f"not {NOT_INTERPRETED}"],
        env=os.environ | SECOND_RUNNER,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
