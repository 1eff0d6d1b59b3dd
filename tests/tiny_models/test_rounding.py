"""Models whose weights are rounded, and their cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from prime_composer.backends.hf_model import load_student
from prime_composer.backends.model_files import fingerprint
from prime_composer.cli.commands import main
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import ProblemSet, load_problem_set
from prime_composer.recipe.prepare import DamagedConfig
from prime_composer.tiny_models.cache import cache_key, prepare_model
from prime_composer.tiny_models.rounding import linear_layers, round_to_nearest
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models


@pytest.fixture(scope="module")
def problems() -> ProblemSet:
    return load_problem_set({"problems": DataConfig(size=60)})


@pytest.fixture(scope="module")
def source() -> Path:
    """A model of width 16: attention of 32, an MLP of 32, tied embeddings."""
    return tiny_models(TINY_RECIPE)["student"]


def rounded(source: Path | str, bits: int = 3, group: int = 8) -> DamagedConfig:
    table = {"from": str(source), "quantize": {"bits": bits, "group": group}}
    return DamagedConfig.model_validate(table)


def recipe_of(source: Path | str, **settings: int) -> dict[str, Any]:
    prepare = rounded(source, **settings).model_dump(mode="json")
    return {**TINY_RECIPE, "student": {"prepare": prepare}, "teacher": {"model": str(source)}}


def test_round_to_nearest_gives_levels_from_minimum_to_maximum() -> None:
    """Two bits in groups of four: -1 ... 2 has the levels -1, 0, 1, 2, and 0 ... 6 0, 2, 4, 6."""
    weight = torch.tensor([[-1.0, 0.4, 0.6, 2.0, 0.0, 2.9, 3.1, 6.0], [5.0] * 4 + [-3.0] * 4])
    expected = [[-1.0, 0.0, 1.0, 2.0, 0.0, 2.0, 4.0, 6.0], [5.0] * 4 + [-3.0] * 4]
    torch.testing.assert_close(round_to_nearest(weight, 2, 4), torch.tensor(expected))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def weights_to_round(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Return groups of eight: of any numbers, or of neighbors, among which levels fall together."""
    format_ = torch.finfo(dtype)
    largest = min(format_.max, 1e30)
    count = 8 * draw(st.integers(1, 3))
    if draw(st.booleans()):
        numbers = st.floats(-largest, largest)
        return torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count))).to(dtype)[None]
    # Across a power of two, where the distance of neighbors doubles.
    base = draw(st.sampled_from([1.0, -1.0, 0.97, 0.0, 3.0])) * 2.0 ** draw(st.integers(-12, 12))
    reach = draw(st.integers(1, 400))
    offsets = st.lists(st.integers(-reach, reach), min_size=count, max_size=count)
    unit = format_.eps * (abs(base) or format_.tiny)
    return (base + unit * torch.tensor(draw(offsets), dtype=torch.float64)).to(dtype)[None]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), bits=st.integers(2, 8))
def test_rounding_twice_changes_no_bit(dtype: torch.dtype, data: st.DataObject, bits: int) -> None:
    """The ends of a group stay, it has at most 2^bits values, and none moves by more than half a
    level and a rounding."""
    weight = data.draw(weights_to_round(dtype))
    once = round_to_nearest(weight, bits, 8)
    assert once.dtype == dtype and torch.equal(once, round_to_nearest(once, bits, 8))
    for before, after in zip(weight.view(-1, 8), once.view(-1, 8), strict=True):
        assert torch.equal(torch.stack(before.aminmax()), torch.stack(after.aminmax()))
        assert len(after.unique()) <= 2**bits
        low, high = (float(end) for end in before.aminmax())
        level = (high - low) / (2**bits - 1)
        unit = max(abs(low), abs(high)) * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
        moved = (before.double() - after.double()).abs().max()
        assert float(moved) <= level / 2 * 1.001 + 2 * unit


def test_rounded_model_keeps_all_but_linear_layers(
    source: Path, problems: ProblemSet, tmp_path: Path
) -> None:
    """The seven matrices of the layer are rounded, embeddings and norms stay, and so does the
    tokenizer."""
    path = prepare_model(rounded(source), problems, tmp_path)
    (model, tokenizer), (original, own) = load_student(path), load_student(source)
    before, after = original.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    projections = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    projections |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert changed == {f"model.layers.0.{name}.weight" for name in projections}
    for name in changed:
        assert torch.equal(after[name], round_to_nearest(before[name], 3, 8))
    assert tokenizer.get_vocab() == own.get_vocab()
    description = json.loads((path / "prepare.json").read_text())
    # q and k and v and o: 16 x 32 each; gate, up and down: 16 x 32 each.
    assert description["rounded"] == 7 * 16 * 32
    assert description["weights"] == sum(weight.numel() for weight in original.parameters())


def test_linear_layers_leave_the_output_head_out(source: Path) -> None:
    """An untied head is a linear layer as well, and is not rounded."""
    model: Any = load_student(source)[0]
    names = [name for name, _ in linear_layers(model)]
    assert len(names) == 7 and "lm_head" not in names
    model.set_output_embeddings(nn.Linear(16, 300, bias=False))
    assert len(list(linear_layers(model))) == 7


def test_rounded_model_is_cached_by_content_and_settings(
    source: Path, problems: ProblemSet, tmp_path: Path
) -> None:
    """A copy elsewhere is the same model. Other bits, groups or weights are another one."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    key = cache_key(rounded(source), problems)
    assert key == cache_key(rounded(copy), problems) and key.startswith("rounded-3bit-8-")
    other_data = load_problem_set({"problems": DataConfig(size=80)})
    assert key == cache_key(rounded(source), other_data)
    keys = {key, cache_key(rounded(source, bits=4), problems)}
    keys.add(cache_key(rounded(source, group=16), problems))
    path = prepare_model(rounded(copy), problems, tmp_path)
    assert prepare_model(rounded(copy), problems, tmp_path) == path == tmp_path / "models" / key
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    keys.add(cache_key(rounded(copy), problems))
    assert len(keys) == 4


def test_fingerprint_reads_the_ends_of_a_large_file(tmp_path: Path) -> None:
    """Of 40 MB it reads a tenth, evenly spaced; a README does not count."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(40 * 2**20))
    first = fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("x")
    assert fingerprint(str(tmp_path)) == first
    for offset in (0, 20 * 2**20, 40 * 2**20 - 40960):
        with weights.open("r+b") as file:
            file.seek(offset)
            file.write(b"\1")
        assert fingerprint(str(tmp_path)) != first
        with weights.open("r+b") as file:
            file.seek(offset)
            file.write(b"\0")
    assert fingerprint(str(tmp_path)) == first
    assert fingerprint(str(tmp_path / "no-folder")) is None
    assert fingerprint("org/never-downloaded") is None


def test_export_names_the_rounded_model(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`prepare` prints its folder, and the export has it as the student."""
    import tomli_w

    path = tmp_path / "r.toml"
    path.write_text(tomli_w.dumps(recipe_of(source, bits=5)))
    command = ["export", str(path), "--dialect", "head", "--set", "trainer.dtype=bfloat16"]
    assert main(command) == 2
    assert "[student.prepare]: builds" in capsys.readouterr().err
    assert main(["prepare", "--config", str(path)]) == 0
    folder = capsys.readouterr().out.splitlines()[-1].removeprefix("student: ")
    assert "/rounded-5bit-8-" in folder
    assert main(command) == 0
    assert f'"{folder}"' in capsys.readouterr().out
