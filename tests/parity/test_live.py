"""Our losses equal prime-rl's own bit for bit: value, gradient and every metric, in every dtype.

Both sides run on this machine, prime-rl's from the sources of a checkout.
"""

import pytest
import torch

from tests.parity import cases, outcomes
from tests.parity.tolerance import bounds, differences

PACKED = [
    (version, kind)
    for version, contract in cases.CONTRACTS.items()
    for kind in (("opd" if contract == "v0.6" else "ref_kl"), "default", "ipo")
]


def unequal(ours, theirs):
    """Return the names of what is not equal in every bit."""
    wrong = [] if torch.equal(ours["loss"], theirs["loss"]) else ["loss"]
    pairs = zip(ours["grad"], theirs["grad"], strict=True)
    wrong += [f"grad of sequence {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    for name, value in theirs["metrics"].items():
        if name not in ours["metrics"]:
            wrong.append(f"{name} is missing")
        elif not torch.equal(ours["metrics"][name].float(), value.float()):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("version,kind", cases.PAIRS)
def test_our_loss_equals_prime_rls_bit_for_bit(live, version, kind):
    contract = cases.CONTRACTS[version]
    wrong = []
    for name, case in cases.cases(contract).items():
        theirs = live(version)["functions"][kind, name]["theirs"]
        ours = outcomes.ours(cases.KINDS[contract][kind], case, kind)
        wrong += [f"{name}: {difference}" for difference in unequal(ours, theirs)]
        dtypes = {metric: ours["metrics"][metric].dtype for metric in theirs["metrics"]}
        if dtypes != {metric: value.dtype for metric, value in theirs["metrics"].items()}:
            wrong.append(f"{name}: the metrics' dtypes are {dtypes}")
        assert ours["loss"].dtype == theirs["loss"].dtype == case.dtype
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("version,kind", cases.PAIRS)
def test_our_loss_through_prime_rls_setup_equals_theirs(live, version, kind):
    wrong = []
    for name in cases.cases(cases.CONTRACTS[version]):
        row = live(version)["functions"][kind, name]
        wrong += [f"{name}: {difference}" for difference in unequal(row["ours"], row["theirs"])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("version,kind", PACKED)
def test_a_pack_through_prime_rls_compute_loss_equals_theirs(live, version, kind):
    row = live(version)["compute_loss"][kind]
    assert row["theirs"]["loss"].abs() > 0
    assert not unequal(row["ours"], row["theirs"])


def test_rl_tokens_of_a_mixed_pack_keep_prime_rls_rl_loss(live):
    row = live("head")["compute_loss"]["mixed"]
    assert all(grad.abs().sum() > 0 for grad in row["theirs"]["grad"])
    assert not unequal(row["ours"], row["theirs"])
    assert "tokens of an rl environment reached it" in row["refused"]


@pytest.mark.parametrize("version", cases.CONTRACTS)
def test_goldens_are_what_prime_rl_returns(live, version):
    """Compare the record with the tree: a stale goldens.json is noticed where a checkout is."""
    by_name = cases.cases(cases.CONTRACTS[version])
    goldens = outcomes.recorded(version)
    functions = live(version)["functions"]
    assert goldens.keys() == {(kind, name) for kind, name in functions if by_name[name].recorded}
    wrong = []
    for (kind, name), golden in goldens.items():
        allowed = bounds(kind, by_name[name])
        found = differences(functions[kind, name]["theirs"], golden, allowed)
        wrong += [f"{kind}, {name}: {difference}" for difference in found]
    assert not wrong, "python -m tests.parity.record_goldens\n" + "\n".join(wrong)
