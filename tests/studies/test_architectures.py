"""Cells of the table of architectures: some in this process, those of vLLM in their own."""

import sys
from pathlib import Path

import pytest

from tests.studies.architecture_models import ARCHITECTURES
from tests.studies.architectures import CELLS, Cell, fill, run_cell

SECONDS = 280.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of cells, whose models are written once."""
    return tmp_path_factory.mktemp("cells")


def assert_right(cell: Cell, *numbers: str) -> None:
    assert cell.state == "ok", cell
    assert cell.nats.keys() >= {*numbers}


@pytest.mark.parametrize(
    ("name", "side", "numbers"),
    [
        ("GPT-2", "student", ("log mu", "log p")),
        ("Qwen3-MoE", "teacher", ("log q", "top K", "reverse KL")),
    ],
)
def test_transformers_cell_agrees_with_float64(
    name: str, side: str, numbers: tuple[str, ...], folder: Path
):
    """Dry run, run, checkpoint and weight sync; all log-probs are a plain forward's in float64."""
    assert_right(run_cell(name, f"{side}/transformers", folder), *numbers)


@pytest.mark.parametrize(
    ("name", "cell", "words"),
    [
        ("Qwen3-MoE", "student/vllm", ("[student]", "packs its experts", '"transformers"')),
        ("Llava", "student/vllm", ("[student]", "torchvision", '"transformers"')),
        ("Qwen3-Next", "teacher/vllm", ("[teacher]", "recurrent", '"transformers"')),
    ],
)
def test_model_that_no_run_takes_fails_the_dry_run(
    name: str,
    cell: str,
    words: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """One sentence names the table, what is wrong, and the way out; nothing is loaded for it."""
    monkeypatch.setitem(sys.modules, "torchvision", None)  # also where a build for the CPU is here
    result = run_cell(name, cell, folder)
    assert result.state == "refused", result
    assert all(word in result.text for word in words), result.text


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("OLMo-2", "student/vllm"),
        ("Gemma-2", "student/vllm"),
        ("OPT-350m's form", "teacher/vllm"),
        ("LFM2", "teacher/vllm"),
    ],
)
def test_vllm_cell_agrees_with_float64(name: str, cell: str, folder: Path):
    """transformers' own class inside vLLM leaves the trainer's model alone; a narrow head holds;
    capped logits of a model without a head agree before and after new weights;
    queries that come split into heads are rotated by their own positions."""
    assert_right(fill(name, cell, folder, SECONDS))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cell_is_right_or_a_sentence(name: str, cell: str, tmp_path: Path):
    """No cell of the table is a traceback, a wrong number, or a process that dies or hangs."""
    result = fill(name, cell, tmp_path, 600.0)
    assert result.state in ("ok", "refused", "late"), result
