"""Special tokens and position weights against loops over sequences; text to ids."""

import dataclasses

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.modifiers import PositionWeights, SpecialTokenMask, with_token_ids


def packed(seed=0, seq=60) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    return LossInputs(
        trainer_logprobs=torch.randn(seq, generator=g).double().neg().abs().neg(),
        inference_logprobs=torch.randn(seq, generator=g).double().abs().neg(),
        ref_logprobs=torch.randn(seq, generator=g).double().abs().neg(),
        advantages=None,
        loss_mask=torch.rand(seq, generator=g) > 0.3,
        token_ids=torch.randint(0, 6, (seq,), generator=g),
        segment_ids=torch.randint(0, 9, (seq,), generator=g).sort().values,
    )


@pytest.mark.parametrize("one_sequence", [False, True])
def test_the_first_occurrence_is_removed_in_every_sequence(one_sequence):
    """Of each id, the first trained token of each sequence leaves the mask."""
    inputs = packed()
    if one_sequence:
        inputs = dataclasses.replace(inputs, segment_ids=None)
    seen, expected = set(), inputs.loss_mask.clone()
    segments = [0] * 60 if one_sequence else inputs.segment_ids.tolist()
    for t, (segment, token) in enumerate(zip(segments, inputs.token_ids.tolist(), strict=True)):
        if inputs.loss_mask[t] and token in (1, 4) and (segment, token) not in seen:
            seen.add((segment, token))
            expected[t] = False
    out, metrics = SpecialTokenMask(ids=(1, 4)).apply(inputs)
    assert torch.equal(out.loss_mask, expected)
    assert metrics["special_tokens/removed"].item() == pytest.approx(
        len(seen) / inputs.loss_mask.sum().item()
    )


def test_all_occurrences_are_removed_and_reported():
    """``occurrence = "all"`` removes every token, and metrics report the removed signal."""
    inputs = packed()
    out, metrics = SpecialTokenMask(ids=(1, 4), occurrence="all").apply(inputs)
    hit = inputs.loss_mask & ((inputs.token_ids == 1) | (inputs.token_ids == 4))
    assert torch.equal(out.loss_mask, inputs.loss_mask & ~hit) and hit.any()
    signal = (inputs.ref_logprobs - inputs.trainer_logprobs).abs()
    held = sum(signal[t].item() for t in range(60) if hit[t])
    everything = sum(signal[t].item() for t in range(60) if inputs.loss_mask[t])
    counted = inputs.loss_mask.sum().item()
    assert metrics["special_tokens/removed_signal"].item() == pytest.approx(held / counted)
    assert metrics["special_tokens/signal"].item() == pytest.approx(everything / counted)


def test_a_removed_token_may_be_impossible_for_the_teacher():
    inputs = packed()
    first = int(inputs.loss_mask.nonzero()[0])
    inputs.ref_logprobs[first] = -torch.inf
    inputs.trainer_logprobs.requires_grad_()
    knobs = {"special_tokens": {"ids": [int(inputs.token_ids[first])], "occurrence": "all"}}
    out = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](**knobs))(inputs)
    out.loss.backward()
    assert out.loss.isfinite() and inputs.trainer_logprobs.grad.isfinite().all()
    assert inputs.trainer_logprobs.grad[first] == 0


class Tokenizer:
    """As transformers' and as tokenizers' encode."""

    vocabulary = {"<think>": [7], "<|im_end|>": [3], "two words": [1, 2]}

    def __init__(self, wrap=False):
        self.wrap = wrap

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        ids = self.vocabulary[text]
        return type("Encoding", (), {"ids": ids})() if self.wrap else ids


@pytest.mark.parametrize("wrap", [False, True])
def test_strings_become_ids_in_nested_losses(wrap):
    masked = {
        "type": "topk_reverse_kl",
        "special_tokens": {"strings": ["<think>", "<|im_end|>"], "ids": [3]},
    }
    config = with_token_ids(LOSS_TYPES["topk_reverse_kl"](**masked), Tokenizer(wrap))
    assert config.special_tokens.ids == (3, 7) and config.special_tokens.strings == ()
    nested = LOSS_TYPES["compose"](
        rl={"loss": {"type": "ipo", "special_tokens": {"strings": ["<think>"]}}},
        distillation={"a": {"weight": 1, "loss": masked}},
    )
    nested = with_token_ids(nested, Tokenizer(wrap))
    assert nested.rl.loss.special_tokens.ids == (7,)
    assert nested.distillation["a"].loss.special_tokens.ids == (3, 7)
    mixed = LOSS_TYPES["sampled_reverse_kl"](
        rl_mix={"kd": 0.5, "loss": {"type": "default", "special_tokens": {"strings": ["<think>"]}}}
    )
    assert with_token_ids(mixed, Tokenizer(wrap)).rl_mix.loss.special_tokens.ids == (7,)
    assert "token_ids" in mixed.needs


def test_what_is_not_one_token_is_refused():
    with pytest.raises(ValueError, match=r"'two words' is 2 tokens \[1, 2\]"):
        with_token_ids(
            LOSS_TYPES["topk_reverse_kl"](special_tokens={"strings": ["two words"]}), Tokenizer()
        )
    with pytest.raises(ValueError, match="not resolved"):
        SpecialTokenMask(strings=("<think>",)).apply(packed())


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_position_weights_multiply_given_weights_by_sequence(shift):
    """By sequence, and with log mu as it would be at temperature 1, where log p is lower."""
    inputs = packed()
    inputs.untempered_logprobs = inputs.trainer_logprobs - shift
    given = torch.rand(60, dtype=torch.float64)
    out, _ = PositionWeights(gamma=0.8).apply(dataclasses.replace(inputs, loss_weights=given))
    for segment in inputs.segment_ids.unique():
        where = [t for t in range(60) if inputs.segment_ids[t] == segment]
        gap = [
            abs((inputs.ref_logprobs - inputs.inference_logprobs)[t].item() + shift)
            * inputs.loss_mask[t].item()
            for t in where
        ]
        for i, t in enumerate(where):
            if inputs.loss_mask[t]:
                expected = 1 + 0.8 * (1 - sum(gap[:i]) / sum(gap))
                assert out.loss_weights[t].item() == pytest.approx(
                    given[t].item() * expected, rel=1e-9
                )


def test_position_weights_without_discrepancy_are_even():
    inputs = packed()
    inputs = dataclasses.replace(inputs, ref_logprobs=inputs.inference_logprobs.clone())
    out, _ = PositionWeights(gamma=0.5).apply(inputs)
    assert (out.loss_weights == 1.5).all()
