"""Whole runs of an unmodified prime-rl, one after the other, as a recipe with stages is exported.

As in test_whole_run.py, whose functions and stand-ins these are.
"""

import shutil
import subprocess

import pytest

from tests.upstream import test_whole_run as whole_run
from tests.upstream.e2e import cpu_recipe
from tests.upstream.test_whole_run import TOP_K, mean, other

models = whole_run.models


@other
@pytest.mark.parametrize("version", ["v0.6", "v0.7", "v0.8", "head"])
def test_whole_run_begins_with_the_weights_of_the_stage_before(trees, models, tmp_path, version):
    """The first divergence is that of the weights that the first run left, and not of its own."""
    first = whole_run.run(version, trees, models, tmp_path / "first", TOP_K)
    given = first["models"]
    before = tmp_path / "first" / "outputs"
    left, commands = left_by(version, given / "student", before)
    for command in commands:
        subprocess.run(command, shell=True, check=True)
    made = tmp_path / "models"
    made.mkdir()
    (made / "student").symlink_to(left)
    shutil.copytree(given / "teacher", made / "teacher")
    second = whole_run.run(
        version, trees, lambda *_: made, tmp_path / "second", TOP_K, after=before
    )
    assert f"{left}" in (tmp_path / "second" / "run.toml").read_text()
    whole_run.check_top_k(second, version)
    own, start = (mean(whole_run.reference(one)[0]["tail_kl_bfloat16"]) for one in (first, second))
    assert abs(own - start) > 2e-2


def left_by(version, student, run_dir):
    """Return the weights that a stage begins with, and the commands before it, as exported."""
    recipe = {
        "student": {"model": str(student)},
        "teacher": {"model": "t", "url": "http://127.0.0.1:1"},
        "loss": TOP_K,
        "data": {},
        "trainer": {"steps": cpu_recipe.STEPS},
    }
    table, commands = cpu_recipe.next_stage(recipe, version, run_dir, run_dir / "next")
    return table["model"]["name"], [c for c in commands if not c.endswith(".toml")]
