import copy
import json

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import SamplingParams, TeacherScores
from prime_composer.backends.transformers import TransformersSampler
from prime_composer.local.preflight import (
    PreflightError,
    check_context,
    check_scores,
    check_tokenizers,
    check_vocabularies,
    check_weight_sync,
    perturbed,
    preflight,
    sampling_warnings,
    tokenizer_hash,
)

VOCAB = 131
PROMPTS = [[(5 * i + 3 * j) % 120 + 4 for j in range(20)] for i in range(12)]


class Limits:
    """A sampler and scorer that only has its limits, and answers what it is given."""

    def __init__(self, scores=None, **limits):
        self.scores = scores
        self.__dict__.update(limits)

    def generate(self, prompts, params, seed): ...

    def update_weights(self, model): ...

    def score(self, rollouts, support_size):
        return [self.scores]

    def close(self): ...


def make_tokenizer(words, merges=(), eos="<eos>", unknown="<unk>"):
    """A word-level or (with merges) BPE tokenizer whose ids are the order of ``words``."""
    import tokenizers

    transformers = import_transformers()
    vocab = {word: i for i, word in enumerate(words)}
    model = (
        tokenizers.models.BPE(vocab=vocab, merges=list(merges), unk_token=unknown)
        if merges
        else tokenizers.models.WordLevel(vocab, unk_token=unknown)
    )
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=eos, unk_token=unknown
    )


WORDS = ["<unk>", "<eos>", "<pad>", "sold", "clips", "May", "72"]


def test_the_same_tokenizer_passes_without_a_word():
    assert check_tokenizers(make_tokenizer(WORDS), make_tokenizer(WORDS)) == []
    assert tokenizer_hash(make_tokenizer(WORDS)) == tokenizer_hash(make_tokenizer(WORDS))


def test_two_vocabularies_of_one_size_with_swapped_ids_are_told_apart():
    swapped = [*WORDS[:3], "clips", "sold", *WORDS[5:]]
    with pytest.raises(
        PreflightError,
        match="'clips' is 4 and 3\\); choose a teacher and a student with one tokenizer",
    ):
        check_tokenizers(make_tokenizer(WORDS), make_tokenizer(swapped))


def test_a_special_token_under_another_id_is_named():
    moved = ["<unk>", "sold", "<pad>", "<eos>", *WORDS[4:]]
    with pytest.raises(
        PreflightError, match="special token '<eos>' has id 1 for the student and 3 for the teacher"
    ):
        check_tokenizers(make_tokenizer(WORDS), make_tokenizer(moved))


def test_equal_vocabularies_that_cut_a_text_differently_are_told_apart():
    letters = ["<unk>", "<eos>", "s", "o", "l", "d", "so", "ld", "ol", "sol", "sold"]
    one = make_tokenizer(letters, merges=[("s", "o"), ("l", "d")])
    two = make_tokenizer(letters, merges=[("o", "l")])
    assert tokenizer_hash(one) == tokenizer_hash(two)
    with pytest.raises(PreflightError, match="although their vocabularies are equal"):
        check_tokenizers(one, two)


def test_another_end_of_text_is_a_warning():
    warnings = check_tokenizers(make_tokenizer(WORDS), make_tokenizer(WORDS, eos="<pad>"))
    assert (
        len(warnings) == 1
        and "ends a text with '<eos>' and the teacher with '<pad>'" in warnings[0]
    )


@pytest.mark.parametrize(
    "student, teacher, limit, k, message",
    [
        (6, 7, 20, 4, "7 tokens and the student's head 6 entries; resize"),
        (7, 6, 20, 4, "7 tokens and the teacher's head 6 entries; choose"),
        (8, 8, 20, 9, "K = 9 and the vocabulary has 8 entries; set k to at most that"),
        (
            64,
            64,
            20,
            32,
            "K = 32 teacher log-probs per token and the teacher answers at most 20; .*--max-logprobs 32",
        ),
        (64, 64, 20, "full", "K = 64 teacher log-probs per token"),
        (
            64,
            72,
            72,
            "full",
            "heads of one size, and the student's has 64 entries and the teacher's 72",
        ),
    ],
)
def test_a_k_or_a_head_out_of_reach_names_the_sizes_and_the_remedy(
    student, teacher, limit, k, message
):
    scorer = Limits(vocab_size=teacher, max_logprobs=limit)
    with pytest.raises(PreflightError, match=message):
        check_vocabularies(student, scorer, make_tokenizer(WORDS), k)


def test_differently_padded_heads_warn_where_the_support_is_a_top_k():
    scorer = Limits(vocab_size=72, max_logprobs=20)
    (warning,) = check_vocabularies(64, scorer, make_tokenizer(WORDS), 4)
    assert "64 entries and the teacher's 72 for 7 tokens" in warning
    assert check_vocabularies(72, scorer, make_tokenizer(WORDS), 4) == []


