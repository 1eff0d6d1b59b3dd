"""The plan of a dry run: what it says, what it refuses, and that it writes nothing."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local import requirements
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
    lines = planned(tiny_recipe())
    assert lines[0] == "student: to be prepared now: 5 steps of fine-tuning"
    assert lines[1] == "teacher: to be prepared now: 150 steps of fine-tuning"
    assert "prompt lengths: not checked" in lines[-1]
    assert not (tmp_path / "cache").exists()


def test_plan_of_cached_models_checks_the_prompts() -> None:
    """With tokenizers on this machine the longest prompt is measured."""
    folder = tiny_models(TINY_RECIPE)["student"]
    lines = planned(TINY_RECIPE)
    assert lines[0] == f"student: prepared, cached in {folder}"
    assert "support: K = 8, chosen by the teacher" in lines
    assert "problems: 54 problems to train on, 6 held out" in lines
    assert any(line.startswith("steps: 4 of 6 prompts x 1 rollouts; 24 rollouts") for line in lines)
    assert lines[-1].startswith("longest prompt: ")


def test_plan_counts_no_more_problems_than_are_held_out(tiny_recipe: Raw) -> None:
    lines = planned(tiny_recipe(eval__size=5, eval__kl_size=64))
    assert "problems: 54 problems to train on, 6 held out" in lines
    (line,) = (line for line in lines if line.startswith("evaluation: "))
    assert line.endswith(", 5 problems, 6 for the reverse KL")


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
        ({"student": {"model": "/no/such/folder"}}, "is neither a directory on this machine"),
        (
            {"loss": {"type": "topk_reverse_kl", "k": 8, "special_tokens": {"strings": ["<x>"]}}},
            "<x>",
        ),
    ],
    ids=["sft", "context", "hint", "directory", "special token"],
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


def test_plan_measures_hints_of_held_out_problems(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Their solutions are the hints of an evaluation."""
    tiny_models(TINY_RECIPE)
    worked = {"question": "How many?", "answer": "1 + 1 = 2\n" * 30 + "#### 2"}
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(10)]
    write_parts(tmp_path, rows, [worked])
    raw = tiny_recipe(
        teacher={"policy": {}}, loss={"type": "self_distillation", "k": 8}, rollout__max_tokens=8
    )
    folder = tiny_models(TINY_RECIPE)["student"]
    raw |= {"data": {"path": str(tmp_path)}, "student": {"model": str(folder)}}
    with pytest.raises(PreflightError, match="The longest held-out prompt with its hint has"):
        planned(raw)


def test_plan_names_missing_libraries(tiny_recipe: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """All missing libraries are named with the pip lines."""
    missing = {"vllm", "matplotlib"}
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ImportError, match="needs matplotlib, vllm: pip install"):
        planned(tiny_recipe(rollout__backend="vllm"))


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
        (None, 300, [], 2048),
        (None, 3000, [None, 8192], 3000),
        (None, 3000, [8192, 512], 512),
        (None, 10, [None], 2048),
        (700, 3000, [512], 700),
    ],
)
def test_context_follows_needs_up_to_the_windows(
    length: int | None, needed: int, windows: list[int | None], context: int
) -> None:
    assert RolloutConfig(max_model_len=length).context(needed, windows) == context


def test_plan_of_a_context_of_its_own_reads_it_of_the_longest_prompt(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Of models without a window that is known, the longest prompt decides."""
    folders = tiny_models(TINY_RECIPE)
    models = {}
    for name, path in folders.items():
        shutil.copytree(path, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["max_position_embeddings"] = 10**6
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        models[name] = {"model": str(tmp_path / name)}
    raw = tiny_recipe(**models)
    raw["rollout"] = {"backend": "transformers", "max_tokens": 5000}
    (line,) = [line for line in planned(raw) if line.startswith("longest prompt")]
    longest, whole, context = map(int, re.findall(r"\d+", line))
    assert whole == longest + 5000 and context == whole + 1
