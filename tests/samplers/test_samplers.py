"""Both samplers against the plain model: same checks, same numbers."""

import contextlib
import copy

import numpy as np
import pytest
import torch

from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.lora.views import is_adapted
from prime_composer.backends.protocols import SamplingParams
from prime_composer.backends.vllm import VLLMSampler, can_load_again
from prime_composer.recipe.model import LoraConfig
from prime_composer.samplers.transformers import TransformersSampler

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def sampler(request, models):
    if request.param == "vllm":
        vllm_sampler = request.getfixturevalue("vllm_sampler")
        yield vllm_sampler
        vllm_sampler.update_weights(models.tied_model)
    else:
        yield TransformersSampler(models.tied, max_model_len=320, batch_size=4)


def completion_positions(rollout):
    return range(rollout.start, len(rollout.token_ids))


def test_generate_returns_groups_in_prompt_order(sampler):
    rollouts = sampler.generate(PROMPTS, SamplingParams(n=3, max_tokens=5), seed=0)
    assert [r.prompt_index for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for rollout in rollouts:
        prompt = PROMPTS[rollout.prompt_index]
        assert rollout.token_ids[: len(prompt)].tolist() == prompt
        assert rollout.start == len(prompt)
        assert rollout.loss_mask.tolist() == [False] * len(prompt) + [True] * len(
            rollout.completion_ids
        )
        assert rollout.inference_logprobs.isnan().tolist() == (~rollout.loss_mask).tolist()
    assert len({tuple(r.completion_ids) for r in rollouts}) == 9


def test_mu_at_temperature_one_and_top_p_one_is_the_policy(sampler, models, plain_logprobs):
    for rollout in sampler.generate(PROMPTS, SamplingParams(n=2, max_tokens=20), seed=1):
        expected = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in completion_positions(rollout):
            assert rollout.inference_logprobs[t] == pytest.approx(
                float(expected[t, rollout.token_ids[t]]), abs=1e-4
            )


def test_mu_below_top_p_one_is_cut_and_renormalized(sampler, models, plain_logprobs):
    removed = 0
    params = SamplingParams(n=2, max_tokens=20, temperature=0.7, top_p=0.8)
    for rollout in sampler.generate(PROMPTS, params, seed=2):
        rows = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in completion_positions(rollout):
            # With probabilities: temper, keep the smallest set of mass 0.8, divide by its mass.
            p = rows[t].double().exp() ** (1 / 0.7)
            p = (p / p.sum()).tolist()
            nucleus, mass = set(), 0.0
            for token in sorted(range(len(p)), key=lambda token: -p[token]):
                nucleus.add(token)
                mass += p[token]
                if mass >= 0.8:
                    break
            token = int(rollout.token_ids[t])
            assert token in nucleus
            assert float(rollout.inference_logprobs[t].exp()) == pytest.approx(
                p[token] / mass, rel=1e-4
            )
            removed += len(p) - len(nucleus)
    assert removed > 1000


def test_greedy_is_the_argmax_with_log_mu_zero(sampler, models, plain_logprobs):
    rollouts = sampler.generate(
        PROMPTS[:2], SamplingParams(n=2, max_tokens=8, temperature=0.0), seed=0
    )
    assert [r.prompt_index for r in rollouts] == [0, 0, 1, 1]
    for rollout in rollouts:
        rows = plain_logprobs(models.tied_model, rollout.token_ids)
        for t in completion_positions(rollout):
            assert int(rows[t].argmax()) == int(rollout.token_ids[t])
        assert rollout.inference_logprobs[rollout.loss_mask].tolist() == [0.0] * len(
            rollout.completion_ids
        )


def test_generate_stops_at_eos_or_truncates(sampler):
    """EOS and stop tokens are part of the rollout and end it; the others run out of tokens."""
    free = sampler.generate(PROMPTS, SamplingParams(n=4, max_tokens=12), seed=3)
    stop = next(one.completion_ids[4] for one in free if len(one.completion_ids) > 4)
    rollouts = sampler.generate(
        PROMPTS, SamplingParams(n=16, max_tokens=12, stop_token_ids=(stop, 60, 61, 62)), seed=3
    )
    reasons = {r.finish_reason for r in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.completion_ids
        ends = [t for t, token in enumerate(ids) if token in (1, stop, 60, 61, 62)]
        if rollout.finish_reason == "stop":
            assert ends == [len(ids) - 1]
        else:
            assert ends == [] and len(ids) == 12


def test_same_seed_same_rollouts_global_rng_untouched(sampler):
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


def test_update_weights_reaches_tied_head_and_prefix_cache(sampler, tied_model, plain_logprobs):
    # Longer than one block of the prefix cache (128 tokens on a CPU), so that it could be reused.
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
    for t in completion_positions(rollout):
        assert rollout.inference_logprobs[t] == pytest.approx(
            float(rows[t, rollout.token_ids[t]]), abs=1e-4
        )


def test_update_weights_merges_an_adapter(sampler, tied_model, plain_logprobs):
    """The sampler's log-probs are those of W + (alpha / rank) B A, and of the adapted model."""
    plain = copy.deepcopy(tied_model)
    config = LoraConfig(rank=4, alpha=6, targets=("q_proj", "o_proj", "up_proj"))
    LoraAdapter.of_model(tied_model, config, "base", seed=0)
    with torch.no_grad():
        for name, layer in tied_model.named_modules():
            if is_adapted(layer):
                a, b = (getattr(layer, f"lora_{side}").default.weight for side in "AB")
                b.normal_(generator=torch.Generator().manual_seed(len(name)))
                plain.get_submodule(name).weight += 1.5 * (b.double() @ a.double()).float()
    sampler.update_weights(tied_model)
    (rollout,) = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=9), seed=0)
    for model in (plain, tied_model):
        rows = plain_logprobs(model, rollout.token_ids)
        for t in completion_positions(rollout):
            expected = float(rows[t, rollout.token_ids[t]])
            assert rollout.inference_logprobs[t] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_loads_an_adapters_directory(models, tied_model, plain_logprobs, tmp_path):
    """Its own LoRA layers give the log-probs of the adapted student."""
    config = LoraConfig(rank=8, alpha=16)
    adapter = LoraAdapter.of_model(tied_model, config, models.tied, seed=0)
    with torch.no_grad():
        for name, value in adapter.weights.items():
            if "lora_B" in name:
                value.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    adapter.save_pretrained(tmp_path)
    with contextlib.closing(
        VLLMSampler(
            models.tied, max_model_len=320, engine_args={"enable_lora": True, "max_lora_rank": 8}
        )
    ) as sampler:
        from vllm.lora.request import LoRARequest

        request = sampler._vllm.SamplingParams(max_tokens=9, temperature=0, logprobs=0)
        (output,) = sampler.llm.generate(
            [{"prompt_token_ids": PROMPTS[0]}],
            request,
            lora_request=LoRARequest("student", 1, str(tmp_path)),
            use_tqdm=False,
        )
    completion = output.outputs[0]
    rows = plain_logprobs(tied_model, [*PROMPTS[0], *completion.token_ids])
    for t, (token, logprobs) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True), len(PROMPTS[0])
    ):
        assert logprobs[token].logprob == pytest.approx(float(rows[t, token]), abs=1e-3)


