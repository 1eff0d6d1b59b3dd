"""Run upstream's own tests of its loss module on a CPU, with our adapter active."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity import cases
from tests.parity.outcomes import tree_env

HERE = Path(__file__).parent
TESTS = {"v0.6": 6, "v0.7": 10}
"""Loss contract: the number of tests that upstream has for it."""

ASSERTS_A_METRIC_NAME_OF_THE_SLOT = "test_disjoint_components_in_one_sequence"


def run(tree, switch, *more):
    """Run upstream's tests in a process of their own and return what pytest printed.

    --noconftest: upstream's conftest has an autouse fixture that kills processes by name.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--noconftest", "--rootdir", str(tree)]
    command += ["-p", "cpu_plugin", "-p", "no:cacheprovider", "-W", "ignore", "-o", "addopts="]
    command += ["tests/unit/train/rl/test_loss.py", *more]
    env = tree_env(tree, tree, HERE, PRIME_COMPOSER=switch)
    process = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
    return process.stdout + process.stderr


@pytest.mark.parametrize("version", cases.CONTRACTS)
def test_upstreams_loss_tests_pass_with_the_hooks(trees, version):
    assert f"{TESTS[cases.CONTRACTS[version]]} passed" in run(trees(version), "1")


@pytest.mark.parametrize("version", ["v0.6", "head"])
def test_upstreams_loss_tests_pass_with_our_loss_in_the_slot(trees, version):
    """Leave one test out: it asserts a metric name of the loss that ours replaces."""
    kind = "opd" if version == "v0.6" else "ref_kl"
    table = cases.KINDS[cases.CONTRACTS[version]][kind]
    more = ["-k", f"not {ASSERTS_A_METRIC_NAME_OF_THE_SLOT}"]
    output = run(trees(version), json.dumps({"loss": table}), *more)
    assert f"{TESTS[cases.CONTRACTS[version]] - (version == 'head')} passed" in output
    assert "sampled_reverse_kl registered" in output
