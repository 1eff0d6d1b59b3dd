"""Loading a student: what is refused, and hidden states that do not care about padding."""

import json

import pytest
import torch

from prime_composer.backends.hf_model import (
    check_plain_head,
    hidden_states,
    import_transformers,
    lm_head_weight,
    load_student,
    pad,
    sequence_logprobs,
)
from prime_composer.backends.protocols import SamplingParams
from prime_composer.backends.transformers import TransformersSampler
from prime_composer.lm_head import selected_logprobs

SEQUENCES = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
SMALL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=23
)


def build(name, **settings):
    transformers = import_transformers()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**settings)
        return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


@pytest.fixture(scope="module")
def absolute():
    """GPT-2: learnt absolute positions, where a rotary model would forgive a shift."""
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
def test_hidden_states_and_the_head_give_the_models_own_log_probs_on_either_side_of_padding(
    side, absolute, plain_logprobs
):
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


def test_rollouts_from_prompts_of_different_lengths_count_positions_without_padding(
    absolute, tmp_path, plain_logprobs
):
    absolute.save_pretrained(tmp_path)
    sampler = TransformersSampler(tmp_path)
    for rollout in sampler.generate(SEQUENCES, SamplingParams(max_tokens=8), seed=0):
        rows = plain_logprobs(absolute, rollout.token_ids)
        for t in rollout.loss_mask.nonzero()[:, 0].tolist():
            token = rollout.token_ids[t]
            assert float(rollout.inference_logprobs[t]) == pytest.approx(
                float(rows[t, token]), abs=1e-5
            )
    sampler.close()


def test_sequence_log_probs_start_with_nan(tied_model, plain_logprobs):
    for ids, got in zip(SEQUENCES, sequence_logprobs(tied_model, SEQUENCES), strict=True):
        assert got.shape == (len(ids),) and got[0].isnan()
        rows = plain_logprobs(tied_model, ids)
        for t in range(1, len(ids)):
            assert float(got[t]) == pytest.approx(float(rows[t, ids[t]]), abs=1e-5)


def test_soft_capped_logits_are_refused():
    model = build(
        "Gemma2", **SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0
    )
    with pytest.raises(ValueError, match="soft-caps its logits at 30.0"):
        check_plain_head(model)


def test_scaled_logits_are_refused():
    model = build(
        "Granite", **SMALL, num_key_value_heads=2, logits_scaling=8.0, initializer_range=0.5
    )
    with pytest.raises(ValueError, match="does more to its logits than multiplying"):
        check_plain_head(model)
    check_plain_head(
        build("Granite", **SMALL, num_key_value_heads=2, logits_scaling=1.0, initializer_range=0.5)
    )


def test_a_biased_head_is_refused():
    with pytest.raises(ValueError, match="adds a bias to its logits"):
        check_plain_head(build("Phi", **SMALL))


def test_a_tokenizer_larger_than_the_head_is_refused(models, tmp_path):
    import tokenizers

    models.tied_model.save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(132)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="has 132 entries and the model's head only 131"):
        load_student(tmp_path)


def test_a_student_without_a_tokenizer_loads_in_eval_mode(models):
    model, tokenizer = load_student(models.tied)
    assert tokenizer is None and not model.training and lm_head_weight(model).shape == (131, 64)
    assert lm_head_weight(model) is model.get_input_embeddings().weight
