"""Our losses equal prime-rl's own, bit by bit: value, gradient and every metric."""

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.parity import cases

TRIPLES = [
    (version, kind, case)
    for era, versions in cases.VERSIONS_OF_ERA.items()
    for version in versions
    for kind in cases.KINDS[era]
    for case in cases.cases(era)
]


def era_of(version):
    return "v0.6" if version == "v0.6.0" else "v0.7"


def assert_equal(ours, theirs):
    assert torch.equal(ours["loss"], theirs["loss"])
    assert len(ours["grad"]) == len(theirs["grad"])
    for a, b in zip(ours["grad"], theirs["grad"], strict=True):
        assert torch.equal(a, b)
    mine, yours = cases.plain_metrics(ours["metrics"]), cases.plain_metrics(theirs["metrics"])
    assert set(yours) <= set(mine)
    for name, value in yours.items():
        assert torch.equal(mine[name].float(), value.float()), name


def here(table, rows):
    """Our loss, called directly in this process."""
    t = cases.tensors(rows)
    loss = setup_loss_fn(LOSS_TYPES[table["type"]].model_validate(table))
    out = loss(
        LossInputs(
            trainer_logprobs=t["trainer"],
            inference_logprobs=t["inference"],
            ref_logprobs=t["ref"],
            advantages=t["advantages"],
            loss_mask=t["mask"],
            loss_weights=t["weights"],
        )
    )
    out.loss.backward()
    return {"loss": out.loss.detach(), "grad": [t["trainer"].grad], "metrics": out.metrics}


@pytest.mark.parametrize("version,kind,case", TRIPLES)
def test_our_loss_equals_prime_rls_own(outcomes, version, kind, case):
    table = cases.KINDS[era_of(version)][kind]
    theirs = outcomes(version)["functions"][kind, case]["theirs"]
    assert_equal(here(table, cases.cases(era_of(version))[case]), theirs)


@pytest.mark.parametrize("version,kind,case", TRIPLES)
def test_our_loss_through_prime_rls_own_setup_equals_theirs(outcomes, version, kind, case):
    row = outcomes(version)["functions"][kind, case]
    if "ours" not in row:
        pytest.skip("no prime-rl checkout: goldens hold prime-rl's side alone")
    assert_equal(row["ours"], row["theirs"])


PACKED = [
    (version, kind)
    for era, versions in cases.VERSIONS_OF_ERA.items()
    for version in versions
    for kind in (("opd" if era == "v0.6" else "ref_kl"), "default", "ipo")
]


@pytest.mark.parametrize("version,kind", PACKED)
def test_a_packed_bin_through_prime_rls_own_compute_loss_equals_theirs(outcomes, version, kind):
    row = outcomes(version)["compute_loss"].get(kind)
    if row is None:
        pytest.skip("no prime-rl checkout: compute_loss is theirs")
    assert row["theirs"]["loss"].abs() > 0
    assert_equal(row["ours"], row["theirs"])


@pytest.mark.parametrize("version", cases.VERSIONS_OF_ERA["v0.7"])
def test_rl_tokens_of_a_mixed_bin_stay_with_prime_rls_rl_loss(outcomes, version):
    row = outcomes(version)["compute_loss"].get("mixed")
    if row is None:
        pytest.skip("no prime-rl checkout: compute_loss is theirs")
    assert all(grad.abs().sum() > 0 for grad in row["theirs"]["grad"])
    assert_equal(row["ours"], row["theirs"])
    assert "tokens of an rl environment reached it" in row["refused"]


@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_the_inputs_fire_every_mask(outcomes, version):
    functions = outcomes(version)["functions"]
    metrics = functions["default", "512 tokens"]["theirs"]["metrics"]
    for name in (
        "is_masked_low",
        "is_masked_high",
        "masked_advantage_positive",
        "masked_advantage_negative",
    ):
        assert 0 < metrics[name] < 1, name
    kind = "opd" if version == "v0.6.0" else "ref_kl"
    dropped = cases.plain_metrics(functions[kind, "512 tokens"]["theirs"]["metrics"])["is_masked"]
    assert 0.02 < dropped < 0.98


def test_the_two_eras_differ_where_the_advantage_is_positive(outcomes):
    opd = outcomes("v0.6.0")["functions"]["opd", "one advantage"]["theirs"]["loss"]
    ref_kl = outcomes("newest")["functions"]["ref_kl", "one advantage"]["theirs"]["loss"]
    assert not torch.equal(opd, ref_kl)
