"""Small models prepared on the spot, and their cache."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problem_set, load_problems
from prime_composer.problems.prompts import render_prompt
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.prepare import PrepareConfig
from prime_composer.tiny_models.cache import cache_key, cached_path, prepare_model, prepare_models

RECIPES = Path(__file__).parents[2] / "recipes"

TINY = PrepareConfig(
    vocab_size=300,
    hidden_size=16,
    layers=1,
    heads=1,
    head_dim=16,
    intermediate_size=32,
    sft_steps=4,
    batch_size=8,
)
DATA = DataConfig(size=60)
PROBLEMS = load_problem_set({"problems": DATA})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache):
    return prepare_model(TINY, PROBLEMS, cache)


def key_of(config=TINY, data=DATA):
    return cache_key(config, load_problem_set({"problems": data}))


def load(path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def test_prepared_folder_is_a_hugging_face_model(tiny):
    model, tokenizer = load(tiny)
    end = tokenizer.eos_token_id
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert tokenizer.decode([end]) == "<|endoftext|>" and tokenizer.pad_token_id == end
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    description = json.loads((tiny / "prepare.json").read_text())
    assert description["prepare"]["sft_steps"] == 4 and description["loss"] > 0


def test_tokenizer_gives_one_token_per_digit(tiny):
    _, tokenizer = load(tiny)
    problem = load_problems(DATA)[0][0]
    ids = render_prompt(problem, DATA, tokenizer)
    assert tokenizer.decode(ids) == f"Question: {problem.question}\nAnswer:"
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" 12 + 345 = 357\n#### 357")]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("12345357357")
    assert "".join(pieces) == " 12 + 345 = 357\n#### 357"


def test_prepare_model_is_reproducible(tiny, tmp_path):
    torch.rand(3)  # the state of the global generator does not matter
    again = prepare_model(TINY, PROBLEMS, tmp_path)
    for file in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again / file).read_bytes() == (tiny / file).read_bytes()


def test_prepare_model_keeps_random_state_and_threads(tmp_path):
    torch.rand(3)  # not where an earlier preparation would have left it
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    prepare_model(TINY, PROBLEMS, tmp_path)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_pruned_model_lacks_the_smallest_weights(tiny, cache):
    calls = []
    pruned = prepare_model(
        TINY.model_copy(update={"prune": 0.7}),
        PROBLEMS,
        cache,
        progress=lambda *numbers: calls.append(numbers),
    )
    assert [numbers[:2] for numbers in calls] == [(4, 4)]  # nothing was trained
    assert (pruned / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    whole, after = load(tiny)[0].state_dict(), load(pruned)[0].state_dict()
    matrices = 0
    for name, weight in after.items():
        if "layers" in name and weight.ndim == 2:
            matrices += 1
            gone = weight == 0
            assert int(gone.sum()) == round(0.7 * weight.numel())
            assert torch.equal(weight[~gone], whole[name][~gone])
            assert whole[name][gone].abs().max() <= whole[name][~gone].abs().min()
        else:
            assert torch.equal(weight, whole[name])
    assert matrices == 7


def test_with_hints_adds_the_answer_to_a_share():
    from prime_composer.tiny_models.training import with_worked_hints

    problems = load_problems(DataConfig(size=600))[0]
    config = TINY.model_copy(update={"hint_template": "{hint} | {question}", "hint_share": 0.25})
    with_hint = with_worked_hints(problems, config)
    hinted = [(a, b) for a, b in zip(problems, with_hint, strict=True) if a != b]
    assert 0.18 * len(problems) < len(hinted) < 0.32 * len(problems)
    assert all(
        b.question == f"{a.answer} | {a.question}" and b.answer == a.answer for a, b in hinted
    )
    assert with_worked_hints(problems, config) == with_hint
    assert with_worked_hints(problems, TINY) == problems


def test_cache_key_covers_all_that_the_model_learns_from(tmp_path):
    changes = {
        "vocab_size": 301, "hidden_size": 24, "layers": 2, "heads": 2, "head_dim": 8,
        "intermediate_size": 16, "tie_word_embeddings": False, "max_position_embeddings": 128,
        "sft_steps": 5, "batch_size": 9, "learning_rate": 1e-3, "matrix_learning_rate": 1e-2,
        "label_smoothing": 0.1, "seed": 1, "prune": 0.5, "hint_template": "{hint} {question}",
        "hint_share": 0.5, "environments": ("problems",), "pieces": "gpt2",
    }  # fmt: skip
    assert set(changes) == set(PrepareConfig.model_fields)
    keys = [key_of(TINY.model_copy(update={name: value})) for name, value in changes.items()]
    data = [
        DATA.model_copy(update=u)
        for u in ({"size": 61}, {"seed": 1}, {"prompt_template": "{question}"})
    ]
    keys += [key_of(), *(key_of(data=d) for d in data)]
    assert len(set(keys)) == len(keys)


def test_cache_key_ignores_the_rest(tmp_path):
    assert key_of() == key_of(data=DATA.model_copy(update={"metric": "math_verify"}))
    keys = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for split in ("train", "test"):
            row = {"question": f"{split}?", "answer": "#### 1"}
            (folder / f"{split}.jsonl").write_text(json.dumps(row))
        keys.add(key_of(data=DataConfig(source="jsonl", path=folder)))
    assert len(keys) == 1
    (tmp_path / "b" / "train.jsonl").write_text(
        json.dumps({"question": "train?", "answer": "#### 2"})
    )
    assert key_of(data=DataConfig(source="jsonl", path=tmp_path / "b")) not in keys


RECORDED_KEYS = {
    "gsm8k_opd.toml": {
        "student": "qwen3-3x64-2ca34ced3eaccb94",
        "teacher": "qwen3-3x64-85ce59de427ae719",
    },
    "methods/gsm8k_two_teachers.toml": {
        "student": "qwen3-3x64-6d2a44283e825b4e",
        "teachers.short": "qwen3-3x64-59de0abda63e3913",
        "teachers.long": "qwen3-3x64-1e594f9dc7d89624",
    },
}
"""Cache keys that commit 1e07b90 computes for these tables. Users have models under them."""


@pytest.mark.parametrize("name", RECORDED_KEYS)
def test_cache_key_of_shipped_recipes_is_as_recorded(name, tmp_path, monkeypatch):
    """Models that users prepared before are found again, each under its table."""
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path))
    recipe = load_recipe(RECIPES / name)
    keys = RECORDED_KEYS[name]
    for key in keys.values():
        (tmp_path / "models" / key).mkdir(parents=True)
    paths = prepare_models(recipe, load_problem_set(recipe.sources))
    assert {table: path.name for table, path in paths.items()} == keys


def test_prepare_models_builds_each_model_under_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path))
    student = {**TINY.model_dump(exclude_unset=True), "prune": 0.5}
    teacher = TINY.model_dump(exclude_unset=True)
    recipe = parse_recipe(
        {
            "student": {"prepare": student},
            "teachers": {"a": {"prepare": teacher}, "b": {"model": "elsewhere"}},
            "loss": {"type": "topk_reverse_kl"},
            "data": {"size": 60},
            "trainer": {"steps": 1},
        }
    )
    announced, trained = [], []

    def progress(display, steps):
        announced.append((display, steps))
        return lambda done, steps, loss: trained.append((display, done))

    paths = prepare_models(recipe, PROBLEMS, progress=progress)
    assert list(paths) == ["teachers.a", "student"]
    assert announced == [("teacher a", 4), ("student", 4)]
    assert [done for display, done in trained if display == "teacher a"] == [1, 2, 3, 4]
    assert [done for display, done in trained if display == "student"] == [4]  # pruned, not trained
    assert prepare_models(recipe, PROBLEMS, progress=progress) == paths and len(announced) == 2
    trained.clear()
    (paths["student"] / "stale").touch()
    assert prepare_models(recipe, PROBLEMS, rebuild=True, progress=progress) == paths
    assert not (paths["student"] / "stale").exists()
    assert trained == [("teacher a", done) for done in (1, 2, 3, 4)] + [("student", 4)]


KILLED = """
import os, signal, sys
from pathlib import Path
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.prepare import PrepareConfig
from prime_composer.tiny_models.cache import prepare_model
config = PrepareConfig.model_validate_json(sys.argv[2])
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "training":
    progress = lambda done, steps, loss: done == 2 and die()
