"""Engines of this process on vLLM's second model runner: a process has one runner for good."""

import os
import subprocess
import sys

import pytest

from tests.vllm_process import SECOND_RUNNER

SAMPLERS, SCORERS = "tests/samplers/test_samplers.py", "tests/teachers/test_scorers.py"
CHOSEN = (
    f"{SAMPLERS}::test_mu_at_temperature_one_and_top_p_one_is_the_policy",
    f"{SAMPLERS}::test_update_weights_reaches_tied_head_and_prefix_cache",
    f"{SCORERS}::test_score_is_conditioned_on_the_tokens_before",
    f"{SCORERS}::test_support_is_the_top_k_of_the_full_vocabulary",
    f"{SCORERS}::test_hidden_states_and_head_give_the_whole_distribution",
    f"{SCORERS}::test_candidate_ids_are_scored_in_their_own_order",
)
"""One test of each way to compute: a name that is gone is an error, as none of ``-k`` would be.
Triton's interpreter, which is slow, cannot run top p at all."""


@pytest.mark.vllm
def test_samplers_and_scorers_pass_their_tests_on_the_second_runner():
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "vllm and not slow"]
    done = subprocess.run(
        [sys.executable, *words, *CHOSEN],
        env=os.environ | SECOND_RUNNER,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-3000:]
