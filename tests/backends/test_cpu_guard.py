"""Threads of the trainer, and memory of the engines, on a CPU."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prime_composer.backends import cpu_guard
from prime_composer.backends.cpu_guard import THREADS_VARIABLE, all_cores
from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import SamplingParams
from prime_composer.backends.vllm import default_kv_cache_bytes
from prime_composer.cli import machine

LARGE = nn.Linear(3200, 3200, bias=False)
"""10.2 million parameters."""


def threads_within(model: nn.Module) -> int:
    with all_cores(model):
        return torch.get_num_threads()


def test_all_cores_are_for_large_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the block there are as many threads as the variable says, and afterwards as before."""
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    before = torch.get_num_threads()
    assert before == 1  # the tests' own setting
    assert threads_within(LARGE) == 2 and torch.get_num_threads() == before
    assert threads_within(nn.Linear(3000, 3000, bias=False)) == before
    with pytest.raises(KeyError), all_cores(LARGE):
        raise KeyError
    assert torch.get_num_threads() == before
    monkeypatch.delenv(THREADS_VARIABLE)
    assert threads_within(LARGE) == before
    monkeypatch.setenv(THREADS_VARIABLE, "many")
    with pytest.raises(ValueError, match=THREADS_VARIABLE):
        threads_within(LARGE)


def test_all_cores_are_there_beside_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaces torch's function by one that does nothing."""
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert threads_within(LARGE) == 2


def test_hidden_torchcodec_is_hidden_from_datasets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that noted it at its own import would import it later, and fail."""
    datasets = SimpleNamespace(config=SimpleNamespace(TORCHCODEC_AVAILABLE=True))
    modules = {"datasets": datasets}
    monkeypatch.setattr(cpu_guard, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(cpu_guard, "built_for_cpu", lambda: True)
    monkeypatch.setattr(cpu_guard.metadata, "version", lambda name: "1.0")
    cpu_guard.hide_cuda_packages()
    assert modules["torchcodec"] is None
    assert not datasets.config.TORCHCODEC_AVAILABLE


@pytest.mark.parametrize(
    ("given", "engines", "threads", "spins"),
    [
        ({}, "1", "5", "100000"),
        ({THREADS_VARIABLE: "3", "GOMP_SPINCOUNT": "7"}, "1", "3", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "1", "5", None),
        ({"OMP_NUM_THREADS": "4"}, "4", None, None),
    ],
)
def test_command_line_allows_the_usable_cores(
    given: dict[str, str],
    engines: str,
    threads: str | None,
    spins: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever set one of the variables has decided already."""
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(machine, "usable_cores", lambda: 5)
    monkeypatch.setattr(os, "environ", dict(given))
    machine.set_environment()
    assert os.environ["OMP_NUM_THREADS"] == engines
    assert os.environ.get(THREADS_VARIABLE) == threads
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000\n", 8), ("200000 100000\n", 2), ("50000 100000\n", 1), (None, 8)],
)
def test_usable_cores_are_those_of_the_container(
    limit: str | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may see all cores of its host, and be stopped when it uses more than its own."""

    def read_text(path: Path, **_: Any) -> str:
        assert str(path) == "/sys/fs/cgroup/cpu.max"
        if limit is None:
            raise FileNotFoundError
        return limit

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(Path, "read_text", read_text)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("sequences", "layers", "expected"),
    [
        # A sequence of 200 tokens has 2 blocks of 128: 2 x layers x 4 heads x 16 x 4 bytes x 256.
        (12, 64, 12 * 8 * 2**20),
        (12, 8, 64 * 2**20),
        (1000, 8, 256 * 2**20),
        (200, 64, 2**30),
        (1, 8192, 2 * 2**30),
    ],
)  # fmt: skip
def test_kv_cache_has_room_for_the_sequences(
    sequences: int, layers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for what a run asks at once, from 64 MiB to 1 GiB, and for two sequences at least."""

    sizes = {"num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": layers}
    config = import_transformers().PreTrainedConfig(**sizes)
    monkeypatch.setattr("prime_composer.backends.vllm.read_config", lambda model: config)
    assert default_kv_cache_bytes("m", "float32", 200, sequences) == expected


@pytest.mark.vllm
def test_engine_computes_the_same_on_two_threads(
    vllm_scorer: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was opened with one thread samples and scores with two, and with one again.

    Also after a weight sync: packed by another number of threads, the weights were wrong.
    """
    monkeypatch.setattr(cpu_guard, "LARGE_MODEL", 0)
    prompts = [[5 + i, 7, 9, 11 * i + 2] for i in range(8)]

    def numbers(threads: str) -> tuple[list[list[int]], torch.Tensor]:
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        with all_cores(models.untied_model):
            assert torch.get_num_threads() == int(threads)
            vllm_scorer.sampler.update_weights(models.untied_model)
            params = SamplingParams(temperature=0.0, max_tokens=20)
            rollouts = vllm_scorer.sampler.generate(prompts, params, seed=0)
            scores = vllm_scorer.score(rollouts, 8)
        ids = [list(rollout.completion_ids) for rollout in rollouts]
        return ids, torch.cat([one.teacher_logprobs for one in scores])

    expected_ids, expected = numbers("1")
    for threads in ("2", "1"):
        ids, logprobs = numbers(threads)
        assert ids == expected_ids
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
