"""Models that do not fit a recipe: refused in one sentence, before any of them is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from prime_composer.backends.hf_model import ModelUnavailable, check_finite, load_model
from prime_composer.backends.transformers import window
from prime_composer.cli.commands import main
from prime_composer.local.requirements import (
    check_models,
    in_table,
    warnings_of_paths,
)
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models

Raw = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a small model that loads."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_models(TINY_RECIPE)["student"], copy)
    return copy


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        check_models(parse_recipe(raw))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_that_is_no_whole_model_is_refused(folder: Path, tiny_recipe: Raw) -> None:
    """The sentence has the table, the path and what is missing. A teacher needs no tokenizer."""
    student, teacher = tiny_recipe(), tiny_recipe()
    for table, raw in (("student", student), ("teacher", teacher)):
        raw[table] = {"model": str(folder)}
        check_models(parse_recipe(raw))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    named = f"model = {str(folder)!r} "
    assert refusal(student).startswith(f"[student] {named}has no tokenizer (tokenizer.json")
    check_models(parse_recipe(teacher))
    (folder / "config.json").write_text("{")
    assert refusal(teacher).startswith(f"[teacher] {named}has no config.json that is a JSON object")


NEITHER = "is neither a directory on this machine"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("/no/such/folder", f"{NEITHER} nor written as a hub id"),
        ("models/small/student", NEITHER),
        # Where the name might be a hub id, cache and hub are asked as well.
        ("models/studnt", "it is neither a directory nor in the Hugging Face cache, and HF_HUB_"),
        (__file__, "is a file; name the folder that it is in"),
    ],
)
def test_typo_in_a_path_is_refused(name: str, complaint: str, tiny_recipe: Raw) -> None:
    message = refusal(tiny_recipe(teacher={"model": name}))
    assert message.startswith(f"[teacher] model = {name!r} ") and complaint in message


def test_context_beyond_the_positions_is_refused(folder: Path, tiny_recipe: Raw) -> None:
    """A student trains here whatever samples."""
    raw = tiny_recipe(student={"model": str(folder)}, rollout__max_model_len=2048)
    assert "has 256 positions and rollout.max_model_len is 2048" in refusal(raw)
    raw["student"] = {"prepare": {**TINY_RECIPE["student"]["prepare"]}}
    assert refusal(raw).startswith("[student.prepare] has 256 positions")
    raw["rollout"]["max_model_len"] = 256
    raw["teacher"] = {"model": str(folder)}
    check_models(parse_recipe(raw))


def roped(**rope: Any) -> dict[str, Any]:
    return {"model_type": "llama", "max_position_embeddings": 256, "rope_scaling": rope}


WINDOWS: list[tuple[dict[str, Any], int | None]] = [
    # A factor lengthens linear and dynamic positions; YaRN's config has the long one already.
    (roped(rope_type="linear", factor=4.0), 1024),
    (roped(type="linear", factor=4.0), 1024),
    (roped(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
    # transformers knows what a model's config calls it, and which ones have none.
    ({"model_type": "gpt2", "n_positions": 48}, 48),
    ({"model_type": "mpt", "max_seq_len": 48}, 48),
    ({"model_type": "mistral", "max_position_embeddings": 48, "sliding_window": 16}, 48),
    ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 48}}, 48),
    ({"model_type": "bloom"}, None),
]


@pytest.mark.parametrize(("config", "limit"), WINDOWS)
def test_window_of_a_config_is_that_of_vllm(
    config: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert window(tmp_path) == limit


def test_model_of_a_server_is_left_alone(tiny_recipe: Raw) -> None:
    """Its path is one of the server's machine."""
    served = {"model": "/models/on/the/server", "url": "http://host:8001"}
    recipe = parse_recipe(tiny_recipe(teacher=served))
    check_models(recipe)
    assert warnings_of_paths(recipe) == []


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    """transformers fills weights that a file lacks with random numbers."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    half = dict(sorted(weights.items())[: len(weights) // 2])
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    lost = f"lack {len(weights) - len(half)} weights of the model, such as model"
    with pytest.raises(ModelUnavailable, match=lost):
        load_model(folder)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(value: float, folder: Path) -> None:
    """One value is enough. The message has the table, the folder and the weight."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = rf"^\[student\] .*{folder}.* weight model\.norm\.weight .*; use another checkpoint"
    with pytest.raises(ModelUnavailable, match=words), in_table("student"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_quantized_weights_are_not_looked_at(dtype: torch.dtype) -> None:
    """PyTorch cannot compare numbers of 8 bits. The scales beside them are looked at."""
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)
    net.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    check_finite(net, "org/model")
    net.scale.data.fill_(torch.nan)
    with pytest.raises(ModelUnavailable, match="its weight scale has values that are NaN"):
        check_finite(net, "org/model")


@pytest.mark.parametrize("command", ["check", "export"])
def test_laptop_is_only_warned_of_a_path(
    command: str, tmp_path: Path, tiny_recipe: Raw, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe for a cluster names paths of the cluster."""
    path = tmp_path / "r.toml"
    raw = tiny_recipe(student={"model": "/cluster/student"}, teacher={"model": "/cluster/teacher"})
    path.write_text(tomli_w.dumps(raw))
    more = ["--dialect", "head"] if command == "export" else []
    assert main([command, str(path), *more]) == 0
    shown = capsys.readouterr()
    for table in ("student", "teacher"):
        warning = f"warning: [{table}] model = '/cluster/{table}' is neither a directory on this "
        assert warning in shown.err and warning not in shown.out
    assert "/cluster/student" in shown.out
