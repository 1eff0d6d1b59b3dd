"""The model that comes with the package: found before the cache, rebuilt only on request."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_composer.local.dry_run import describe_model
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import load_recipe
from prime_composer.tiny_models import cache
from prime_composer.tiny_models.cache import SHIPPED, cached_path, is_shipped, prepare_model
from tests.command import prime_rl
from tests.tiny_models.test_prepare import PROBLEMS, RECIPES, TINY

PRUNED = TINY.model_copy(update={"prune": 0.5})
README_RECIPE = RECIPES / "gsm8k_opd.toml"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package with one model, and the cache that it was trained in."""
    trained = prepare_model(TINY, PROBLEMS, tmp_path / "elsewhere")
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "shipped")
    folder = tmp_path / "shipped" / trained.name
    shutil.copytree(trained, folder)
    weights = {name: value.half() for name, value in load_file(trained / cache.WEIGHTS).items()}
    save_file(weights, folder / cache.WEIGHTS)
    note(folder, sha256=hashlib.sha256((folder / cache.WEIGHTS).read_bytes()).hexdigest())
    return folder


def note(folder: Path, **details) -> None:
    file = folder / "prepare.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | details))


def refuse(done, steps, loss):
    raise AssertionError("trained")


def test_readme_recipe_has_its_teacher_in_the_package(tmp_path, monkeypatch):
    """Nothing is trained; the student is the teacher without 68% of its layers' weights."""
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path))
    recipe = load_recipe(README_RECIPE)
    problems = load_problem_set(recipe.sources)
    teacher = prepare_model(recipe.teacher.prepare, problems, progress=refuse)
    assert is_shipped(teacher) and sum(f.stat().st_size for f in SHIPPED.rglob("*")) < 1_000_000
    assert not list(tmp_path.iterdir())
    assert describe_model(recipe.teacher, teacher) == (
        f"prepared, comes with the package: {teacher}"
    )
    student = prepare_model(recipe.student.prepare, problems)
    assert not is_shipped(student) and cached_path(recipe.student.prepare, problems) == student
    whole, pruned = load_file(teacher / cache.WEIGHTS), load_file(student / cache.WEIGHTS)
    for name, weight in pruned.items():
        kept = weight != 0
        assert weight.dtype == torch.float32
        assert torch.equal(weight[kept], whole[name].float()[kept])
        if "layers" in name and weight.ndim == 2:
            assert int((~kept).sum()) == round(0.68 * weight.numel())


def test_package_comes_before_the_cache(shipped, tmp_path):
    """A model that an older version has trained is not used."""
    assert cached_path(TINY, PROBLEMS, tmp_path / "elsewhere") == shipped
    assert prepare_model(TINY, PROBLEMS, tmp_path / "elsewhere", progress=refuse) == shipped


def test_rebuilt_model_comes_before_the_package(shipped, tmp_path):
    """And what was pruned from the package's model is pruned again."""
    first = prepare_model(PRUNED, PROBLEMS, tmp_path / "new")
    of_package = (first / cache.WEIGHTS).read_bytes()
    rebuilt = prepare_model(TINY, PROBLEMS, tmp_path / "new", rebuild=True)
    assert rebuilt.parent.parent == tmp_path / "new"
    assert cached_path(TINY, PROBLEMS, tmp_path / "new") == rebuilt
    assert cached_path(PRUNED, PROBLEMS, tmp_path / "new") is None
    again = prepare_model(PRUNED, PROBLEMS, tmp_path / "new")
    assert again == first and (again / cache.WEIGHTS).read_bytes() != of_package
    assert cached_path(PRUNED, PROBLEMS, tmp_path / "new") == again
    shutil.rmtree(rebuilt)
    assert cached_path(TINY, PROBLEMS, tmp_path / "new") == shipped


def test_damaged_model_of_the_package_is_refused(shipped, tmp_path):
    """With the file, and what to do."""
    content = bytearray((shipped / cache.WEIGHTS).read_bytes())
    content[-1] ^= 1
    (shipped / cache.WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=f"{shipped.name}.*is damaged; install prime-composer"):
        cached_path(TINY, PROBLEMS, tmp_path)


@pytest.mark.slow
@pytest.mark.vllm
def test_rebuilt_pair_heals_like_that_of_the_package(tmp_path, monkeypatch):
    """The README's command after ``prepare --rebuild``: other models, the same healing."""
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path / "cache"))
    prime_rl("prepare", "--config", README_RECIPE, "--rebuild", check=True)
    prime_rl("rl", "--config", README_RECIPE, "--output-dir", tmp_path / "run", check=True)
    assert len(list((tmp_path / "cache" / "models").glob("qwen3-*/prepare.json"))) == 2
    records = [row for row in read_metrics(tmp_path / "run") if "eval/accuracy" in row]
    assert records[0]["eval/accuracy"] < 0.5 < 0.9 < records[-1]["eval/accuracy"]
    assert records[-1]["eval/reverse_kl"] < 0.1 * records[0]["eval/reverse_kl"]
