"""Upstream's own tests of its loss module, on a CPU, with our adapter on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.outcomes import tree_env
from tests.prime_rl_checkout import VERSIONS

HERE = Path(__file__).parent
TESTS = {"v0.6.0": 6, "v0.7.0": 10, "v0.8.0": 10, "newest": 10}


ASSERTS_A_METRIC_NAME_OF_THE_SLOT = "test_disjoint_components_in_one_sequence"


def run(tree, switch, *more):
    # --noconftest: upstream's conftest has an autouse fixture that kills processes by name.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "cpu_plugin",
        "-p",
        "no:cacheprovider",
        "-s",
    ]
    command += [
        "-W",
        "ignore",
        "-o",
        "addopts=",
        "--rootdir",
        str(tree),
        "tests/unit/train/rl/test_loss.py",
        *more,
    ]
    env = tree_env(tree, HERE, PRIME_COMPOSER=switch)
    env["PYTHONPATH"] = f"{tree}{os.pathsep}{env['PYTHONPATH']}"
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_upstreams_own_loss_tests_pass_with_the_hooks_in_place(trees, version):
    assert f"{TESTS[version]} passed" in run(trees(version), "1")


@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_upstreams_own_loss_tests_pass_with_our_loss_in_the_distillation_slot(trees, version):
    table = {"type": "sampled_reverse_kl", "dialect": "v0_6" if version == "v0.6.0" else "v0_7"}
    more = ["-k", f"not {ASSERTS_A_METRIC_NAME_OF_THE_SLOT}"]
    out = run(trees(version), json.dumps({"loss": table}), *more)
    assert f"{TESTS[version] - (version == 'newest')} passed" in out
    assert "sampled_reverse_kl registered" in out
