"""A sampler and a scorer for machines without vLLM, from transformers models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    check_lengths,
    check_support_size,
    make_rollout,
    place,
    sequences_to_score,
    top_k,
)
from prime_composer.backends.hf_model import (
    check_plain_head,
    hidden_states,
    lm_head_weight,
    load_model,
    pad,
    read_eos_token_ids,
    token_batches,
)
from prime_composer.backends.protocols import Rollout, SamplingParams, TeacherScores
from prime_composer.lm_head import selected_logprobs

LOGITS_BUDGET = 2**25
"""Entries of the largest logits tensor that the scorer makes at once, 128 MiB in float32."""


def processed_logprobs(
    logits: Float[Tensor, "rows v"], temperature: float, top_p: float
) -> Float[Tensor, "rows v"]:
    """log mu over the vocabulary: logits / temperature, cut to the smallest set with mass top_p, renormalised.

    The tokens cut away are at -inf. The most probable token always stays. vLLM's own rule, with its own tie-breaking:
    sorted from the least probable, a token goes while the mass up to and including it is at most 1 - top_p.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1:
        return logprobs
    ordered, ids = logprobs.sort(dim=-1, descending=False)
    cut = ordered.exp().cumsum(dim=-1) <= 1 - top_p
    cut[:, -1] = False
    kept = logprobs.masked_fill(torch.zeros_like(cut).scatter(1, ids, cut), -torch.inf)
    return torch.log_softmax(kept, dim=-1)


class TransformersSampler:
    """Rollouts from a transformers model (``rollout.Sampler``), for machines without vLLM: slower, the same numbers.

    Args:
        model: a directory or a hub id. The sampler keeps a copy of the weights of its own.
        dtype: of weights and activations.
        device: None is the GPU where there is one.
        max_model_len: the longest prompt and completion together; None reads the model's limit.
        batch_size: rollouts that are sampled side by side.
        eos_token_ids: where a completion ends; None reads them from the model's configs and tokenizer.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        batch_size: int = 64,
        eos_token_ids: Sequence[int] | None = None,
    ):
        self.model = load_model(model, dtype, device)
        self.max_model_len = (
            max_model_len or self.model.config.get_text_config().max_position_embeddings
        )
        self.vocab_size = lm_head_weight(self.model).shape[0]
        self.batch_size = batch_size
        self.eos_token_ids = tuple(
            read_eos_token_ids(model) if eos_token_ids is None else eos_token_ids
        )

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """``params.n`` rollouts per prompt, in prompt order, drawn with a generator of their own.

        mu is the distribution that each token was drawn from (``processed_logprobs``); greedy tokens have log mu = 0.

        Raises:
            ValueError: a prompt and ``max_tokens`` together do not fit into ``max_model_len``, or a prompt is empty.
        """
        check_lengths(prompts, params.max_tokens, self.max_model_len)
        generator = torch.Generator(device=lm_head_weight(self.model).device).manual_seed(seed)
        jobs = [
            (index, list(prompt)) for index, prompt in enumerate(prompts) for _ in range(params.n)
        ]
        rollouts = []
        for first in range(0, len(jobs), self.batch_size):
            rollouts.extend(
                self._generate_batch(jobs[first : first + self.batch_size], params, generator)
            )
        return rollouts

    def update_weights(self, model: nn.Module) -> None:
        """Copy the model's weights. There is no cache that outlives a call."""
        self.model.load_state_dict(model.state_dict())

    def close(self) -> None:
        self.model = None

    def _generate_batch(
        self, jobs: list[tuple[int, list[int]]], params: SamplingParams, generator: torch.Generator
    ) -> list[Rollout]:
        device = lm_head_weight(self.model).device
        step_ids, mask = pad([prompt for _, prompt in jobs], device, side="left")
        stop = torch.tensor(
            sorted({*self.eos_token_ids, *params.stop_token_ids}), device=device, dtype=torch.int64
        )
        position_ids = (mask.cumsum(dim=1) - 1).clamp_min(0)
        finished = torch.zeros(len(jobs), dtype=torch.bool, device=device)
        lengths = torch.zeros(len(jobs), dtype=torch.int64, device=device)
        cache, sampled, logprobs = None, [], []
        for _ in range(params.max_tokens):
            out = self.model(
                input_ids=step_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1]
            if params.temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
                chosen_logprobs = torch.zeros_like(chosen, dtype=torch.float32)
            else:
                log_mu = processed_logprobs(logits, params.temperature, params.top_p)
                chosen = torch.multinomial(log_mu.exp(), 1, generator=generator)
                chosen_logprobs = log_mu.gather(1, chosen)
            sampled.append(chosen)
            logprobs.append(chosen_logprobs)
            lengths += ~finished
            finished |= torch.isin(chosen[:, 0], stop)
            if finished.all():
                break
            step_ids, position_ids = chosen, position_ids[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(jobs), 1)], dim=1)
        all_ids, all_logprobs = torch.cat(sampled, dim=1).cpu(), torch.cat(logprobs, dim=1).cpu()
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
                )
            )
        return rollouts