def test_a_context_too_short_names_the_length_to_set():
    sampler, scorer = Limits(max_model_len=30), Limits(max_model_len=30)
    check_context([[1] * 20], 9, sampler, scorer)
    with pytest.raises(
        PreflightError, match="that is 30, and the teacher's scorer takes 29; raise .* to 31"
    ):
        check_context([[1] * 3, [1] * 20], 10, sampler, scorer)
    with pytest.raises(
        PreflightError,
        match="20 tokens, with 11 new ones that is 31, and the student's sampler takes 30",
    ):
        check_context([[1] * 3, [1] * 20], 11, sampler, scorer)
    with pytest.raises(PreflightError, match="no prompt"):
        check_context([], 11, sampler, scorer)
    with pytest.raises(PreflightError, match="has no tokens"):
        check_context([[1], []], 11, sampler, scorer)


def test_a_temperature_or_a_nucleus_is_worth_a_warning_each():
    assert sampling_warnings(SamplingParams()) == []
    warnings = sampling_warnings(SamplingParams(temperature=0.6, top_p=0.9))
    assert ["temperature is 0.6" in warnings[0], "top_p is 0.9" in warnings[1]] == [True, True]


def test_perturbed_weights_come_back_bit_for_bit(tied_model):
    before = copy.deepcopy(tied_model.state_dict())
    with perturbed(tied_model):
        assert not any(torch.equal(v, before[k]) for k, v in tied_model.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in tied_model.state_dict().items())


@pytest.fixture
def sampler(vllm_sampler, models):
    yield vllm_sampler
    vllm_sampler.update_weights(models.tied_model)


def test_a_sound_sync_agrees_to_a_ten_thousandth_of_a_nat(sampler, tied_model):
    assert check_weight_sync(sampler, tied_model, PROMPTS) < 1e-4


def test_a_stale_tied_head_is_caught_and_named(sampler, tied_model, monkeypatch):
    def update_by_parameters(model):
        weights = iter([*model.named_parameters()])
        sampler.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        sampler.forget_prefixes()

    monkeypatch.setattr(sampler, "update_weights", update_by_parameters)
    with pytest.raises(PreflightError, match="kept the old lm_head, .* send state_dict"):
        check_weight_sync(sampler, tied_model, PROMPTS)


def test_a_stale_prefix_cache_is_caught_and_named(sampler, tied_model, monkeypatch):
    monkeypatch.setattr(sampler, "forget_prefixes", lambda: None)
    with pytest.raises(PreflightError, match="reuses cached prefixes .* reset its prefix cache"):
        check_weight_sync(sampler, tied_model, PROMPTS)


def test_a_sync_that_does_nothing_is_caught(sampler, tied_model, monkeypatch):
    monkeypatch.setattr(sampler, "update_weights", lambda model: None)
    with pytest.raises(PreflightError, match="kept old weights"):
        check_weight_sync(sampler, tied_model, PROMPTS)


def test_a_sync_that_works_only_once_is_caught(models, tied_model, monkeypatch):
    sampler = TransformersSampler(models.tied)
    update, calls = sampler.update_weights, []
    monkeypatch.setattr(
        sampler,
        "update_weights",
        lambda model: (calls.append(1), len(calls) == 1 and update(model)),
    )
    with pytest.raises(PreflightError, match="works only once"):
        check_weight_sync(sampler, tied_model, PROMPTS)


def test_a_sampler_of_other_weights_is_caught_before_any_sync(models, tied_model):
    with pytest.raises(
        PreflightError, match="before any training .* make both load the same weights"
    ):
        check_weight_sync(TransformersSampler(models.untied), tied_model, PROMPTS)


@pytest.mark.parametrize("fault", ["nan", "mass", "id", "twice", "alignment"])
def test_scores_that_cannot_be_log_probs_are_refused(sampler, fault):
    rollouts = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=4), seed=0)
    n = len(rollouts[0].token_ids)
    own, support = torch.full((n,), -3.0), torch.full((n, 2), -1.0)
    ids = torch.stack([rollouts[0].token_ids, (rollouts[0].token_ids + 1) % VOCAB], dim=1)
    support[:, 0] = -3.0
    if fault == "nan":
        own[-1] = torch.nan
    elif fault == "mass":
        support[:, 1] = -0.001
    elif fault == "id":
        ids[-1, 1] = 200
    elif fault == "twice":
        ids[-1, 1], support[-1, 1] = ids[-1, 0], support[-1, 0]
    else:
        support[-1, 0] = -2.0
    scorer = Limits(TeacherScores(own, ids, support))
    message = {
        "id": "puts id 200",
        "twice": "has an id twice",
        "alignment": "out of alignment",
    }.get(fault, "not log-probabilities")
    with pytest.raises(PreflightError, match=message):
        check_scores(scorer, rollouts, 2, VOCAB)


def test_all_of_it_on_real_engines(sampler, vllm_scorer, tied_model):
    tokenizer = make_tokenizer(["<unk>", "<eos>", "<pad>", *(f"w{i}" for i in range(VOCAB - 3))])
    found = preflight(
        model=tied_model,
        tokenizer=tokenizer,
        sampler=sampler,
        teachers={"teacher": (vllm_scorer, None)},
        prompts=PROMPTS,
        params=SamplingParams(max_tokens=24, top_p=0.9),
        support_size=8,
    )
    assert [w.split(" is ")[0] for w in found.warnings] == [
        "The teacher's tokenizer",
        "rollout.top_p",
    ]
    assert json.dumps(found.facts) and found.facts["sampler_trainer_difference"] < 1e-4
