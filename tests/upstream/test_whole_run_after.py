"""Whole runs of an unmodified prime-rl that begin with the weights of another one.

As in test_whole_run.py, whose functions and stand-ins these are.
"""

import shutil

from tests.upstream import test_whole_run as whole_run
from tests.upstream.e2e import cpu_recipe
from tests.upstream.test_whole_run import TOP_K, mean, other

models = whole_run.models


@other
def test_whole_run_begins_with_the_weights_of_another(trees, models, tmp_path):
    """The first divergence is that of the weights that the first run left, and not of its own."""
    first = whole_run.run(trees, models, tmp_path / "first", TOP_K)
    given = first["models"]
    left = left_by(given / "student", tmp_path / "first" / "outputs")
    made = tmp_path / "models"
    made.mkdir()
    shutil.copytree(left, made / "student")
    shutil.copytree(given / "teacher", made / "teacher")
    second = whole_run.run(trees, lambda *_: made, tmp_path / "second", TOP_K)
    whole_run.check_top_k(second)
    own, start = (mean(whole_run.reference(one)[0]["tail_kl_bfloat16"]) for one in (first, second))
    assert abs(own - start) > 2e-2


def left_by(student, run_dir):
    """Return the model that a run left, made whole as the guide says."""
    folder = run_dir / "broadcasts" / f"step_{cpu_recipe.STEPS}"
    for file in student.glob("*.json"):
        if ".index." not in file.name:
            shutil.copy(file, folder)
    return folder
