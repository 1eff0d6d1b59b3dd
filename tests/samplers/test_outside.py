"""Samplers and scorers from outside the package, named as ``module:class`` in a recipe."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.requirements import check_libraries, local_models
from prime_composer.recipe.loading import RecipeError, parse_recipe
from tests.command import CLI, numbers, toml
from tests.fork_server import ForkServer
from tests.local.helpers import Silent, copy_first_half, run

Raw = Callable[..., dict[str, Any]]
EXAMPLES = Path(__file__).parents[1] / "examples"
QUEUE = "my_sampler:QueueSampler"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make the example and a module ``bad`` importable, here and in child processes."""
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    yield
    for module in ("my_sampler", "bad"):
        sys.modules.pop(module, None)


def write(tmp_path: Path, source: str) -> None:
    (tmp_path / "bad.py").write_text(textwrap.dedent(source))


SCORER = """
    from prime_composer.teachers.transformers import TransformersScorer

    class Mine(TransformersScorer):
        serves = False
        within_positions = False

        def __init__(self, spec, status):
            status(f"bad opens {spec.section}")
            super().__init__(spec.model, dtype=spec.dtype, max_model_len=spec.max_model_len)
"""


def test_outside_sampler_and_scorer_train_and_resume(tiny_recipe: Raw, tmp_path: Path) -> None:
    """A run has the numbers of those that they wrap, and so has a resumed one."""
    write(tmp_path, SCORER)
    display = Silent()
    raw = tiny_recipe(rollout__backend=QUEUE, teacher__backend="bad:Mine")
    run(raw, tmp_path / "whole", display)
    assert any(text.startswith("my_sampler loads ") for text in display.texts)
    assert "bad opens [teacher]" in display.texts
    whole = numbers(tmp_path / "whole")
    run(tiny_recipe(), tmp_path / "wrapped")
    assert numbers(tmp_path / "wrapped") == whole
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == whole


METHODS = "    def generate(self): ...\n    def update_weights(self): ...\n"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "vlm", "unknown backend 'vlm'; did you mean vllm?"),
        (None, "no_such:X", "module 'no_such' cannot be imported .*PYTHONPATH"),
        ("", "bad:X", "'X' is no class or function of 'bad'"),
        (f"class X:\n{METHODS}", "bad:X", "reached at the `url` of its table: set X.serves to"),
        (
            f"class X:\n    serves = False\n{METHODS}",
            "bad:X",
            "refuses a context .*: set X.within_positions to True or False",
        ),
    ],
)
def test_recipe_refuses_what_is_no_sampler(
    source: str | None, name: str, message: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    if source is not None:
        write(tmp_path, source)
    with pytest.raises(RecipeError, match=f"rollout.backend: .*{message}") as error:
        parse_recipe(tiny_recipe(rollout__backend=name))
    assert repr(name) in str(error.value)


SERVED = f"class X:\n    serves = True\n    within_positions = False\n{METHODS}"


def test_url_goes_with_what_serves(tiny_recipe: Raw, tmp_path: Path) -> None:
    """A served sampler needs a URL, has its own model, and its own context."""
    write(tmp_path, SERVED + "    score = generate\n")
    with pytest.raises(RecipeError, match="backend = 'bad:X' and `url` go together"):
        parse_recipe(tiny_recipe(rollout__backend="bad:X"))
    with pytest.raises(RecipeError, match="backend = 'bad:X' needs `url`"):
        parse_recipe(tiny_recipe(teacher__backend="bad:X"))
    with pytest.raises(RecipeError, match="backend = 'server' and `url` go together"):
        parse_recipe(tiny_recipe(rollout={"backend": QUEUE, "url": "http://a:1"}))
    raw = tiny_recipe(rollout={"backend": "bad:X", "url": "http://a:1"})
    raw["teacher"] = {"model": "m", "backend": "bad:X", "url": "http://b:1"}
    recipe = parse_recipe(raw)
    assert recipe.teacher.runs_on(recipe.rollout.backend) == "bad:X"
    assert [table for table, *_ in local_models(recipe)] == ["student"]


def test_teacher_does_not_take_over_an_outside_sampler(tiny_recipe: Raw) -> None:
    recipe = parse_recipe(tiny_recipe(rollout__backend=QUEUE))
    with pytest.raises(
        ValueError, match=r"is the student's sampler, and a teacher or \[reference\] has none"
    ):
        check_libraries(recipe)


def test_outside_sampler_is_checked_by_the_command_line(
    tiny_recipe: Raw, tmp_path: Path, engine_forks: ForkServer
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml(tiny_recipe(rollout__backend=QUEUE, teacher__backend="transformers")))
    checked = engine_forks.run(*CLI, "check", recipe, cwd=tmp_path)
    assert checked.returncode == 0 and QUEUE in checked.stdout, checked.stderr
    words = ("check", recipe, "--set", "rollout.backend='my_sampler:Queue'")
    refused = engine_forks.run(*CLI, *words, cwd=tmp_path)
    assert refused.returncode == 2 and "rollout.backend" in refused.stderr
