"""What is written fits the installed config classes: stand-ins of later versions, real trees."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic import ValidationError, create_model

from prime_composer.recipe.loading import parse_recipe
from prime_composer.upstream import launch
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.versions import records
from prime_composer.upstream.versions.config_fields import (
    fitted,
    has_key,
    probe_version,
)
from prime_composer.upstream.versions.records import VERSIONS
from prime_composer.upstream.versions.toml_shapes import PLACES, PLACES_OF_MAIN
from tests.upstream import stand_in_configs
from tests.upstream.export_recipes import tables
from tests.upstream.in_prime_rl import interpreters
from tests.upstream.stand_in_configs import KINDS

REWARDED = {"type": "topk_reverse_kl", "k": 4, "rl_mix": {"kd": 0.5}}


@pytest.mark.parametrize("kind,name", [("september", "v0.9"), ("main", "main")])
def test_probe_version_fits_the_record_to_the_classes(monkeypatch, kind, name):
    """September lies between two records: v0.9 without the key that keeps zero advantages."""
    stand_in_configs.put(monkeypatch, kind)
    found = probe_version()
    assert found.name == name and found.zero_advantages is None
    top_p = PLACES_OF_MAIN.top_p
    assert found.places == (PLACES._replace(top_p=top_p) if name == "v0.9" else PLACES_OF_MAIN)
    assert (found is VERSIONS["main"]) is (name == "main")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "loss,changes,verdict",
    [
        ({"type": "topk_reverse_kl", "k": 4}, {}, "accepts the file"),
        (REWARDED, {}, "accepts the file"),
        ({"type": "default"}, {"rollout": {"top_p": 0.9, "group_size": 2}}, "accepts the file"),
        ({"type": "default"}, {"orchestrator": {"no_such_key": 1}}, "refuses the file"),
    ],
)
def test_dry_run_beside_a_stand_in(monkeypatch, tmp_path, capsys, kind, loss, changes, verdict):
    """`rl --engine prime-rl --dry-run`: what is written is what these classes take."""
    root = stand_in_configs.put(monkeypatch, kind)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    monkeypatch.setattr(launch, "has_prime_rl", lambda: True)
    monkeypatch.setattr(launch, "check_pth", lambda: None)
    monkeypatch.setattr(launch, "require_road", lambda road: None, raising=False)  # of the hooks

    def run(command, **options):
        try:
            root.model_validate(tomllib.loads(Path(command[-2]).read_text()))
        except ValidationError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(launch.subprocess, "run", run)
    raw = {**tables(), "loss": loss, "eval": {"every": 2, "size": 9}}
    raw["rollout"] |= changes.get("rollout", {})
    raw["prime_rl"] = {"orchestrator": changes.get("orchestrator", {})}
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(raw))
    assert launch.launch(path, dry_run=True) == (verdict == "refuses the file")
    output = capsys.readouterr()
    assert verdict in output.out and f"prime-rl: {probe_version().name}\n" in output.out
    assert ("no_such_key" in output.err) is (verdict == "refuses the file")


def with_train(root, cls, **fields):
    """Return the config of a prime-rl whose [orchestrator.train] is ``cls`` with more fields."""
    train = create_model("Train", __base__=cls, **fields)
    own = root.model_fields["orchestrator"].annotation
    orchestrator = create_model("Orchestrator", __base__=own, train=(train, ...))
    return create_model("Root", __base__=root, orchestrator=(orchestrator, ...))


def test_fitted_takes_each_moved_key_by_itself():
    """main moved them at different times, and may bring one back."""
    configs = stand_in_configs
    moved = with_train(configs.RL, configs.Train, group_size=(int, 1))
    new = {key: getattr(PLACES_OF_MAIN, key) for key in ("group_size", "top_p")}
    assert fitted(VERSIONS["v0.9"], moved).places == PLACES._replace(**new)
    again = {"filter_zero_advantages": (bool, True)}
    back = with_train(configs.RLOfMain, configs.TrainOfMain, **again)
    kept = fitted(VERSIONS["main"], back)
    assert kept.zero_advantages == VERSIONS["head"].zero_advantages
    raw = {**tables(), "loss": REWARDED}
    train = export_recipe(parse_recipe(raw), kept).table["orchestrator"]["train"]
    assert train["filter_zero_advantages"] is False


def test_keys_that_no_class_declares_are_taken():
    """A dict, extra keys that are allowed, and a class that another key chooses take any key."""
    root = stand_in_configs.RLOfMain
    assert has_key(root, "inference.vllm.max_num_seqs")
    assert has_key(root, "orchestrator.train.algo.type")
    assert has_key(root, "orchestrator.train.source.env.anything.at.all")
    assert not has_key(root, "orchestrator.train.sources") and not has_key(root, "trainer.optim.mu")


def test_a_record_that_was_never_run_says_so():
    assert records.versions_that_run() == "559b4477 (v0.9, main: read in part, never run)"
    assert records.NEWEST_RUN is VERSIONS["head"]


@pytest.mark.upstream
@pytest.mark.xdist_group("prime-rl's parser")
def test_real_config_classes_are_those_of_the_record(trees, tmp_path_factory):
    code = """
from prime_composer.upstream.versions.config_fields import probe_version
from prime_composer.upstream.versions.records import VERSIONS

result = probe_version() is VERSIONS["head"]
"""
    with interpreters(trees, tmp_path_factory) as get:
        assert get("head").run(code)
