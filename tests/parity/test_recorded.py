"""Our losses against numbers recorded from prime-rl's own: on every machine, with any processor.

Bit for bit is the rule of test_live.py, where both sides are computed on one machine.
"""

import functools

import pytest

from tests.parity import cases, outcomes

recorded = functools.cache(outcomes.recorded)


@pytest.mark.parametrize("version,kind", cases.PAIRS)
def test_our_loss_returns_the_recorded_numbers(version, kind):
    contract = cases.CONTRACTS[version]
    for name, case in cases.cases(contract).items():
        if case.recorded:
            ours = outcomes.ours(cases.KINDS[contract][kind], case, kind)
            outcomes.check_recorded(ours, recorded(version)[kind, name], case.dtype, name)


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
