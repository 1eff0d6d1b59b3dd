"""Windows of the models, and rows of a batch: the same limits and numbers for every backend."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers, sequence_logprobs
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.backends.transformers import fix_frequencies
from prime_composer.local.opening import open_engine
from prime_composer.local.preflight import preflight
from prime_composer.local.sources import load_sources
from prime_composer.local.weight_sync import check_rows
from prime_composer.recipe.loading import parse_recipe
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.transformers import TransformersScorer
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models
from tests.tiny_qwen import VOCAB, make_model

ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 64,
        "factor": 8.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}
LENGTHS = {"longrope": 512, "dynamic": 32}


def model_with(rope: str) -> torch.nn.Module:
    return make_model(False, 0, rope_parameters=ROPES[rope], max_position_embeddings=LENGTHS[rope])


def rollouts_of(*lengths: int) -> list[Rollout]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, VOCAB, (n,), generator=g) for n in lengths]
    return [Rollout.not_sampled(one, 5, "stop", i) for i, one in enumerate(ids)]


@pytest.mark.parametrize("rope", ROPES)
def test_scores_of_a_row_are_those_of_the_row_alone(rope: str, tmp_path: Path) -> None:
    """Whatever is beside it, and whatever was asked before."""
    model_with(rope).save_pretrained(tmp_path)
    scorer = TransformersScorer(tmp_path, max_model_len=120)
    both = rollouts_of(20, 100)
    together = scorer.score(both, 4)
    for one, beside in zip(both, together, strict=True):
        (alone,) = scorer.score([one], 4)
        torch.testing.assert_close(alone.ref_logprobs, beside.ref_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
def test_sampler_beside_a_long_prompt_has_the_trainers_mu(rope: str, tmp_path: Path) -> None:
    """Sampled beside a longer one, and crossing the length at which frequencies would change."""
    model_with(rope).save_pretrained(tmp_path)
    sampler = TransformersSampler(tmp_path, max_model_len=120, eos_token_ids=[])
    found = sampler.generate([[5, 6, 7], list(range(2, 60))], SamplingParams(max_tokens=40), seed=0)
    trainer = model_with(rope)
    fix_frequencies(trainer, 120)
    for one in found:
        (expected,) = sequence_logprobs(trainer, [one.token_ids.tolist()])
        mask = one.loss_mask
        torch.testing.assert_close(one.inference_logprobs[mask], expected[mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("context", "length"), [(64, 8), (65, 100)])
def test_longrope_frequencies_follow_the_context(context: int, length: int) -> None:
    """Short ones up to the original length and long ones beyond, as transformers has them there."""
    model, plain = model_with("longrope"), model_with("longrope")
    fix_frequencies(model, context)
    ids = torch.arange(2, 2 + length)[None]
    rope = plain.model.rotary_emb
    with torch.no_grad():
        rope(torch.zeros(1), torch.tensor([[length - 1]]))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, rope.inv_freq)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected)


@pytest.mark.vllm
def test_longrope_of_vllm_and_trainer_agree(tmp_path: Path) -> None:
    """On both sides of the original length: vLLM decides by the context of the engine."""
    from prime_composer.backends.vllm import VLLMSampler

    base = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    transformers = import_transformers()
    config = transformers.Phi3Config(
        **base, **layers, bos_token_id=None, eos_token_id=1, initializer_range=0.1,
        max_position_embeddings=512, original_max_position_embeddings=64,
        rope_parameters=ROPES["longrope"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    for context in (64, 128):
        sampler = VLLMSampler(tmp_path, max_model_len=context, eos_token_ids=[])
        found = sampler.generate([[5, 6, 7]], SamplingParams(max_tokens=30), seed=0)
        sampler.close()
        trainer = TransformersScorer(tmp_path, max_model_len=context).model
        (expected,) = sequence_logprobs(trainer, [found[0].token_ids.tolist()])
        mask = found[0].loss_mask
        assert (found[0].inference_logprobs - expected)[mask].abs().max() < 1e-4


@pytest.mark.vllm
def test_dynamic_rope_of_vllm_and_trainer_agree(tmp_path: Path) -> None:
    """Beyond the model's own 32 positions, where vLLM would read behind its table of them."""
    from prime_composer.backends.vllm import VLLMSampler

    model_with("dynamic").save_pretrained(tmp_path)
    for context in (32, 120):
        sampler = VLLMSampler(tmp_path, max_model_len=context, eos_token_ids=[])
        assert sampler.limits.max_model_len == context
        prompt = [*range(2, context - 20)]
        (found,) = sampler.generate([prompt], SamplingParams(max_tokens=20), seed=0)
        sampler.close()
        trainer = model_with("dynamic")
        fix_frequencies(trainer, context)
        (expected,) = sequence_logprobs(trainer, [found.token_ids.tolist()])
        assert (found.inference_logprobs - expected)[found.loss_mask].abs().max() < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_model_whose_rows_depend_on_the_batch_is_refused(side: Any) -> None:
    """By the name of its class and its table, here by the longest position of the batch."""
    model: Any = model_with("longrope")
    with pytest.raises(PreflightError, match=r"\[teachers.a\] Qwen3ForCausalLM.*on the " + side):
        check_rows("teachers.a", model, [[4, 5, 6]], 100, [side])
    check_rows("teachers.a", model, [[4, 5, 6]], 60, [side])
    fix_frequencies(model, 100)
    check_rows("teachers.a", model, [[4, 5, 6]], 100, [side])


def small_teacher(tmp_path: Path) -> str:
    """Return a copy of the tiny recipe's teacher whose config has 24 positions."""
    from shutil import copytree

    folder = tmp_path / "small"
    copytree(tiny_models(TINY_RECIPE)["teacher"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    return str(folder)


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("rule", ["error", "score_head", "drop"])
def test_teachers_own_window_is_its_limit(
    rule: str, backend: str, tiny_recipe: Any, tmp_path: Path
) -> None:
    """Not that of the run: what is longer is refused before the run, or as `on_overflow` says."""
    folders = tiny_models(TINY_RECIPE)
    teacher = {"model": small_teacher(tmp_path), "on_overflow": rule, "backend": backend}
    raw = tiny_recipe(student={"model": str(folders["student"])}, teacher=teacher)
    raw["rollout"] |= {"max_model_len": 128, "max_tokens": 40}
    recipe = parse_recipe(raw)
    with open_engine(recipe, load_sources(recipe), {}, lambda text: None) as engine:
        assert engine.teachers is not None
        (scorer,) = engine.teachers.scorers.values()
        assert scorer.limits.max_model_len == 24
        (spec,) = engine.teacher_specs.values()
        assert spec.max_model_len == 24
        if rule == "error":
            with pytest.raises(PreflightError, match="takes 23; .*model's window"):
                preflight(engine, recipe, lambda text: None)
        else:
            preflight(engine, recipe, lambda text: None)


def test_scorer_and_sampler_without_a_length_take_the_models() -> None:
    """A model's own window; one without has no limit."""
    model = make_model(True, 0, max_position_embeddings=32)
    assert TransformersScorer(model, max_model_len=100).limits.max_model_len == 32
    with pytest.raises(ValueError, match="max_model_len"):
        TransformersScorer(model, max_model_len=100).score(rollouts_of(40), 2)
    transformers = import_transformers()
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    ).eval()
    assert TransformersScorer(bloom).limits.max_model_len is None
    assert TransformersSampler(bloom, eos_token_ids=[1], max_model_len=9).limits.max_model_len == 9
