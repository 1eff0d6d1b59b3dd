"""Rollouts of a transformers model, for machines without vLLM."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    check_sequence_lengths,
    make_rollout,
)
from prime_composer.backends.hf_model import (
    cache_argument,
    float32_head,
    lm_head_weight,
    pad,
    read_eos_token_ids,
)
from prime_composer.backends.lora.views import weights_of
from prime_composer.backends.protocols import (
    Rollout,
    SamplingParams,
)
from prime_composer.backends.transformers import LoadedModel


def processed_logprobs(
    logits: Float[Tensor, "rows v"], temperature: float, top_p: float
) -> Float[Tensor, "rows v"]:
    """Return log mu over the vocabulary: tempered, cut to the nucleus of top_p, renormalized.

    Tokens outside the nucleus are at -inf. This is vLLM's rule and tie-breaking: in ascending order
    of probability, a token is removed while the mass up to and including it is at most 1 - top_p.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1:
        return logprobs
    ordered, ids = logprobs.sort(dim=-1, descending=False)
    removed = ordered.exp().cumsum(dim=-1) <= 1 - top_p
    removed[:, -1] = False
    nucleus = logprobs.masked_fill(
        torch.zeros_like(removed).scatter(1, ids, removed), float("-inf")
    )
    return torch.log_softmax(nucleus, dim=-1)


class TransformersSampler(LoadedModel):
    """Rollouts of a transformers model (``protocols.Sampler``): slower than vLLM, the same numbers.

    A model in memory is used as it is, not copied, and needs ``eos_token_ids``.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        batch_size: int = 64,
        eos_token_ids: Sequence[int] | None = None,
    ):
        super().__init__(model, dtype, device, max_model_len)
        self.batch_size = batch_size
        if eos_token_ids is None:
            if isinstance(model, nn.Module):
                raise ValueError("A sampler of a model in memory needs eos_token_ids.")
            eos_token_ids = read_eos_token_ids(model)
        self.eos_token_ids = tuple(eos_token_ids)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt, in order, from a generator of their own."""
        check_sequence_lengths(prompts, params.max_tokens, self.limits.max_model_len)
        generator = torch.Generator(device=lm_head_weight(self.model).device).manual_seed(seed)
        jobs = [
            (index, list(prompt)) for index, prompt in enumerate(prompts) for _ in range(params.n)
        ]
        rollouts = []
        with float32_head(self.model):
            for first in range(0, len(jobs), self.batch_size):
                rollouts.extend(
                    self._generate_batch(jobs[first : first + self.batch_size], params, generator)
                )
        return rollouts

    def update_weights(self, model: nn.Module) -> None:
        """Copy the model's weights. No cache outlives a call."""
        self.model.load_state_dict(dict(weights_of(model)))

    def _generate_batch(
        self, jobs: list[tuple[int, list[int]]], params: SamplingParams, generator: torch.Generator
    ) -> list[Rollout]:
        device = lm_head_weight(self.model).device
        step_ids, mask = pad([prompt for _, prompt in jobs], device, side="left")
        stop_ids = torch.tensor(
            sorted({*self.eos_token_ids, *params.stop_token_ids}), device=device, dtype=torch.int64
        )
        position_ids = (mask.cumsum(dim=1) - 1).clamp_min(0)
        finished = torch.zeros(len(jobs), dtype=torch.bool, device=device)
        lengths = torch.zeros(len(jobs), dtype=torch.int64, device=device)
        cache, key = None, cache_argument(self.model) or ""
        sampled_ids, sampled_logprobs = [], []
        for _ in range(params.max_tokens):
            output = self.model(
                input_ids=step_ids,
                # Mamba's is of the tokens of a call, of which all after the first call's are real.
                attention_mask=None if cache is not None and key == "cache_params" else mask,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **{key: cache},
            )
            cache = output[key]
            logits = output.logits[:, -1]
            if params.temperature == 0:
                step_ids = logits.argmax(dim=-1, keepdim=True)
                step_logprobs = torch.zeros_like(step_ids, dtype=torch.float32)
            else:
                log_mu = processed_logprobs(logits, params.temperature, params.top_p)
                step_ids = torch.multinomial(log_mu.exp(), 1, generator=generator)
                step_logprobs = log_mu.gather(1, step_ids)
            sampled_ids.append(step_ids)
            sampled_logprobs.append(step_logprobs)
            lengths += ~finished
            finished |= torch.isin(step_ids[:, 0], stop_ids)
            if finished.all():
                break
            position_ids = position_ids[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(jobs), 1)], dim=1)
        all_ids = torch.cat(sampled_ids, dim=1).cpu()
        all_logprobs = torch.cat(sampled_logprobs, dim=1).cpu()
        rollouts = []
        for row, (index, prompt) in enumerate(jobs):
            n = int(lengths[row])
            rollouts.append(
                make_rollout(
                    prompt,
                    all_ids[row, :n].tolist(),
                    all_logprobs[row, :n].tolist(),
                    "stop" if finished[row] else "length",
                    index,
                    max_tokens=params.max_tokens,
                    vocab_size=self.limits.vocab_size,
                    origin=self.origin,
                )
            )
        return rollouts