class TransformersScorer:
    """Teacher scores from a transformers model (``scorer.Scorer``), for machines without vLLM.

    Args:
        model: a directory, a hub id, or a model. A model is read live: with the student itself in its place the scores
            are those of the current policy (self-distillation).
        dtype: of weights and activations, where the model is loaded here.
        device: None is the GPU where there is one.
        max_model_len: the longest sequence; None reads the model's limit.
        batch_tokens: tokens, padding included, that go through the model at once.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        batch_tokens: int = 8192,
    ):
        self.model = model if isinstance(model, nn.Module) else load_model(model, dtype, device)
        check_plain_head(self.model)
        self.max_model_len = (
            max_model_len or self.model.config.get_text_config().max_position_embeddings
        )
        self.vocab_size = lm_head_weight(self.model).shape[0]
        self.max_logprobs = self.vocab_size
        self.batch_tokens = batch_tokens

    @torch.no_grad()
    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
    ) -> list[TeacherScores]:
        """One ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score, each on its own tokens.
            support_size: K; 0 for the sampled token alone, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads in the place of each rollout's own prompt.
            candidate_ids: ids [seq, K] to score in the place of the teacher's own top K, aligned with each rollout's
                ``token_ids``; rows before its first trained token are not read. They come back in the order given.

        Raises:
            ValueError: K above the vocabulary, candidates of another width, a sequence too long for the model.
        """
        k = check_support_size(support_size, self.vocab_size, self.vocab_size, "support_size")
        if candidate_ids is not None:
            widths = {ids.shape[1] for ids in candidate_ids} - {k}
            if widths or len(candidate_ids) != len(rollouts):
                raise ValueError(
                    f"candidate_ids has {len(candidate_ids)} entries, of widths other than {k}: {sorted(widths)}; pass "
                    f"one [seq, {k}] tensor for each of the {len(rollouts)} rollouts."
                )
        scored = sequences_to_score(rollouts, prompts)
        check_lengths([s.token_ids for s in scored], 0, self.max_model_len)
        weight = lm_head_weight(self.model)
        results: list[TeacherScores | None] = [None] * len(rollouts)
        for batch in token_batches([len(s.token_ids) for s in scored], self.batch_tokens):
            tokens, mask = pad([scored[index].token_ids for index in batch], weight.device)
            hidden = hidden_states(self.model, tokens, mask)
            # hidden[t] predicts token t + 1: the scores of [start, end) come from the states at [start - 1, end - 1).
            spans = [(scored[index].start, len(scored[index].token_ids)) for index in batch]
            states = torch.cat([hidden[row, a - 1 : b - 1] for row, (a, b) in enumerate(spans)])
            labels = torch.cat([tokens[row, a:b] for row, (a, b) in enumerate(spans)])
            if candidate_ids is None:
                ids, logprobs = top_logprobs(states, weight, labels, k)
            else:
                wanted = [candidate_ids[index][scored[index].rollout_start :] for index in batch]
                ids = torch.cat([labels[:, None], torch.cat(wanted).to(labels)], dim=1)
                logprobs = selected_logprobs(states, weight, ids)
            sizes = [b - a for a, b in spans]
            for index, own_ids, own in zip(
                batch, ids.cpu().split(sizes), logprobs.cpu().split(sizes), strict=True
            ):
                rollout = rollouts[index]
                results[index] = place(
                    len(rollout.token_ids), scored[index], own[:, 0], own_ids[:, 1:], own[:, 1:]
                )
        return results

    def update_weights(self, model: nn.Module) -> None:
        """Copy the model's weights into the teacher; without effect on a teacher that is that very model."""
        if model is not self.model:
            self.model.load_state_dict(model.state_dict())

    def close(self) -> None:
        self.model = None


def top_logprobs(
    states: Float[Tensor, "n d"], weight: Float[Tensor, "v d"], labels: Int[Tensor, " n"], k: int
) -> tuple[Int[Tensor, "n k_1"], Float[Tensor, "n k_1"]]:
    """Ids and log-probs of the label and then of the top k, [n, 1 + k], a block of rows at a time."""
    ids, logprobs = [], []
    rows = max(1, LOGITS_BUDGET // weight.shape[0])
    for first in range(0, max(len(states), 1), rows):
        block = torch.log_softmax((states[first : first + rows] @ weight.T).float(), dim=-1)
        own_ids = labels[first : first + rows, None]
        top_values, top_ids = top_k(block, k)
        ids.append(torch.cat([own_ids, top_ids], dim=1))
        logprobs.append(torch.cat([block.gather(1, own_ids), top_values], dim=1))
    return torch.cat(ids), torch.cat(logprobs)
