"""A student that stays rounded while it learns: forward, sampler, checkpoints and resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from prime_composer.backends.hf_model import load_model, load_student
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.student import ExplodedWeights, Student
from prime_composer.problems.config import DataConfig
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.prepare import DamagedConfig
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.tiny_models.cache import prepare_model
from prime_composer.tiny_models.rounding import linear_layers, round_to_nearest
from tests.conftest import TINY_RECIPE, changed
from tests.local.helpers import collect, copy_first_half, opened, run, tiny_models, weights

Raw = Callable[..., dict[str, Any]]

QUANTIZE = {"bits": 3, "group": 8}


@pytest.fixture(scope="module")
def source() -> Path:
    """A model of width 16, with tied embeddings."""
    return tiny_models(TINY_RECIPE)["student"]


@pytest.fixture
def raw(tiny_recipe: Raw, source: Path) -> dict[str, Any]:
    """Return a recipe whose student is the unrounded model, and stays rounded."""
    return tiny_recipe(
        student={"model": str(source), "quantize": QUANTIZE},
        trainer={"steps": 4, "batch_size": 6, "lr": 1e-2},
    )


def latent_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the latent weights that a checkpoint has beside its model."""
    return torch.load(checkpoint / "trainer.pt", weights_only=True)["latent"]


def test_student_of_step_0_is_the_prepared_one(raw: dict[str, Any], source: Path) -> None:
    """Bit for bit, in trainer and sampler; the latent weights are the unrounded ones."""
    # Other tests count on finding no model of three bits in the cache.
    quantize = {"bits": 6, "group": 8}
    raw["student"]["quantize"] = quantize
    prepare = DamagedConfig.model_validate({"from": str(source), "quantize": quantize})
    problems = load_problem_set({"problems": DataConfig(size=60)})
    prepared = load_model(prepare_model(prepare, problems)).state_dict()
    original = load_model(source).state_dict()
    with opened(raw) as engine:
        sampler: Any = engine.sampler
        for model in (engine.model, sampler.model):
            state = model.state_dict()
            assert state.keys() == prepared.keys()
            assert all(torch.equal(state[name], prepared[name]) for name in state)
        assert engine.latent is not None
        latent = engine.latent.state_dict()
        assert all(torch.equal(latent[name], original[f"{name}.weight"]) for name in latent)
        assert len(latent) == 7


