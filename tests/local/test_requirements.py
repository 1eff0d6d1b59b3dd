"""Models that do not fit a recipe: refused in one sentence, before any of them is loaded."""

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from prime_composer.backends import model_files
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
Spoil = Callable[[Path], None]


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


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def without(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        for name in names:
            for path in folder.glob(name):
                path.unlink()

    return spoil


SPOILED: dict[str, tuple[Spoil, str]] = {
    "no config": (without("config.json"), "has no config.json that is a JSON object"),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        "has no config.json that is a JSON object",
    ),
    "no weights": (without("*.safetensors"), "has no weights (model.safetensors"),
    "half of the weights": (cut, "has only a part of model.safetensors; copy it again"),
    "no tokenizer": (without("tokenizer*"), "has no tokenizer (tokenizer.json"),
    "empty": (without("*"), "has no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_folder_that_is_no_whole_model_is_refused(
    case: str, folder: Path, tiny_recipe: Raw
) -> None:
    """The sentence has the table, the path and what is missing."""
    check_models(parse_recipe(tiny_recipe(student={"model": str(folder)})))
    spoil, complaint = SPOILED[case]
    spoil(folder)
    message = refusal(tiny_recipe(student={"model": str(folder)}))
    assert message.startswith(f"[student] model = {str(folder)!r} ") and complaint in message
    if case != "no tokenizer":  # a teacher needs none
        message = refusal(tiny_recipe(teacher={"model": str(folder)}))
        assert message.startswith(f"[teacher] model = {str(folder)!r} ") and complaint in message


NEITHER = "is neither a directory on this machine"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("/no/such/folder", f"{NEITHER} nor written as a hub id"),
        ("models/small/student", NEITHER),
        ("~/model", NEITHER),
        ("a model", NEITHER),
        # Where the name might be a hub id, cache and hub are asked as well.
        ("models/studnt", "it is neither a directory nor in the Hugging Face cache, and HF_HUB_"),
        (__file__, "is a file; name the folder that it is in"),
    ],
)
def test_typo_in_a_path_is_refused(name: str, complaint: str, tiny_recipe: Raw) -> None:
    message = refusal(tiny_recipe(teacher={"model": name}))
    assert message.startswith(f"[teacher] model = {name!r} ") and complaint in message


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_context_beyond_the_positions_is_refused(
    backend: str, folder: Path, tiny_recipe: Raw
) -> None:
    """A student trains here whatever samples. vLLM says it after a minute, in pydantic's words."""
    own = {"rollout__max_model_len": 2048, "rollout__backend": backend}
    raw = tiny_recipe(student={"model": str(folder)}, **own)
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
    (roped(rope_type="default", rope_theta=1e6), 256),
    (roped(rope_type="linear", factor=4.0), 1024),
    (roped(type="linear", factor=4.0), 1024),
    (roped(rope_type="dynamic", factor=2.0), 512),
    (roped(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
    # transformers knows what a model's config calls it, and which ones have none.
    ({"model_type": "gpt2", "n_positions": 48}, 48),
    ({"model_type": "gptj", "n_positions": 48}, 48),
    ({"model_type": "mpt", "max_seq_len": 48}, 48),
    ({"model_type": "opt", "max_position_embeddings": 48}, 48),
    ({"model_type": "mistral", "max_position_embeddings": 48, "sliding_window": 16}, 48),
    ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 48}}, 48),
    ({"model_type": "bloom"}, None),
    ({"model_type": "mamba"}, None),
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put the hub at an address, without offline mode and without proxies."""
    from huggingface_hub import constants

    def at(endpoint: str) -> None:
        model_files._refuses.cache_clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(model_files, "getproxies", dict)

    return at


def silent_name_server(*args: Any) -> Any:
    time.sleep(4)
    raise socket.gaierror("no answer")


def resolved_to(*addresses: str) -> Callable[..., Any]:
    """Return a resolver that finds these addresses for every name."""

    def resolve(host: str, port: int, *args: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in addresses]

    return resolve


class SilentAt1(socket.socket):
    """A socket that waits for an answer of 127.0.0.1 in vain, as of a black hole."""

    def connect(self, address: Any) -> None:
        if address[0] == "127.0.0.1":
            time.sleep(self.gettimeout() or 60)
            raise TimeoutError("timed out")
        super().connect(address)


def unknown_name(*args: Any) -> Any:
    raise socket.gaierror("unknown name")


@pytest.mark.parametrize(
    ("resolve", "is_silent", "seconds"),
    [
        (unknown_name, False, None),
        (resolved_to("127.0.0.1", "127.0.0.2"), False, None),  # nobody listens there
        # Of several addresses the first one may be a black hole, such as IPv6 of some networks.
        (resolved_to("127.0.0.1", "127.0.0.2"), True, 2.5),
        (silent_name_server, False, 3.5),  # the loader waits as long as the system does
    ],
    ids=["unknown name", "all addresses refuse", "a silent address", "a slow name server"],
)
def test_hub_is_refused_where_it_is_certainly_away(
    resolve: Any,
    is_silent: bool,
    seconds: float | None,
    hub: Callable[[str], None],
    tiny_recipe: Raw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it is left to the loader, soon."""
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    if is_silent:
        monkeypatch.setattr(socket, "socket", SilentAt1)
    hub("http://away.example:9")
    raw = tiny_recipe(teacher={"model": "org/model"})
    if seconds is None:
        assert "http://away.example:9 could not be reached" in refusal(raw)
        return
    start = time.monotonic()
    check_models(parse_recipe(raw))
    assert time.monotonic() - start < seconds


def test_hub_that_may_answer_is_left_to_the_library(
    hub: Callable[[str], None], tiny_recipe: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the hub has the model is the hub's to say. A proxy hides whether it answers.

    A filled cache is enough.
    """
    from huggingface_hub import constants

    recipe = parse_recipe(tiny_recipe(teacher={"model": "org/model"}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub(f"http://127.0.0.1:{server.getsockname()[1]}")
        check_models(recipe)
    with monkeypatch.context() as patched:
        hub("https://behind-a-proxy.example")
        patched.setattr(model_files, "getproxies", lambda: {"https": "http://proxy:3128"})
        check_models(recipe)
    hub("http://127.0.0.1:9")
    cached = Path(constants.HF_HUB_CACHE) / "models--org--model"
    for name, text in (("snapshots/abc/config.json", "{}"), ("refs/main", "abc")):
        (cached / name).parent.mkdir(parents=True)
        (cached / name).write_text(text)
    check_models(recipe)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    """transformers fills weights that a file lacks with random numbers."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    half = dict(sorted(weights.items())[: len(weights) // 2])
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    lost = f"lack {len(weights) - len(half)} weights of the model, such as model"
    with pytest.raises(ModelUnavailable, match=lost):
        load_model(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(value: float, folder: Path) -> None:
    """One value is enough. The message has the table, the folder and the weight."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnavailable) as caught, in_table("student"):
        load_model(folder)
    assert str(caught.value) == (
        f"[student] Could not load {folder}: its weight model.norm.weight has values that are NaN "
        "or infinite; use another checkpoint."
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
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
