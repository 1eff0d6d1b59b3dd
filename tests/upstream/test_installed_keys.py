"""What is written fits the installed config classes, which may lie between two records."""

import importlib.machinery
import sys
import types
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model

from prime_composer.recipe.loading import parse_recipe
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.versions.config_fields import fitted, has_key, probe_version
from prime_composer.upstream.versions.records import CONFIGS, VERSIONS
from prime_composer.upstream.versions.toml_shapes import PLACES, PLACES_OF_MAIN
from tests.upstream.export_recipes import tables
from tests.upstream.in_prime_rl import interpreters

OF_HEAD = "algo group_size eval.num_examples train.filter_zero_advantages train.sampling.extra_body"
SEPTEMBER = "algo group_size eval.num_examples train.sampling.top_p"
MAIN = "train.algo train.group_size eval.select train.sampling.top_p"
"""Keys of [orchestrator]. September's lie between two records: v0.9 and part of main."""


def root_of(keys):
    """Return the class of ``rl @ FILE`` whose [orchestrator] has these keys."""

    def table(name, keys):
        below = {}
        for key in keys:
            first, _, rest = key.partition(".")
            below.setdefault(first, []).extend([rest] if rest else [])
        fields = {key: (table(key, inner) if inner else Any, None) for key, inner in below.items()}
        return create_model(name, **fields)

    orchestrator = table("orchestrator", [*keys.split(), "train.source"])
    return create_model("RL", orchestrator=(orchestrator, None), dashboard=(bool, True))


@pytest.mark.parametrize("keys,name", [(SEPTEMBER, "v0.9"), (MAIN, "main")])
def test_probe_version_fits_the_record_to_the_classes(monkeypatch, keys, name):
    """A key that is elsewhere than in the record is written where the classes have it."""
    root = root_of(keys)
    orchestrator = root.model_fields["orchestrator"].annotation
    teacher = create_model("FrozenModelConfig", base_url=(str, ""))
    classes = root, orchestrator, orchestrator.model_fields["train"].annotation, teacher
    modules = {module: types.ModuleType(module) for module in ("prime_rl", "prime_rl.configs")}
    for (module, own), cls in zip(CONFIGS.values(), classes, strict=True):
        setattr(modules.setdefault(module, types.ModuleType(module)), own, cls)
    for module in modules.values():
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = probe_version()
    assert found.name == name and found.zero_advantages is None
    top_p = PLACES_OF_MAIN.top_p
    assert found.places == (PLACES._replace(top_p=top_p) if name == "v0.9" else PLACES_OF_MAIN)


def test_fitted_takes_each_moved_key_by_itself():
    """main moved them at different times, and may bring one back."""
    moved = root_of(SEPTEMBER.replace(" group_size", " train.group_size"))
    new = {key: getattr(PLACES_OF_MAIN, key) for key in ("group_size", "top_p")}
    assert fitted(VERSIONS["v0.9"], moved).places == PLACES._replace(**new)
    assert fitted(VERSIONS["main"], root_of(OF_HEAD)).places == PLACES
    kept = fitted(VERSIONS["main"], root_of(f"{MAIN} train.filter_zero_advantages"))
    raw = {**tables(), "loss": {"type": "topk_reverse_kl", "k": 4, "rl_mix": {"kd": 0.5}}}
    train = export_recipe(parse_recipe(raw), kept).table["orchestrator"]["train"]
    assert train["filter_zero_advantages"] is False


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class One(BaseModel):
    type: Literal["one"]


class Other(BaseModel):
    type: Literal["other"]
    more: dict[str, Any] = {}


class Closed(BaseModel):
    opened: Open
    chosen: Annotated[One | Other, Field(discriminator="type")] | None = None


def test_keys_that_no_class_declares_are_taken():
    """A dict, extra keys that are allowed, and a class that another key chooses take any key."""
    for path in ("opened.max_num_seqs", "chosen.type", "chosen.more.anything.at.all"):
        assert has_key(Closed, path)
    assert not has_key(Closed, "open") and not has_key(Closed, "chosen.less")


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
