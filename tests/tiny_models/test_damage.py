"""Models without some layers: the same weights as those of a model that was cut by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers, load_student
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import ProblemSet, load_problem_set
from prime_composer.recipe.prepare import DamagedConfig
from prime_composer.tiny_models.cache import cache_key, prepare_model
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models
from tests.tiny_qwen import make_model

transformers = import_transformers()

LAYERS = 5
IDS = torch.tensor([[7, 1, 300, 42, 9, 9, 250]])


@pytest.fixture(scope="module")
def problems() -> ProblemSet:
    return load_problem_set({"problems": DataConfig(size=60)})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers with random weights, of which the fourth sees a window of 4 tokens.

    It has the tokenizer of the tests' recipe, whose vocabulary its own contains.
    """
    folder = tmp_path_factory.mktemp("source")
    kinds = ["full_attention"] * 3 + ["sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    make_model(False, 0, LAYERS, vocab_size=512, **window).save_pretrained(folder)
    load_student(tiny_models(TINY_RECIPE)["student"])[1].save_pretrained(folder)
    return folder


def without(source: Path | str, *layers: int, **more: Any) -> DamagedConfig:
    return DamagedConfig.model_validate({"from": str(source), "drop_layers": layers, **more})


def cut_by_hand(source: Path, *dropped: int) -> Any:
    """Load the model, and let the decoder skip layers: each is replaced by what returns its input.

    Nothing is renumbered, saved or loaded again.
    """

    class Skip(torch.nn.Module):
        attention_type = "full_attention"

        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32
    ).eval()
    for index in dropped:
        model.model.layers[index] = Skip()
    return model


@pytest.mark.parametrize("dropped", [(3,), (2, 1)])
@torch.no_grad()
def test_model_without_layers_is_that_cut_by_hand(
    dropped: tuple[int, ...], source: Path, problems: ProblemSet, tmp_path: Path
) -> None:
    """The logits are equal, the config says how many layers are left and of which kind, and no
    weight is missing or left over."""
    path = prepare_model(without(source, *dropped), problems, tmp_path)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    expected = cut_by_hand(source, *dropped)(IDS, use_cache=False).logits
    torch.testing.assert_close(model.eval()(IDS).logits, expected)
    whole = cut_by_hand(source)(IDS).logits
    assert not torch.allclose(expected, whole, atol=0.01)

    config = json.loads((path / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS - len(dropped)
    kinds = ["full"] * 3 + ["sliding", "full"]
    left = [f"{kind}_attention" for index, kind in enumerate(kinds) if index not in dropped]
    assert config["layer_types"] == left
    description = json.loads((path / "prepare.json").read_text())
    assert description["layers"] == LAYERS - len(dropped)
    assert description["prepare"]["drop_layers"] == [*dropped]
    assert load_student(path)[1].get_vocab() == load_student(source)[1].get_vocab()


def test_layers_elsewhere_are_found(problems: ProblemSet, tmp_path: Path) -> None:
    """GPT-2 calls them transformer.h, and its config n_layer."""
    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "source")
    path = prepare_model(without(tmp_path / "source", 0), problems, tmp_path)
    before, after = (load_student(folder)[0].state_dict() for folder in (tmp_path / "source", path))
    assert json.loads((path / "config.json").read_text())["n_layer"] == 2
    name = "mlp.c_fc.weight"
    assert torch.equal(after[f"transformer.h.0.{name}"], before[f"transformer.h.1.{name}"])
    assert f"transformer.h.2.{name}" not in after


def test_key_depends_on_the_layers_not_on_their_order(source: Path, problems: ProblemSet) -> None:
    """The key of a model that is only rounded is that of earlier versions: no layer is in it."""
    keys = [cache_key(without(source, *layers), problems) for layers in ((1, 3), (3, 1), (1,))]
    assert keys[0] == keys[1] != keys[2]
    assert str(keys[0]).startswith("without-2-")
    rounded = {"quantize": {"bits": 3, "group": 8}}
    both = cache_key(without(source, 1, **rounded), problems)
    only = cache_key(without(source, **rounded), problems)
    assert str(both).startswith("without-1-rounded-3bit-8-")
    assert str(only).startswith("rounded-3bit-8-") and len({both, only, *keys}) == 4


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([1, 5, 7], "drop_layers names 5, 7, and {} has the layers 0 to 4: choose among them"),
        ([0, 1, 2, 3, 4], "drop_layers names all 5 layers of {}: leave one"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(
    layers: list[int], complaint: str, source: Path, problems: ProblemSet, tmp_path: Path
) -> None:
    """Nothing is left in the cache."""
    with pytest.raises(ValueError) as caught:
        prepare_model(without(source, *layers), problems, tmp_path)
    assert str(caught.value) == complaint.format(source)
    left = {path.name.partition(".")[2] for path in (tmp_path / "models").iterdir()}
    assert left <= {"lock", "unfinished"}
