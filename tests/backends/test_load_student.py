"""Loading models: refusals, errors in one sentence, and hidden states that ignore padding."""

import json
import shutil

import pytest
import torch

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    cap_attention,
    check_head,
    hidden_states,
    import_transformers,
    lm_head_weight,
    load_model,
    load_student,
    load_tokenizer,
    pad,
    read_config,
    read_eos_token_ids,
)
from prime_composer.backends.protocols import SamplingParams
from prime_composer.lm_head import selected_logprobs
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.teachers.transformers import TransformersScorer
from tests.vllm_process import save_tokenizer

SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
SMALL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=23
)


MINICPM = {
    "hidden_size": 64,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "dim_model_base": 16,
}
"""Its hidden states are scaled before the head."""


def build(name, **settings):
    transformers = import_transformers()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**settings)
        return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


@pytest.fixture(scope="module")
def absolute():
    """Return a GPT-2: learned absolute positions, where a rotary model would forgive a shift."""
    config = import_transformers().GPT2Config(
        vocab_size=23,
        n_positions=40,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.5,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return import_transformers().GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_keeps_the_log_probs(side, absolute, plain_logprobs):
    tokens, mask = pad(SEQUENCES, torch.device("cpu"), side)
    hidden = hidden_states(absolute, tokens, mask)
    for row, ids in enumerate(SEQUENCES):
        first = tokens.shape[1] - len(ids) if side == "left" else 0
        states = hidden[row, first : first + len(ids) - 1]
        got = selected_logprobs(
            states, lm_head_weight(absolute), torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1)
        )[:, 0]
        rows = plain_logprobs(absolute, ids)
        expected = (
            torch.stack([rows[t, ids[t]] for t in range(1, len(ids))])
            if len(ids) > 1
            else torch.zeros(0)
        )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_sampler_counts_positions_without_padding(absolute, tmp_path, plain_logprobs):
    absolute.save_pretrained(tmp_path)
    sampler = TransformersSampler(tmp_path)
    for rollout in sampler.generate(SEQUENCES, SamplingParams(max_tokens=8), seed=0):
        rows = plain_logprobs(absolute, rollout.token_ids)
        for t in range(rollout.start, len(rollout.token_ids)):
            token = rollout.token_ids[t]
            assert float(rollout.inference_logprobs[t]) == pytest.approx(
                float(rows[t, token]), abs=1e-5
            )
    sampler.close()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
        ("Phi", {}),
        ("OPT", {}),
        ("Mpt", {"logit_scale": 0.5}),  # which it does not read
        ("MiniCPM3", MINICPM),
    ],
)
def test_head_with_bias_cap_and_scale_is_the_models(kind, changes):
    """By its logits."""
    settings = {**SMALL, "num_key_value_heads": 2, "initializer_range": 0.5, **changes}
    check_head(build(kind, **settings))


def test_attention_has_the_cap_of_its_scores(tmp_path):
    """transformers' default leaves it out."""
    settings = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5}
    model = build("Gemma2", **settings, attn_logit_softcapping=1.0)
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        other = load_model(tmp_path)(ids).logits
        model.set_attn_implementation("sdpa")
        without = model(ids).logits
    (warning,) = cap_attention(model)
    assert "at 1, which" in warning and "eager" in warning
    with torch.no_grad():
        exact = model(ids).logits
    assert cap_attention(build("OPT", **SMALL)) == []
    model.set_attn_implementation("sdpa")
    TransformersScorer(model)  # of whoever has loaded it
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, exact, atol=1e-5, rtol=0)
    assert (exact - without).abs().max() > 1e-2
    torch.testing.assert_close(other, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("read", [load_model, load_tokenizer, read_config, read_eos_token_ids])
def test_hub_id_in_offline_mode_is_one_sentence(read):
    """The tests run with HF_HUB_OFFLINE=1, so this is transformers' own error."""
    with pytest.raises(ModelUnavailable) as caught:
        read("nobody/no-such-model")
    message = str(caught.value)
    assert "nobody/no-such-model" in message and "\n" not in message
    assert "--set student.model=DIR" in message and "or unset HF_HUB_OFFLINE" in message


def test_tokenizer_larger_than_the_head_is_refused(models, tmp_path):
    models.tied_model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 132)
    with pytest.raises(ValueError, match="132 entries .* only 131; resize the model's embeddings"):
        load_student(tmp_path)


def test_student_in_fewer_bits_is_refused(models, tmp_path):
    """Before it is loaded: its rounded layers would not train."""
    config = json.loads((models.tied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnavailable, match=r"is quantized \(fp8\).*the unquantized model"):
        load_student(tmp_path)


def test_directory_without_weights_is_one_sentence(models, tmp_path):
    shutil.copy(models.tied / "config.json", tmp_path)
    remedy = "correct the model's table"
    with pytest.raises(ModelUnavailable, match=rf"safetensors.*{remedy}") as caught:
        load_student(tmp_path)
    assert "\n" not in str(caught.value)
