"""The notebooks: kept without outputs, and executed from the first cell to the last."""

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PRINTED = {
    "own_loss": ["the gradient is the closed form", "my_chi:chi_squared", "did you mean most"],
    "support": ["a vocabulary of 415", "the chain rule holds at every K"],
}
"""What an executed notebook prints; its own asserts hold its numbers."""


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def executor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute", ROOT / "docs" / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_its_cells_parse(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    for cell in code:
        ast.parse("".join(cell["source"]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_figures_are_beside_it(path: Path) -> None:
    """One PNG per plt.show(), from python docs/execute.py."""
    shown = sum("plt.show()" in "".join(cell["source"]) for cell in cells(path))
    pictures = sorted(path.parent.glob(f"{path.stem}_*.png"))
    assert [picture.name for picture in pictures] == [
        f"{path.stem}_{number}.png" for number in range(1, shown + 1)
    ]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_the_first_cell_to_the_last(path: Path) -> None:
    reason = "needs pip install 'prime-composer[notebooks]'"
    pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    execute = executor()
    notebook = execute.execute(path)
    printed = execute.printed(notebook)
    assert [text for text in PRINTED[path.stem] if text not in printed] == []
    assert len(execute.figures(notebook)) == 1
