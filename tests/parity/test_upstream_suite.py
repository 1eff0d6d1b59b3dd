"""Run upstream's own tests of its loss module on a CPU, with our adapter active."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.parity import cases
from tests.parity.outcomes import tree_env

# All of its processes are started at once, by one fixture.
pytestmark = [pytest.mark.upstream, pytest.mark.xdist_group("upstream's tests")]

HERE = Path(__file__).parent
TESTS = {"v0.6": 6, "v0.7": 10}
"""Loss contract: the number of tests that upstream has for it."""

ASSERTS_A_METRIC_NAME_OF_THE_SLOT = "test_disjoint_components_in_one_sequence"


def run(tree, switch, *more):
    """Run upstream's tests in a process of their own and return it when it has ended.

    --noconftest: upstream's conftest has an autouse fixture that kills processes by name.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--noconftest", "--rootdir", str(tree)]
    command += ["-p", "cpu_plugin", "-p", "no:cacheprovider", "-W", "ignore", "-o", "addopts="]
    command += ["tests/unit/train/rl/test_loss.py", *more]
    # Plugins that pytest finds by itself cost three seconds of imports.
    env = tree_env(tree, tree, HERE, **switch, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def output(trees):
    """(version, in the slot) -> what pytest printed; one process per core runs at a time."""

    def arguments(version, in_the_slot):
        if not in_the_slot:
            return trees(version), {"PRIME_COMPOSER": "1"}
        kind = "opd" if version == "v0.6" else "ref_kl"
        table = cases.KINDS[cases.CONTRACTS[version]][kind]
        switch = {"PRIME_COMPOSER": json.dumps({"loss": table})}
        if version == "v0.6":
            switch = {"FIVE_LINES": json.dumps(table)}
        return trees(version), switch, "-k", f"not {ASSERTS_A_METRIC_NAME_OF_THE_SLOT}"

    keys = [("head", False), *((version, True) for version in cases.CONTRACTS)]
    calls = {key: arguments(*key) for key in keys}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        processes = {key: pool.submit(run, *call) for key, call in calls.items()}

        def wait(version, in_the_slot):
            process = processes[version, in_the_slot].result()
            assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-2000:]
            return process.stdout + process.stderr

        yield wait


def test_upstreams_loss_tests_pass_with_the_hooks(output):
    assert f"{TESTS['v0.7']} passed" in output("head", False)


@pytest.mark.parametrize("version", cases.CONTRACTS)
def test_upstreams_loss_tests_pass_with_our_loss_in_the_slot(output, version):
    """Leave one test out: it asserts a metric name of the loss that ours replaces."""
    printed = output(version, True)
    assert f"{TESTS[cases.CONTRACTS[version]] - (version == 'head')} passed" in printed
    assert "sampled_reverse_kl registered" in printed
