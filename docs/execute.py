"""Execute the notebooks, and write their figures beside them for the site.

    pip install -e '.[local,notebooks]' && python docs/execute.py [NAME.ipynb ...]

The notebooks themselves are kept without outputs.
"""

import base64
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def execute(path: Path, seconds: int = 600) -> Any:
    """Return a notebook with the outputs of its cells, run in its own folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=seconds, resources=resources).execute()
    return notebook


def figures(notebook: Any) -> list[bytes]:
    """Return the figures that an executed notebook shows, as PNG."""
    return [
        base64.b64decode(output["data"]["image/png"])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def printed(notebook: Any) -> str:
    """Return what the cells of an executed notebook print."""
    return "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    )


def main(names: list[str]) -> None:
    """Execute these notebooks, or all of them."""
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        print(f"{path.name}\n{printed(notebook)}")
        for number, picture in enumerate(figures(notebook), 1):
            path.with_name(f"{path.stem}_{number}.png").write_bytes(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