else:
    progress = None
    from prime_composer.tiny_models import training
    training.PreTrainedTokenizerFast.save_pretrained = die
problems = load_problem_set({"problems": DataConfig(size=60)})
prepare_model(config, problems, Path(sys.argv[1]), progress=progress)
"""


def killed(cache, moment):
    command = [sys.executable, "-c", KILLED, str(cache), TINY.model_dump_json(), moment]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_prepare_model_killed_leaves_no_half_model(tmp_path):
    killed(tmp_path, "training")
    assert cached_path(TINY, PROBLEMS, tmp_path) is None
    killed(tmp_path, "saving")
    assert (
        tmp_path / "models" / f"{key_of()}.unfinished" / "model.safetensors"
    ).exists()  # it came that far
    assert cached_path(TINY, PROBLEMS, tmp_path) is None
    path = prepare_model(TINY, PROBLEMS, tmp_path)
    assert (path / "model.safetensors").exists() and (path / "tokenizer.json").exists()
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_prepare_model_at_once_trains_it_once(tmp_path, monkeypatch):
    builds = []

    def slow_build(config, problems, folder, progress):
        builds.append(threading.get_ident())
        time.sleep(0.3)
        (folder / "model.safetensors").touch()
        return 0.5

    monkeypatch.setattr("prime_composer.tiny_models.training.build_model", slow_build)
    found = []
    runs = [
        threading.Thread(target=lambda: found.append(prepare_model(TINY, PROBLEMS, tmp_path)))
        for _ in range(3)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(builds) == 1
    assert found == [found[0]] * 3 and (found[0] / "model.safetensors").exists()


def test_prepare_model_too_long_example_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="longest training example has .* raise it to at least"):
        prepare_model(TINY.model_copy(update={"max_position_embeddings": 16}), PROBLEMS, tmp_path)
    assert cached_path(TINY, PROBLEMS, tmp_path) is None


def test_fine_tuning_that_diverges_is_refused(tmp_path):
    """A model of NaN is never cached; the message names the rates."""
    config = TINY.model_copy(update={"learning_rate": 1e30, "matrix_learning_rate": 1e30})
    with pytest.raises(ValueError, match="the loss of step [2-4] is .*; lower learning_rate"):
        prepare_model(config, PROBLEMS, tmp_path)
    assert cached_path(config, PROBLEMS, tmp_path) is None