def test_sampler_keeps_its_weights_while_training_moves_on(sampler, tied_model):
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
def test_generate_refuses_an_unusable_prompt(sampler, prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        sampler.generate(prompts, SamplingParams(max_tokens=max_tokens), seed=0)


@pytest.mark.vllm
def test_engine_start_and_close_leave_the_process_alone(models, vllm_sampler):
    """Global generators do not move, and other engines keep their process group."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    sampler = VLLMSampler(models.untied, max_model_len=64, eos_token_ids=[3])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    sampler.close()
    sampler.close()
    assert len(vllm_sampler.generate(PROMPTS, SamplingParams(max_tokens=2), seed=0)) == 3
    with pytest.raises(ValueError, match="closed"):
        sampler.generate([[4]], SamplingParams(max_tokens=1), seed=0)


@pytest.mark.vllm
def test_two_engines_do_not_share_weights(vllm_sampler, vllm_scorer, models, tied_model):
    (rollout,) = vllm_sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=6), seed=0)
    before = vllm_scorer.score([rollout], 3)[0]
    changed = copy.deepcopy(tied_model)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(0.5)
    vllm_sampler.update_weights(changed)
    after = vllm_scorer.score([rollout], 3)[0]
    vllm_sampler.update_weights(models.tied_model)
    assert torch.equal(before.teacher_logprobs, after.teacher_logprobs)
    assert not after.teacher_logprobs.isnan().any()


@pytest.mark.vllm
def test_packed_weights_are_those_of_reload_weights(
    vllm_sampler, models, tied_model, plain_logprobs, monkeypatch
):
    """A CPU engine takes new weights without vLLM's reload, and the numbers are the same bits."""
    with torch.no_grad():
        for index, parameter in enumerate(tied_model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            parameter.mul_(1 + 0.3 * noise)
    packed, found = vllm_sampler._packed, {}
    assert len(packed.removed) == 8  # four matrices in each of two layers
    for name, own in {"packed": packed, "reloaded": None}.items():
        vllm_sampler.update_weights(models.tied_model)
        monkeypatch.setattr(vllm_sampler, "_packed", own)
        vllm_sampler.update_weights(tied_model)
        (found[name],) = vllm_sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=9), seed=0)
        assert all(weight.numel() == 0 for _, weight, _ in packed.removed)
        monkeypatch.setattr(vllm_sampler, "_packed", packed)
    vllm_sampler.update_weights(models.tied_model)
    first, second = found.values()
    assert first.token_ids.equal(second.token_ids)
    mu = first.inference_logprobs[first.loss_mask]
    assert mu.equal(second.inference_logprobs[second.loss_mask])
    rows = plain_logprobs(tied_model, first.token_ids)
    expected = [float(rows[t, first.token_ids[t]]) for t in completion_positions(first)]
    assert mu.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.vllm
