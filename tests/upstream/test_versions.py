"""Detect prime-rl's version from its API: loss contract and config classes."""

import subprocess
import sys
import types

import pytest

from prime_composer.losses import parse_loss
from prime_composer.upstream.versions.capabilities import (
    GEMMA_FUSED_HEAD,
    PREFILL,
    SLOT,
    take,
)
from prime_composer.upstream.versions.config_fields import probe_version
from prime_composer.upstream.versions.records import (
    CONFIGS,
    OLD,
    VERSIONS,
    OldVersion,
    UnknownSurface,
    match_version,
    probe_contract,
)
from tests.prime_rl_checkout import CONTRACTS, REPO
from tests.upstream import fake_prime_rl

GEMMA = "trainer.models.layers.lm_head_gemma"


@pytest.mark.parametrize("contract", ["v0.6", "v0.7"])
def test_probe_contract_finds_each_contract(contract):
    assert probe_contract(fake_prime_rl.loss_module(contract)).name == contract


def test_probe_contract_refuses_halves_of_two_contracts():
    """The newer setup function with the older fields is no version that ever was."""
    loss = fake_prime_rl.loss_module("v0.7")
    loss.LossInputs = fake_prime_rl.LossInputsV06
    with pytest.raises(UnknownSurface, match="setup_rl_loss_fn with LossInputs.*559b4477"):
        probe_contract(loss)


def test_name_that_moved_leaves_its_old_module_alone():
    """Another module may have it, or nothing is lost without it; else the hook refuses."""
    for capability, name in ((PREFILL, "utils.client"), (GEMMA_FUSED_HEAD, GEMMA)):
        assert take(capability, types.ModuleType(f"prime_rl.{name}")) is None
    with pytest.raises(UnknownSurface, match="distillation slot: there is no"):
        take(SLOT, types.ModuleType("prime_rl.trainer.rl.loss"))


def config_class(**fields):
    """A class with pydantic's ``model_fields``: name -> annotation."""
    infos = {name: types.SimpleNamespace(annotation=kind) for name, kind in fields.items()}
    return types.SimpleNamespace(model_fields=infos)


def put_configs(monkeypatch, orchestrator, train, base_url):
    """Make config modules importable under prime-rl's names. ``base_url`` None: no algorithms."""
    places = ("orchestrator", "teacher")
    module, algorithm = (types.ModuleType(CONFIGS[place][0]) for place in places)
    module.__spec__ = algorithm.__spec__ = types.SimpleNamespace()
    module.OrchestratorConfig = config_class(**orchestrator)
    module.TrainConfig = config_class(**train)
    for name in ("prime_rl", "prime_rl.configs"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, algorithm.__name__, raising=False)
    if base_url is not None:
        algorithm.FrozenModelConfig = config_class(name=str, base_url=base_url)
        monkeypatch.setitem(sys.modules, algorithm.__name__, algorithm)


@pytest.mark.parametrize(
    "name,orchestrator,train,base_url",
    [
        ("v0.6", {"training_mode": str}, {"env": list}, None),
        ("v0.7", {"algo": object}, {"env": list}, list[str]),
        ("v0.8", {"algo": object}, {"source": list}, list[str]),
    ],
)
def test_probe_version_names_an_old_version(monkeypatch, name, orchestrator, train, base_url):
    """What to install is said with it; v0.6 still has the five lines."""
    put_configs(monkeypatch, orchestrator, train, base_url)
    with pytest.raises(OldVersion, match=rf"prime-rl {name} .*559b4477.*commit 5218d7f") as old:
        probe_version()
    assert old.value.name == name
    assert ("the five lines in [trainer.loss]" in str(old.value)) is (name == "v0.6")


def test_probe_version_reads_the_config_classes(monkeypatch):
    put_configs(monkeypatch, {"algo": object}, {"source": list}, str)
    assert probe_version() is VERSIONS["head"]


def test_match_version_unknown_surface_lists_everything():
    with pytest.raises(UnknownSurface) as caught:
        match_version({"orchestrator.algo", "orchestrator.train.curriculum"})
    for part in ("train.source", "orchestrator.train.curriculum", "v0.6 has the five", "559b4477"):
        assert part in str(caught.value)


def test_versions_are_keyed_by_their_names():
    assert [*OLD, *VERSIONS] == ["v0.6", "v0.7", "v0.8", "head", "v0.9", "main"]
    assert all(version.name == name for name, version in VERSIONS.items())


def test_contract_of_one_kind_distils_rewards_and_a_teacher():
    """v0.6 calls one loss on all tokens of a run."""
    both = {"type": "sampled_reverse_kl", "rl_mix": {"kd": 0.5}}
    assert CONTRACTS["v0.6"].distils(parse_loss(both))


def test_records_are_read_without_any_package():
    """CI makes environments from the records before anything is installed."""
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); import tests.upstream.make_venvs"
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