class Rounding(nn.Module):
    """Rounding whose derivative is 1, as autograd's own expression."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (round_to_nearest(weight.detach(), **QUANTIZE) - weight).detach()


def test_step_is_that_of_autograds_straight_through_estimator(
    raw: dict[str, Any], source: Path
) -> None:
    """One step of AdamW on a parametrized copy gives the latent weights, and all others."""
    raw["trainer"] |= {"weight_decay": 0.1, "max_grad_norm": 0.5}
    with opened(raw) as engine:
        recipe = parse_recipe(raw)
        student = Student(recipe, engine)
        batch, _ = collect(engine, recipe, 1)
        expected = load_model(source)
        for _, layer in list(linear_layers(expected)):
            parametrize.register_parametrization(layer, "weight", Rounding())
        accumulate_gradients(expected, student.loss, batch, recipe.trainer, 1)
        metrics = student.update(batch, 1)
        parameters = list(expected.parameters())
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        trainer = recipe.trainer
        torch.optim.AdamW(
            parameters, lr=trainer.lr, betas=trainer.betas, weight_decay=0.1, fused=True
        ).step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert engine.latent is not None
        latent, layers = engine.latent.weights, dict(linear_layers(expected))
        for name, weight in latent.items():
            other: Any = layers[name].parametrizations
            torch.testing.assert_close(weight, other.weight.original, atol=1e-6, rtol=1e-5)
            assert not torch.equal(weight, load_model(source).get_submodule(name).weight)
        own, others = dict(engine.model.named_parameters()), dict(expected.named_parameters())
        exact = own.keys() - {f"{name}.weight" for name in latent}
        assert "model.embed_tokens.weight" in exact
        for name in exact:
            torch.testing.assert_close(own[name], others[name], atol=1e-6, rtol=1e-5)


def test_checkpoints_are_rounded_and_resume_to_the_same_numbers(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """A run that was cut after step 2 ends with the same model and latent weights."""
    run(raw, tmp_path / "whole")
    checkpoints = [one.path for one in list_checkpoints(tmp_path / "whole")]
    models = [load_student(path)[0] for path in checkpoints]
    for path, model in zip(checkpoints, models, strict=True):
        latent = latent_of(path)
        assert len(latent) == 7
        for name, layer in linear_layers(model):
            assert torch.equal(layer.weight, round_to_nearest(latent[name], **QUANTIZE))
            assert torch.equal(layer.weight, round_to_nearest(layer.weight, **QUANTIZE))
            assert all(len(group.unique()) <= 8 for group in layer.weight.reshape(-1, 8))
    first, last = (dict(linear_layers(model)) for model in models)
    assert not any(torch.equal(layer.weight, last[name].weight) for name, layer in first.items())
    expected, latent = weights(tmp_path / "whole"), latent_of(checkpoints[-1])
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    run(raw, tmp_path / "cut", resume=True)
    resumed = weights(tmp_path / "cut")
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    again = latent_of(list_checkpoints(tmp_path / "cut")[-1].path)
    assert all(torch.equal(again[name], latent[name]) for name in latent)


FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
UNTIED = {**TINY_RECIPE["student"]["prepare"], "tie_word_embeddings": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"student__prepare": UNTIED, "loss": FULL},
        {"trainer__gradient_checkpointing": True},
        {"trainer__dtype": "bfloat16"},
        {"teacher": {"policy": {"update": "sync"}}, "rollout__max_model_len": 256},
    ],
    ids=["untied", "recomputed", "bfloat16", "sync"],
)
def test_every_mode_trains_rounded_layers_and_nothing_else_is_rounded(
    changes: dict[str, Any], tiny_recipe: Raw, source: Path, tmp_path: Path
) -> None:
    """The sampler is compared with the trainer in preflight and in each step."""
    raw = tiny_recipe(student={"model": str(source)}, trainer={"steps": 2, "batch_size": 6})
    raw["trainer"]["lr"] = 1e-2
    raw = changed(raw, **changes)
    if "prepare" in raw["student"]:
        del raw["student"]["model"]
    before = load_model(tiny_models(raw).get("student", source))
    raw["student"]["quantize"] = QUANTIZE
    run(raw, tmp_path / "run")
    path = list_checkpoints(tmp_path / "run")[-1].path
    model, latent = load_model(path), latent_of(path)
    layers = dict(linear_layers(model))
    assert len(layers) == 7 and "lm_head" not in layers
    for name, layer in layers.items():
        assert torch.equal(layer.weight, round_to_nearest(latent[name], **QUANTIZE))
        assert not torch.equal(latent[name], before.get_submodule(name).weight)
    state, own = before.state_dict(), model.state_dict()
    for name in state.keys() - {f"{name}.weight" for name in layers}:
        assert not torch.equal(own[name], state[name]), name
        if own[name].ndim == 2:
            assert not torch.equal(own[name], round_to_nearest(own[name], **QUANTIZE)), name


def test_moving_teachers_follow_the_rounded_policy(raw: dict[str, Any]) -> None:
    """An average lies between the levels: it is that of the policies that were served."""
    raw |= {"teacher": {"policy": {"update": "ema", "ema_rate": 0.25}}}
    raw["rollout"]["max_model_len"] = 256
    with opened(raw) as engine:
        teacher, latent = engine.policy_teacher, engine.latent
        assert teacher is not None and latent is not None
        start = {name: layer.weight.clone() for name, layer in latent.layers.items()}
        assert all(torch.equal(teacher.model.get_submodule(n).weight, start[n]) for n in start)
        with torch.no_grad():
            for weight in latent.weights.values():
                weight.mul_(2)
        latent.round()
        engine.end_step(1)
        for name, layer in latent.layers.items():
            expected = 0.75 * start[name] + 0.25 * layer.weight
            torch.testing.assert_close(teacher.model.get_submodule(name).weight, expected)
            assert not torch.equal(layer.weight, start[name])


def test_weights_that_are_not_finite_are_not_saved(raw: dict[str, Any]) -> None:
    """A latent weight beyond all bounds leaves no model, and the run says so."""
    with opened(raw) as engine:
        recipe = parse_recipe(raw)
        student = Student(recipe, engine)
        assert engine.latent is not None
        batch, _ = collect(engine, recipe, 1)
        next(iter(engine.latent.weights.values())).data[0, 0] = float("inf")
        with pytest.raises(ExplodedWeights, match="self_attn.q_proj.weight are not finite"):
            student.update(batch, 1)