def test_dropped_weights_are_as_good_as_new_after_an_update(vllm_sampler, models):
    """Without them the engine says so; with them again it samples the same bits."""
    params = SamplingParams(max_tokens=9)
    (before,) = vllm_sampler.generate(PROMPTS[:1], params, seed=0)
    vllm_sampler.drop_weights()
    layers = [layer for layer, _, _ in vllm_sampler._packed.removed]
    assert layers and all(layer.weight.numel() == 0 for layer in layers)
    with pytest.raises(RuntimeError, match="call update_weights before it computes"):
        layers[0].cpu_linear(torch.zeros(1, 4), None, None)
    vllm_sampler.update_weights(models.tied_model)
    (after,) = vllm_sampler.generate(PROMPTS[:1], params, seed=0)
    assert before.token_ids.equal(after.token_ids)
    mask = before.loss_mask
    assert before.inference_logprobs[mask].equal(after.inference_logprobs[mask])


@pytest.mark.vllm
def test_packed_weights_refuse_a_model_with_a_weight_left_out(vllm_sampler, models):
    weights = dict(models.tied_model.state_dict())
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match="no weights for model.layers.1.mlp.down_proj.weight"):
        vllm_sampler.llm.collective_rpc(vllm_sampler._packed.load, args=(iter(weights.items()),))
    vllm_sampler.update_weights(models.tied_model)


@pytest.mark.vllm
def test_packed_weights_are_of_plain_matrices_alone(vllm_sampler):
    """Weights of any other method or shape are loaded by vLLM's reload_weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Quantized(UnquantizedLinearMethod):
        pass

    def model(method, *shape):
        layer = torch.nn.Module()
        layer.quant_method, layer.weight = method, torch.nn.Parameter(torch.zeros(shape))
        return torch.nn.Sequential(layer, torch.nn.LayerNorm(4))

    assert can_load_again(vllm_sampler._own_model())
    assert can_load_again(model(UnquantizedLinearMethod(), 4, 4))
    assert not can_load_again(model(UnquantizedLinearMethod(), 4, 4, 4))
    assert not can_load_again(model(Quantized(), 4, 4))
