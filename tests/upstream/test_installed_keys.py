"""What is written fits the installed config classes: stand-ins of later versions, real trees."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic import ValidationError, create_model

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream import launch
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.versions import records
from prime_composer.upstream.versions.config_fields import (
    ConfigFields,
    fitted,
    probe_version,
)
from prime_composer.upstream.versions.records import VERSIONS
from prime_composer.upstream.versions.toml_shapes import PLACES, PLACES_OF_MAIN
from tests.upstream import stand_in_configs
from tests.upstream.export_recipes import export_table, recipe, tables
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


def test_export_lists_all_keys_that_the_classes_lack():
    """In one error, before anything starts, with the version that the installed one is like."""
    optim = create_model("Optim", __base__=stand_in_configs.Base, lr=(float, 0.0), type=(str, ""))
    trainer = create_model("Trainer", __base__=stand_in_configs.Trainer, optim=(optim, None))
    root = create_model("Root", __base__=stand_in_configs.RLOfMain, trainer=(trainer, None))
    fields = ConfigFields(root)
    names = ("weight_decay", "betas1", "betas2", "max_norm")
    listed = ", ".join(f"trainer.optim.{name}" for name in names)
    message = f"like main, does not take 4 of the keys .*: {listed}. .*--engine local"
    with pytest.raises(RecipeError, match=message):
        export_recipe(recipe(), "main", fields=fields)
    with pytest.raises(RecipeError, match=r"does not take 6 of .*orchestrator.group_size, "):
        export_recipe(recipe(), "v0.9", fields=fields)


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
    assert fitted(VERSIONS["v0.9"], ConfigFields(moved)).places == PLACES._replace(**new)
    again = {"filter_zero_advantages": (bool, True)}
    back = with_train(configs.RLOfMain, configs.TrainOfMain, **again)
    kept = fitted(VERSIONS["main"], ConfigFields(back))
    assert kept.zero_advantages == VERSIONS["head"].zero_advantages
    raw = {**tables(), "loss": REWARDED}
    train = export_recipe(parse_recipe(raw), kept).table["orchestrator"]["train"]
    assert train["filter_zero_advantages"] is False


def test_fields_that_no_class_declares_are_not_judged():
    """A dict, extra keys that are allowed, and a class that another key chooses take any key."""
    fields = ConfigFields(stand_in_configs.RLOfMain)
    assert fields.has("inference.vllm.max_num_seqs") and fields.has("orchestrator.train.algo.type")
    assert fields.has("orchestrator.train.source.env.anything.at.all")
    assert not fields.has("orchestrator.train.sources") and not fields.has("trainer.optim.mu")
    wrong = {"trainer": {"loss": {"type": "ipo", "kwargs": {}}}, "inference": {"vllm": {"x": 1}}}
    assert fields.unknown(wrong) == ["trainer.loss.kwargs"]


def test_a_record_that_was_never_run_says_so():
    assert records.versions_that_run() == "559b4477 (v0.9, main: read in part, never run)"
    assert records.NEWEST_RUN is VERSIONS["head"]


REAL = """
from prime_composer.upstream.versions.config_fields import importable_fields, probe_version
from prime_composer.upstream.versions.records import VERSIONS

fields = importable_fields()
result = {
    "unknown": [fields.unknown(table) for table in tables],
    "record": probe_version() is VERSIONS[version],
}
"""


@pytest.mark.upstream
@pytest.mark.xdist_group("prime-rl's parser")
def test_real_config_classes_have_every_key_that_is_written(trees, tmp_path_factory):
    """A record equals its tree, and a key that the tree lacks is found."""
    version = "head"
    written = [
        export_table(version, eval={"every": 2, "size": 9}),
        export_table(version, rollout={"top_p": 0.9}, logging={"wandb": {"project": "p"}}),
        export_recipe(parse_recipe({**tables(), "loss": REWARDED}), version).table,
    ]
    wrong = {"orchestrator": {"group_sizes": 2, "train": {"sampling": {"top_p": 0.5}}}}
    with interpreters(trees, tmp_path_factory) as get:
        answer = get(version).run(REAL, tables=[*written, wrong], version=version)
    paths = ["orchestrator.group_sizes", "orchestrator.train.sampling.top_p"]
    assert answer == {"unknown": [[], [], [], paths], "record": True}
