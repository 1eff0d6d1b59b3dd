"""A LoRA student whose frozen weights are kept in 4 bits (QLoRA)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prime_composer.backends.four_bits import four_bit_layers
from prime_composer.backends.hf_model import linear_layers, load_model, sequence_logprobs
from prime_composer.backends.lora.views import weights_of
from prime_composer.backends.protocols import Rollout
from prime_composer.teachers.transformers import TransformersScorer
from tests.conftest import TINY_RECIPE
from tests.local.helpers import opened, run, tiny_models

pytest.importorskip("bitsandbytes")

NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
"""The levels of a block of 64 weights, of which the largest is 1: QLoRA's appendix E."""

SIZES = {"hidden_size": 64, "head_dim": 64, "intermediate_size": 64}
WIDE = {**TINY_RECIPE["student"]["prepare"], **SIZES}
"""Rows of a block or more: bitsandbytes 0.50 gives shorter ones a single scale, on a CPU."""

Raw = Callable[..., dict[str, Any]]


@pytest.fixture
def raw(tiny_recipe: Raw) -> dict[str, Any]:
    return tiny_recipe(
        student__prepare=WIDE,
        student__lora={"rank": 3, "alpha": 7},
        student__load="nf4",
        trainer={"steps": 3, "batch_size": 6, "lr": 1e-2},
    )


def test_sampler_gets_what_the_four_bits_stand_for(raw: dict[str, Any]) -> None:
    """Linear layers have 16 levels per block, near the weights; all others stay. A plain model of
    these weights has the log-probs of the one that trains.
    """
    stored = load_model(tiny_models(raw)["student"])
    before = dict(stored.named_parameters())
    names = {f"{name}.weight" for name, _ in linear_layers(stored)}
    with opened(raw) as engine:
        served = dict(weights_of(engine.model))
        assert {name.removesuffix(".base_layer") for name in four_bit_layers(engine.model)} == {
            name.removesuffix(".weight") for name in names
        }
        for name in names:
            blocks = served[name].reshape(-1, 64)
            scales = blocks.abs().amax(-1, keepdim=True)
            levels = ((blocks / scales)[..., None] - torch.tensor(NF4)).abs().amin(-1)
            assert levels.max() < 1e-3
            wrong = (served[name] - before[name]).detach().reshape(-1, 64) / scales
            assert 0.01 < wrong.abs().max() < 0.16  # half of the widest gap
        for name in before.keys() - names:
            torch.testing.assert_close(served[name], before[name], rtol=0, atol=0)
        ids = list(range(2, 30))
        (own,) = sequence_logprobs(engine.model, [ids])
        stored.load_state_dict(served)
        (plain,) = sequence_logprobs(stored, [ids])
        torch.testing.assert_close(own[1:], plain[1:], rtol=0, atol=1e-5)


def test_teacher_stored_in_four_bits_scores_as_its_plain_weights(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """In this process, by transformers, with the checkpoint's own settings."""
    folder = tiny_models(raw)["student"]
    net: Any = load_model(folder, load="nf4")
    plain = dict(weights_of(net))
    net.save_pretrained(tmp_path)
    rollout = Rollout.not_sampled(torch.arange(2, 30), 4, "length")
    (scores,) = TransformersScorer(tmp_path).score([rollout], 8)
    model = load_model(folder)
    model.load_state_dict(plain)
    (right,) = sequence_logprobs(model, [rollout.token_ids.tolist()])
    torch.testing.assert_close(scores.ref_logprobs, right[4:], rtol=0, atol=1e-5)


def test_run_trains_the_adapter_and_resumes(raw: dict[str, Any], tmp_path: Path) -> None:
    """Preflight and every step compare the sampler with the trainer. A run that is continued ends
    where one without a stop does, and a checkpoint is the adapter's.
    """
    run(raw, tmp_path / "whole")
    raw["trainer"]["steps"] = 2
    run(raw, tmp_path / "parts")
    raw["trainer"]["steps"] = 3
    run(raw, tmp_path / "parts", resume=True)
    folders = [tmp_path / name / "checkpoints" / "step_000003" for name in ("whole", "parts")]
    whole, parts = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    rows = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["grad_norm"] > 0
