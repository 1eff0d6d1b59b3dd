"""What a resumed run has to find as it was: data, and a tape's teacher."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer import distill
from prime_composer.recipe.schema import RecipeError
from tests.conftest import TINY_MODEL, TINY_RECIPE
from tests.local.helpers import copy_first_half, run, tiny_models

Raw = Callable[..., dict[str, Any]]
Rows = list[dict[str, str]]


def rows(first: int = 0) -> Rows:
    return [
        {"question": f"What is {first + i} plus {i}?", "answer": f"#### {first + 2 * i}"}
        for i in range(40)
    ]


def without_preparation(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with its models by their folders: other data would make other models."""
    folders = tiny_models(TINY_RECIPE)
    return raw | {table: {"model": str(folders[table])} for table in ("student", "teacher")}


def write(path: Path, data: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))


def test_resume_with_another_file_of_data_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Other rows, in another order, fewer, or with one answer changed; the same file goes on."""
    file, data = tmp_path / "data.jsonl", rows()
    write(file, data)
    raw = without_preparation(tiny_recipe(checkpoint={"every": 2, "keep": 2}))
    raw["data"] = {"path": str(file), "hold_out": 0.2}
    run(raw, tmp_path / "whole")
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    kept = {path: path.read_bytes() for path in (tmp_path / "cut").rglob("*") if path.is_file()}
    changed = [*data[:5], {**data[5], "answer": "#### 1"}, *data[6:]]
    for others in (rows(500), data[::-1], data[:-1], changed):
        write(file, others)
        with pytest.raises(RecipeError, match=r"--resume: the problems to .*\[data\].*a new run"):
            run(raw, tmp_path / "cut", resume=True)
    assert all(path.read_bytes() == content for path, content in kept.items())
    write(file, data)
    assert run(raw, tmp_path / "cut", resume=True).steps == raw["trainer"]["steps"]


def test_distill_resume_with_other_rows_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Rows that are passed have no file; what is held out is compared as well."""
    raw = without_preparation(tiny_recipe(checkpoint={"every": 1}, trainer__steps=2))
    raw["data"] = {"hold_out": 0.2}
    distill(raw, rows(), output_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000002")
    with pytest.raises(RecipeError, match="the problems to train on and the problems to evaluate"):
        distill(raw, rows(500), output_dir=tmp_path / "run", resume=True)
    assert distill(raw, rows(), output_dir=tmp_path / "run", resume=True).steps == 2


def test_resume_with_another_teachers_tape_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Begun with its teacher; the same tape in another folder goes on."""
    raw = tiny_recipe(checkpoint={"every": 2, "keep": 2})
    raw["eval"] = {"every": 0, "size": 2, "kl_size": 0}
    for name, seed in (("other", 5), ("own", 1)):
        raw["teacher"] = {"prepare": {**TINY_MODEL, "seed": seed}, "tape": str(tmp_path / name)}
        run(raw, tmp_path / f"run {name}")
    alone = raw | {"teacher": {"tape": str(tmp_path / "own"), "tape_only": True}}
    copy_first_half(tmp_path / "run own", tmp_path / "cut")
    other = alone | {"teacher": {"tape": str(tmp_path / "other"), "tape_only": True}}
    with pytest.raises(RecipeError, match=r"\[teacher\] tape .*another teacher.* in `tape`"):
        run(other, tmp_path / "cut", resume=True)
    shutil.copytree(tmp_path / "own", tmp_path / "moved")
    moved = alone | {"teacher": {"tape": str(tmp_path / "moved"), "tape_only": True}}
    assert run(moved, tmp_path / "cut", resume=True).steps == raw["trainer"]["steps"]
