"""Our losses against numbers recorded from prime-rl's own: on every machine, with any processor.

The tolerance is derived in tolerance.py. Bit for bit is the rule of test_live.py, where both sides
are computed on one machine.
"""

import functools
import math
import os

import pytest
import torch

from tests.fork_server import REPO, new_process
from tests.parity import cases, outcomes
from tests.parity.tolerance import bounds, differences

recorded = functools.cache(outcomes.recorded)


def recorded_cases(contract):
    return {name: case for name, case in cases.cases(contract).items() if case.recorded}


@pytest.mark.parametrize("version,kind", cases.PAIRS)
def test_our_loss_returns_the_recorded_numbers(version, kind):
    contract = cases.CONTRACTS[version]
    wrong = []
    for name, case in recorded_cases(contract).items():
        ours = outcomes.ours(cases.KINDS[contract][kind], case, kind)
        theirs = recorded(version)[kind, name]
        wrong += [
            f"{name}: {difference}" for difference in differences(ours, theirs, bounds(kind, case))
        ]
    assert not wrong, "\n".join(wrong)


def one_negated(rows, name, index):
    values = list(rows[name])
    values[index] = -values[index]
    return {**rows, name: values}


def one_more_counted(rows):
    first = rows["mask"].index(False)
    return {**rows, "mask": [trains or t == first for t, trains in enumerate(rows["mask"])]}


MISTAKES = {
    "sign of one advantage": (
        "default", "512 tokens", lambda rows: one_negated(rows, "advantages", 100), None
    ),
    "one masked token counted": ("ce", "512 tokens", one_more_counted, None),
    "computed in bfloat16": ("ref_kl", "example b", dict, torch.bfloat16),
    "float64 computed in float32": ("ref_kl", "example b, float64", dict, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_recorded_numbers_reject_a_wrong_loss(mistake):
    """What an implementation with the smallest mistakes returns is beyond the tolerance."""
    kind, name, change, dtype = MISTAKES[mistake]
    case = cases.cases("v0.7")[name]
    changed = cases.Case(change(case.rows), dtype or case.dtype)
    outcome = outcomes.ours(cases.KINDS["v0.7"][kind], changed, kind)
    assert differences(outcome, recorded("head")[kind, name], bounds(kind, case))


@pytest.mark.parametrize("contract", cases.KINDS)
def test_recorded_inputs_stay_clear_of_every_threshold(contract):
    """A token at the edge of a trust region could be dropped on one processor alone.

    The difference of two probabilities is known to 4 eps (two calls of exp, one rounding each).
    """
    for name, case in recorded_cases(contract).items():
        values = case.knobs("default").values(), case.knobs("ipo").values()
        thresholds = {0.2, *(x for group in values for x in group)}
        for p, mu in zip(case.rows["trainer"], case.rows["inference"], strict=True):
            distance = min(abs(abs(math.exp(p) - math.exp(mu)) - edge) for edge in thresholds)
            assert distance > 4 * torch.finfo(case.dtype).eps, name


@pytest.mark.parametrize("version", ["v0.6", "head"])
def test_recorded_inputs_fire_every_mask(version):
    metrics = recorded(version)["default", "512 tokens"]["metrics"]
    for name in (
        "is_masked_low",
        "is_masked_high",
        "masked_advantage_positive",
        "masked_advantage_negative",
    ):
        assert 0 < metrics[name] < 1, name
    distilling = "opd" if version == "v0.6" else "ref_kl"
    for kind, name in (
        (distilling, "512 tokens"),
        ("default", "knobs, float32"),
        ("ipo", "knobs, float64"),
    ):
        assert 0.02 < recorded(version)[kind, name]["metrics"]["is_masked"] < 0.98


COMPARE = """
from tests.parity import cases, test_recorded

for version, kind in cases.PAIRS:
    test_recorded.test_our_loss_returns_the_recorded_numbers(version, kind)
print(len(cases.PAIRS), "passed")
"""


@pytest.mark.parametrize(
    "capability,mkl,threads",
    [("default", "COMPATIBLE", 1), pytest.param("avx2", "AVX2", 2, marks=pytest.mark.slow)],
)
def test_recorded_numbers_hold_for_other_processors(capability, mkl, threads):
    """Run the comparison with the kernels that PyTorch and MKL choose on older processors.

    On an AVX-512 machine each of the two settings changes bits of exp.
    """
    variables = {
        "ATEN_CPU_CAPABILITY": capability,
        "MKL_CBWR": mkl,
        "OMP_NUM_THREADS": str(threads),
    }
    done = new_process("-c", COMPARE, cwd=REPO, env=os.environ | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{len(cases.PAIRS)} passed\n"
