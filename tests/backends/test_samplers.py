"""Both samplers against the plain model: same checks, same numbers."""

import copy

import numpy as np
import pytest
import torch

from prime_composer.backends.hf_model import read_eos_token_ids
from prime_composer.backends.protocols import SamplingParams
from prime_composer.backends.transformers import TransformersSampler, processed_logprobs
from prime_composer.backends.vllm import VLLMSampler

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(params=["vllm", "transformers"])
def sampler(request, models, vllm_sampler):
    if request.param == "vllm":
        yield vllm_sampler
        vllm_sampler.update_weights(models.tied_model)
    else:
        yield TransformersSampler(models.tied, max_model_len=320, batch_size=4)


def loop_over_tokens(rollout):
    n = int((~rollout.loss_mask).sum())
    return range(n, len(rollout.token_ids))


def test_a_group_of_rollouts_per_prompt_in_prompt_order(sampler):
    rollouts = sampler.generate(PROMPTS, SamplingParams(n=3, max_tokens=5), seed=0)
    assert [r.prompt_index for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for rollout in rollouts:
        prompt = PROMPTS[rollout.prompt_index]
        assert rollout.token_ids[: len(prompt)].tolist() == prompt
        assert rollout.loss_mask.tolist() == [False] * len(prompt) + [True] * len(
            rollout.completion_ids
        )
        assert rollout.inference_logprobs.isnan().tolist() == (~rollout.loss_mask).tolist()
    assert len({tuple(r.completion_ids) for r in rollouts}) == 9


def test_mu_is_the_policy_at_temperature_one_and_top_p_one(sampler, models, plain_logprobs):
    for rollout in sampler.generate(PROMPTS, SamplingParams(n=2, max_tokens=20), seed=1):
        expected = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in loop_over_tokens(rollout):
            assert rollout.inference_logprobs[t] == pytest.approx(
                float(expected[t, rollout.token_ids[t]]), abs=1e-4
            )


def test_mu_is_the_truncated_renormalised_distribution_below_top_p_one(
    sampler, models, plain_logprobs
):
    cut = 0
    for rollout in sampler.generate(
        PROMPTS, SamplingParams(n=2, max_tokens=20, temperature=0.7, top_p=0.8), seed=2
    ):
        rows = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in loop_over_tokens(rollout):
            # written with probabilities: temper, keep the smallest set of mass 0.8, divide by its mass
            p = rows[t].double().exp() ** (1 / 0.7)
            p = (p / p.sum()).tolist()
            kept, mass = set(), 0.0
            for token in sorted(range(len(p)), key=lambda token: -p[token]):
                kept.add(token)
                mass += p[token]
                if mass >= 0.8:
                    break
            token = int(rollout.token_ids[t])
            assert token in kept
            assert float(rollout.inference_logprobs[t].exp()) == pytest.approx(
                p[token] / mass, rel=1e-4
            )
            cut += len(p) - len(kept)
    assert cut > 1000


def test_greedy_is_the_argmax_and_its_log_mu_is_zero(sampler, models, plain_logprobs):
    rollouts = sampler.generate(
        PROMPTS[:2], SamplingParams(n=2, max_tokens=8, temperature=0.0), seed=0
    )
    assert [r.prompt_index for r in rollouts] == [0, 0, 1, 1]
    for rollout in rollouts:
        rows = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in loop_over_tokens(rollout):
            assert int(rows[t].argmax()) == int(rollout.token_ids[t])
        assert rollout.inference_logprobs[rollout.loss_mask].tolist() == [0.0] * len(
            rollout.completion_ids
        )


def test_stops_at_eos_and_keeps_what_was_truncated(sampler):
    free = sampler.generate(PROMPTS, SamplingParams(n=4, max_tokens=12), seed=3)
    stop = free[0].completion_ids[4]
    rollouts = sampler.generate(
        PROMPTS, SamplingParams(n=16, max_tokens=12, stop_token_ids=(stop, 60, 61, 62)), seed=3
    )
    reasons = {r.finish_reason for r in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.completion_ids
        ends = [t for t, token in enumerate(ids) if token in (1, stop, 60, 61, 62)]
        if rollout.finish_reason == "stop":
            assert ends == [
                len(ids) - 1
            ]  # EOS itself is part of the rollout, and nothing follows it
        else:
            assert ends == [] and len(ids) == 12


def test_the_eos_of_the_model_is_read_from_its_directory(models):
    assert read_eos_token_ids(models.tied) == (1,)


def test_the_same_seed_gives_the_same_rollouts_and_the_global_generators_do_not_move(sampler):
    params = SamplingParams(n=2, max_tokens=10)
    before = torch.get_rng_state()
    first = sampler.generate(PROMPTS, params, seed=7)
    other = sampler.generate(PROMPTS, params, seed=8)
    torch.rand(3)
    again = sampler.generate(PROMPTS, params, seed=7)
    assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
    assert all(
        torch.equal(a.inference_logprobs[a.loss_mask], b.inference_logprobs[b.loss_mask])
        for a, b in zip(first, again, strict=True)
    )
    assert [r.token_ids.tolist() for r in first] != [r.token_ids.tolist() for r in other]
    torch.set_rng_state(before)
    sampler.generate(PROMPTS, params, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_new_weights_reach_the_rollouts_tied_head_and_cached_prefixes_included(
    sampler, tied_model, plain_logprobs
):
    # Longer than one block of the prefix cache (128 tokens on a CPU), so that old keys and values could be reused.
    prompt = [(7 * i) % 120 + 2 for i in range(300)]
    params = SamplingParams(max_tokens=8)
    sampler.generate([prompt], params, seed=0)
    with torch.no_grad():
        for parameter in tied_model.parameters():
            parameter.mul_(
                1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    sampler.update_weights(tied_model)
    (rollout,) = sampler.generate([prompt], params, seed=0)
    rows = plain_logprobs(tied_model, rollout.token_ids)
    for t in loop_over_tokens(rollout):
        assert rollout.inference_logprobs[t] == pytest.approx(
            float(rows[t, rollout.token_ids[t]]), abs=1e-4
        )


def test_the_sampler_keeps_its_weights_while_the_trainer_moves_on(sampler, tied_model):
    sampler.update_weights(tied_model)
    before = sampler.generate(PROMPTS, SamplingParams(max_tokens=6), seed=0)
    with torch.no_grad():
        tied_model.get_input_embeddings().weight.mul_(0.5)
    after = sampler.generate(PROMPTS, SamplingParams(max_tokens=6), seed=0)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.inference_logprobs[a.loss_mask], b.inference_logprobs[b.loss_mask])


@pytest.mark.parametrize(
    "prompts, max_tokens, message",
    [
        (
            [[5] * 300],
            30,
            "Sequence 0 has 300 tokens, and with 30 more it does not fit into max_model_len 320",
        ),
        ([[5], []], 3, "Sequence 1 is empty"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_says_why(sampler, prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        sampler.generate(prompts, SamplingParams(max_tokens=max_tokens), seed=0)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = processed_logprobs(logits, 1.0, 0.8).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    assert processed_logprobs(logits, 1.0, 0.01).exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(
        processed_logprobs(logits, 0.5, 1.0).exp(),
        torch.tensor([[0.25, 0.09, 0.0225, 0.0025]]) / 0.365,
    )


def test_an_engine_starts_without_moving_the_global_generators_and_says_when_it_is_closed(
    models, vllm_sampler
):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    sampler = VLLMSampler(models.untied, max_model_len=64, eos_token_ids=[3])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    sampler.close()
    sampler.close()
    # closing one engine leaves the others their process group
    assert len(vllm_sampler.generate(PROMPTS, SamplingParams(max_tokens=2), seed=0)) == 3
    with pytest.raises(ValueError, match="closed"):
        sampler.generate([[4]], SamplingParams(max_tokens=1), seed=0)


def test_two_engines_and_their_weights_do_not_disturb_each_other(
    vllm_sampler, vllm_scorer, models, tied_model
):
    (rollout,) = vllm_sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=6), seed=0)
    before = vllm_scorer.score([rollout], 3)[0]
    changed = copy.deepcopy(tied_model)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(0.5)
    vllm_sampler.update_weights(changed)
    after = vllm_scorer.score([rollout], 3)[0]
    vllm_sampler.update_weights(models.tied_model)
    assert torch.equal(before.teacher_logprobs[4:], after.teacher_logprobs[4:])
