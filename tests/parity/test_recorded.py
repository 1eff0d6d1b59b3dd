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


def negated(rows, name):
    return {**rows, name: [-x for x in rows[name]]}


def one_negated(rows, name, index):
    values = list(rows[name])
    values[index] = -values[index]
    return {**rows, name: values}


def mean_for_sum(outcome, case):
    tokens = sum(case.rows["mask"])
    return {
        **outcome,
        "loss": outcome["loss"] / tokens,
        "grad": [grad / tokens for grad in outcome["grad"]],
    }


MISTAKES = {
    "sign of the advantage": (
        "default", "512 tokens", {"rows": lambda r: negated(r, "advantages")}
    ),
    "sign of one advantage": (
        "default", "512 tokens", {"rows": lambda r: one_negated(r, "advantages", 100)}
    ),
    "mask ignored": (
        "ref_kl", "512 tokens", {"rows": lambda r: {**r, "mask": [True] * len(r["mask"])}}
    ),
    "one masked token counted": (
        "ce", "512 tokens",
        {"rows": lambda r: {**r, "mask": [m or t == r["mask"].index(False)
                                          for t, m in enumerate(r["mask"])]}},
    ),
    "mean for sum": ("ce", "64 tokens", {"outcome": mean_for_sum}),
    "deltas swapped": (
        "default", "knobs, float32", {"knobs": {"dppo_mask_low": 0.3, "dppo_mask_high": 0.15}}
    ),
    "weights ignored": ("ipo", "weights", {"rows": lambda r: {**r, "weights": None}}),
    "teacher and sampler swapped": (
        "ref_kl", "64 tokens", {"rows": lambda r: {**r, "ref": r["inference"]}}
    ),
    "log-ratio penalty doubled": ("ipo", "knobs, float64", {"knobs": {"kl_tau": 4e-3}}),
    "computed in bfloat16": ("ref_kl", "example b", {"dtype": torch.bfloat16}),
    "float64 computed in float32": ("ref_kl", "example b, float64", {"dtype": torch.float32}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_recorded_numbers_reject_a_wrong_loss(mistake):
    """Compute what an implementation with this mistake returns: the tolerance has to notice it."""
    kind, name, change = MISTAKES[mistake]
    case = cases.cases("v0.7")[name]
    rows = change.get("rows", dict)(case.rows)
    changed = cases.Case(rows, change.get("dtype", case.dtype), case.with_knobs)
    table = {**cases.KINDS["v0.7"][kind]}
    if "knobs" in change:
        table |= {**case.knobs(kind), **change["knobs"]}
        changed = cases.Case(rows, changed.dtype, False)
    outcome = outcomes.ours(table, changed, kind)
    outcome = change.get("outcome", lambda same, case: same)(outcome, case)
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


def test_the_two_contracts_differ_at_positive_advantages():
    opd = recorded("v0.6")["opd", "one advantage"]["loss"]
    ref_kl = recorded("head")["ref_kl", "one advantage"]["loss"]
    assert not torch.equal(opd, ref_kl)


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
