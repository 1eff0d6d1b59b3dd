"""The plan of a dry run: what it says, what it refuses, and that it writes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.opening import open_engine
from prime_composer.local.preflight import preflight
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.teachers.compatibility import PreflightError
from tests.conftest import TINY_RECIPE
from tests.local.helpers import planned, tiny_models

Raw = Callable[..., dict[str, Any]]


def test_plan_of_uncached_models_says_what_is_trained(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are not cached are announced, and nothing is written."""
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path / "cache"))
    assert "prompt lengths: not checked" in planned(tiny_recipe())[-1]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"type": "sft"}}, "set rollout.student_fraction = 0"),
        ({"rollout__max_model_len": 30}, "raise rollout.max_model_len"),
        (
            {
                "teacher": {"policy": {}},
                "loss": {"type": "self_distillation", "k": 8},
                "rollout__max_model_len": 100,
            },
            "with a hint takes 100; raise rollout.max_model_len",
        ),
        (
            {"loss": {"type": "topk_reverse_kl", "k": 8, "special_tokens": {"strings": ["<x>"]}}},
            "<x>",
        ),
    ],
    ids=["sft", "context", "hint", "special token"],
)
def test_plan_refuses_what_a_run_would_refuse(
    changes: dict[str, Any], message: str, tiny_recipe: Raw
) -> None:
    """Errors that a run would have before its first step are raised."""
    tiny_models(TINY_RECIPE)
    with pytest.raises(ValueError, match=message):
        planned(tiny_recipe(**changes))


def write_parts(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    for name, part in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))


def test_plan_and_preflight_measure_held_out_prompts(tiny_recipe: Raw, tmp_path: Path) -> None:
    """One that an evaluation asks is too long; with a smaller evaluation nobody asks it."""
    models = tiny_models(TINY_RECIPE)
    prepared = {name: {"model": str(path)} for name, path in models.items()}
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    long = {"question": f"What is {' + '.join(['1'] * 200)}?", "answer": "#### 200"}
    write_parts(tmp_path, rows[:10], [*rows[10:13], long])
    raw = tiny_recipe(**prepared, data={"path": str(tmp_path)}, eval__kl_size=3)
    words = "The longest held-out prompt has .* raise rollout.max_model_len"
    with pytest.raises(PreflightError, match=words):
        planned(raw)
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    texts: list[str] = []
    with (
        open_engine(recipe, problems, {}, texts.append) as engine,
        pytest.raises(PreflightError, match=words),
    ):
        preflight(engine, recipe, texts.append)
    planned({**raw, "eval": {**raw["eval"], "size": 3}})


def test_context_that_is_unset_fits_the_data_and_the_models(tiny_recipe: Raw) -> None:
    """It is no longer than the smallest window, and as long as the prompts need."""
    tiny_models(TINY_RECIPE)
    raw = tiny_recipe()
    del raw["rollout"]["max_model_len"]
    assert any(line.endswith("; the context is 256") for line in planned(raw))
    with pytest.raises(PreflightError, match="sampler takes 256; .* lower rollout.max_tokens"):
        planned({**raw, "rollout": {**raw["rollout"], "max_tokens": 250}})


@pytest.mark.parametrize(
    ("length", "needed", "windows", "context"),
    [
        (None, 300, [None], 2048),
        (None, 3000, [None, 8192], 3000),
        (None, 3000, [8192, 512], 512),
        (700, 3000, [512], 700),
    ],
)
def test_context_follows_needs_up_to_the_windows(
    length: int | None, needed: int, windows: list[int | None], context: int
) -> None:
    assert RolloutConfig(max_model_len=length).context(needed, windows) == context
