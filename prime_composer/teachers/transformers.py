"""Teacher scores of a transformers model, for machines without vLLM."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    check_sequence_lengths,
    check_support_size,
    checked,
    sequences_to_score,
)
from prime_composer.backends.hf_model import (
    check_head,
    hidden_states,
    lm_head_weight,
    logits_over,
    pad,
    read_eos_token_ids,
    token_batches,
)
from prime_composer.backends.protocols import Rollout
from prime_composer.backends.transformers import LoadedModel
from prime_composer.contract import HiddenStates, Logits, Scores, TeacherHead
from prime_composer.lm_head import logprobs_at, whole_logits
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.scoring.kinds import largest

LOGITS_BUDGET = 2**25  # Entries of the largest logits tensor at once, 128 MiB in float32


class TransformersScorer(LoadedModel):
    """Teacher scores of a transformers model (``protocols.Scorer``), for machines without vLLM.

    A model in memory is read live: with the student itself, the scores are those of the current
    policy (self-distillation). ``source`` is the directory or hub id that its weights stay those
    of; None where they move. ``batch_tokens`` go through at once, including padding. None as
    ``device`` is the GPU where there is one, and as ``max_model_len`` the model's own limit.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        batch_tokens: int = 8192,
        source: str | Path | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ):
        super().__init__(model, dtype, device, max_model_len)
        self._source = self._source or source
        self._ends = eos_token_ids
        check_head(self.model)
        self.batch_tokens = batch_tokens

    gives_any_ids = True

    @functools.cached_property
    def sampler(self) -> TransformersSampler | None:
        """A sampler of the same weights in memory; None for a scorer of a live model."""
        if self._source is None:
            return None
        return TransformersSampler(
            self.model,
            max_model_len=self.limits.max_model_len,
            eos_token_ids=self._ends or read_eos_token_ids(self._source),
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
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says. The model's own weight is the head."""
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
        check_sequence_lengths([s.token_ids for s in sequences], 0, self.limits.max_model_len)
        weight = lm_head_weight(self.model).detach()
        own = logits_over(self.model, weight[:0])
        bias = None if own.bias is None else own.bias.detach()
        head = TeacherHead(weight, bias, own.scale, own.softcap, origin=self.origin)
        scores: dict[int, Scores] = {}
        for batch in token_batches([len(s.token_ids) for s in sequences], self.batch_tokens):
            tokens, mask = pad([sequences[index].token_ids for index in batch], weight.device)
            all_states = hidden_states(self.model, tokens, mask)
            # State t predicts token t + 1, so [start, end) is scored from [start - 1, end - 1).
            spans = [(sequences[index].start, len(sequences[index].token_ids)) for index in batch]
            states = torch.cat([all_states[row, a - 1 : b - 1] for row, (a, b) in enumerate(spans)])
            labels = torch.cat([tokens[row, a:b] for row, (a, b) in enumerate(spans)])
            if candidate_ids is None:
                ids, logprobs = top_logprobs(head.over(states), labels, k)
            else:
                candidates = torch.cat([candidate_ids[index] for index in batch]).to(labels)
                ids = torch.cat([labels[:, None], candidates], dim=1)
                logprobs = logprobs_at(head.over(states), ids)
            sizes = [b - a for a, b in spans]
            for index, sequence_ids, sequence_logprobs, own_states in zip(
                batch,
                ids.cpu().split(sizes),
                logprobs.float().cpu().split(sizes),
                states.cpu().split(sizes),
                strict=True,
            ):
                shares = (HiddenStates(own_states, head),) if hidden else ()
                scores[index] = Scores(
                    sequence_logprobs[:, 0],
                    sequence_ids[:, 1:],
                    sequence_logprobs[:, 1:],
                    shares,
                    start=sequences[index].start,
                )
        return checked(
            [scores[index] for index in range(len(rollouts))],
            sequences,
            k=k,
            origin=self.origin,
            ranked=candidate_ids is None,
        )


def top_logprobs(
    logits: Logits, labels: Int[Tensor, " n"], k: int
) -> tuple[Int[Tensor, "n k_1"], Float[Tensor, "n k_1"]]:
    """Return ids and log-probs of each label and then of the top k, [n, 1 + k], in row blocks."""
    ids, logprobs = [], []
    rows = max(1, LOGITS_BUDGET // logits.size)
    for first in range(0, max(logits.row_count, 1), rows):
        part = replace(logits, hidden=logits.hidden[first : first + rows])
        block = torch.log_softmax(whole_logits(part), dim=-1)
        label_ids = labels[first : first + rows, None]
        top_values, top_ids = largest(block, k)
        ids.append(torch.cat([label_ids, top_ids], dim=1))
        logprobs.append(torch.cat([block.gather(1, label_ids), top_values], dim=1))
    return torch.cat(ids), torch.cat(logprobs)
