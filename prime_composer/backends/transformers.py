"""A sampler and a scorer on transformers models, for machines without vLLM."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    check_lengths,
    check_support_size,
    make_rollout,
    make_scores,
    sequences_to_score,
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
from prime_composer.backends.protocols import (
    HiddenStates,
    Limits,
    Rollout,
    SamplingParams,
    TeacherHead,
    TeacherScores,
)
from prime_composer.lm_head import selected_logprobs
from prime_composer.scoring.kinds import largest

LOGITS_BUDGET = 2**25
"""Entries of the largest logits tensor that the scorer makes at once, 128 MiB in float32."""


def processed_logprobs(
    logits: Float[Tensor, "rows v"], temperature: float, top_p: float
) -> Float[Tensor, "rows v"]:
    """Return log mu over the vocabulary: tempered, cut to the nucleus of top_p, renormalized.

    Tokens outside the nucleus are at -inf. The most probable token always stays. This is vLLM's
    rule and tie-breaking: in ascending order of probability, a token is removed while the mass up
    to and including it is at most 1 - top_p.
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


class LoadedModel:
    """A transformers model in memory: what sampler and scorer share.

    Args:
        model: a model, a directory or a hub id.
        dtype: of weights and activations, where the model is loaded here.
        device: None is the GPU where there is one.
        max_model_len: longest sequence; None reads the model's limit.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        dtype: str,
        device: str | torch.device | None,
        max_model_len: int | None,
    ):
        self._source = None if isinstance(model, nn.Module) else model
        net = model if isinstance(model, nn.Module) else load_model(model, dtype, device)
        self._model: Any = net
        vocab_size = lm_head_weight(net).shape[0]
        self.limits = Limits(
            max_model_len=max_model_len
            or self.model.config.get_text_config().max_position_embeddings,
            vocab_size=vocab_size,
            max_logprobs=vocab_size,
        )

    @property
    def origin(self) -> str:
        """The model in words, for messages."""
        return "The model in memory" if self._source is None else f"The model {self._source}"

    @property
    def model(self) -> Any:
        """The model itself."""
        if self._model is None:
            raise ValueError("This backend is closed; make a new one.")
        return self._model

    def close(self) -> None:
        """Drop the model. Closing twice is harmless."""
        self._model = None


class TransformersSampler(LoadedModel):
    """Rollouts of a transformers model (``protocols.Sampler``): slower than vLLM, the same numbers.

    Args:
        model: a model, a directory or a hub id. A model is used as it is, not copied.
        dtype: of weights and activations, where the model is loaded here.
        device: None is the GPU where there is one.
        max_model_len: longest prompt and completion together; None reads the model's limit.
        batch_size: rollouts that are sampled side by side.
        eos_token_ids: ids that end a completion; None reads them from the directory or hub id.

    Raises:
        ValueError: the model cannot be loaded, or a model is given without ``eos_token_ids``.
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
        """Return ``params.n`` rollouts per prompt, in prompt order, from a generator of their own.

        mu is the distribution that each token was drawn from (``processed_logprobs``). Greedy
        tokens have log mu = 0.

        Raises:
            ValueError: a prompt and ``max_tokens`` do not fit into ``limits.max_model_len``, or a
                prompt is empty.
            InvalidAnswer: the model gave NaN or another log-prob that it cannot sample from.
        """
        check_lengths(prompts, params.max_tokens, self.limits.max_model_len)
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
        """Copy the model's weights. No cache outlives a call."""
        self.model.load_state_dict(model.state_dict())

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
        cache = None
        sampled_ids, sampled_logprobs = [], []
        for _ in range(params.max_tokens):
            output = self.model(
                input_ids=step_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
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


class TransformersScorer(LoadedModel):
    """Teacher scores of a transformers model (``protocols.Scorer``), for machines without vLLM.

    Args:
        model: a directory, a hub id, or a model. A model is read live: with the student itself, the
            scores are those of the current policy (self-distillation).
        dtype: of weights and activations, where the model is loaded here.
        device: None is the GPU where there is one.
        max_model_len: longest sequence; None reads the model's limit.
        batch_tokens: tokens that go through the model at once, including padding.

    Raises:
        ValueError: the model cannot be loaded, or its logits are not a plain product with its head.
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
        super().__init__(model, dtype, device, max_model_len)
        check_plain_head(self.model)
        self.batch_tokens = batch_tokens

    @functools.cached_property
    def sampler(self) -> TransformersSampler | None:
        """A sampler of the same weights in memory; None for a scorer of a live model."""
        if self._source is None:
            return None
        return TransformersSampler(
            self.model,
            max_model_len=self.limits.max_model_len,
            eos_token_ids=read_eos_token_ids(self._source),
        )

    @torch.no_grad()
    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[TeacherScores]:
        """Return one ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads instead of each rollout's own prompt.
            candidate_ids: ids to score instead of the teacher's own top K, one [n, K] tensor per
                rollout from ``Rollout.start`` on. They are returned in the order given.
            hidden: return hidden states too. Their head is the model's own weight.

        Raises:
            ValueError: K above the vocabulary, candidates of another shape, or a sequence too long
                for the model.
            InvalidAnswer: the model's numbers are no log-probs, or candidates are given twice.
        """
        vocab_size = lm_head_weight(self.model).shape[0]
        k = check_support_size(support_size, vocab_size, vocab_size, "support_size")
        if candidate_ids is not None:
            widths = {ids.shape[1] for ids in candidate_ids} - {k}
            if widths or len(candidate_ids) != len(rollouts):
                raise ValueError(
                    f"candidate_ids has {len(candidate_ids)} entries, of widths other than {k}: "
                    f"{sorted(widths)}; pass one [n, {k}] tensor for each of the {len(rollouts)} "
                    "rollouts."
                )
        sequences = sequences_to_score(rollouts, prompts, vocab_size)
        check_lengths([s.token_ids for s in sequences], 0, self.limits.max_model_len)
        weight = lm_head_weight(self.model).detach()
        head = TeacherHead(weight, origin=self.origin)
        scores: dict[int, TeacherScores] = {}
        for batch in token_batches([len(s.token_ids) for s in sequences], self.batch_tokens):
            tokens, mask = pad([sequences[index].token_ids for index in batch], weight.device)
            all_states = hidden_states(self.model, tokens, mask)
            # State t predicts token t + 1, so [start, end) is scored from [start - 1, end - 1).
            spans = [(sequences[index].start, len(sequences[index].token_ids)) for index in batch]
            states = torch.cat([all_states[row, a - 1 : b - 1] for row, (a, b) in enumerate(spans)])
            labels = torch.cat([tokens[row, a:b] for row, (a, b) in enumerate(spans)])
            if candidate_ids is None:
                ids, logprobs = top_logprobs(states, weight, labels, k)
            else:
                candidates = torch.cat([candidate_ids[index] for index in batch]).to(labels)
                ids = torch.cat([labels[:, None], candidates], dim=1)
                logprobs = selected_logprobs(states, weight, ids)
            sizes = [b - a for a, b in spans]
            for index, sequence_ids, sequence_logprobs, own_states in zip(
                batch,
                ids.cpu().split(sizes),
                logprobs.float().cpu().split(sizes),
                states.cpu().split(sizes),
                strict=True,
            ):
                one = make_scores(
                    sequence_logprobs[:, 0],
                    sequence_ids[:, 1:],
                    sequence_logprobs[:, 1:],
                    sampled=sequence_ids[:, 0],
                    k=k,
                    vocab_size=vocab_size,
                    origin=self.origin,
                    sequence=index,
                    start=sequences[index].start,
                    ranked=candidate_ids is None,
                    lacks=sequences[index].lacks,
                )
                shares = (HiddenStates(own_states, head),) if hidden else ()
                scores[index] = replace(one, hidden=shares)
        return [scores[index] for index in range(len(rollouts))]


def top_logprobs(
    states: Float[Tensor, "n d"], weight: Float[Tensor, "v d"], labels: Int[Tensor, " n"], k: int
) -> tuple[Int[Tensor, "n k_1"], Float[Tensor, "n k_1"]]:
    """Return ids and log-probs of each label and then of the top k, [n, 1 + k], in row blocks."""
    ids, logprobs = [], []
    rows = max(1, LOGITS_BUDGET // weight.shape[0])
    for first in range(0, max(len(states), 1), rows):
        block = torch.log_softmax((states[first : first + rows] @ weight.T).float(), dim=-1)
        label_ids = labels[first : first + rows, None]
        top_values, top_ids = largest(block, k)
        ids.append(torch.cat([label_ids, top_ids], dim=1))
        logprobs.append(torch.cat([block.gather(1, label_ids), top_values], dim=1))
    return torch.cat(ids), torch.cat(logprobs)
