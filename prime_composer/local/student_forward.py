"""Run the student over padded micro-batches and pack its log-probs into ``LossInputs``."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prime_composer.backends.hf_model import hidden_states, lm_head_weight
from prime_composer.contract import LossInputs, Support, given
from prime_composer.lm_head import selected_logprobs
from prime_composer.local.batch import Sample


def autocast(model: nn.Module, dtype: str) -> torch.autocast:
    """Return the context in which the student's matrix products have the trainer's dtype."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


def student_inputs(model: nn.Module, samples: Sequence[Sample]) -> LossInputs:
    """Run one forward over right-padded rollouts, and pack their trained tokens.

    Every position of the result trains. The student's log-probs are those of the full vocabulary at
    temperature 1, whatever temperature and top-p the sampler used.

    Args:
        model: a causal language model of transformers' shape. ``model.base_model`` returns hidden
            states, and the weight of the output embeddings turns them into logits.
        samples: the rollouts. Either all of them have scores or none has, and the same holds for
            advantages. A value that no sample has is None in the result.

    Raises:
        ValueError: a rollout trains on its first token, which no context predicts.
    """
    head = lm_head_weight(model)
    device = head.device
    rollouts = [sample.rollout for sample in samples]
    lengths = torch.tensor([sample.length for sample in samples])
    ids = pad_sequence([rollout.token_ids for rollout in rollouts], batch_first=True)
    trained = pad_sequence([rollout.loss_mask for rollout in rollouts], batch_first=True)
    if trained[:, 0].any():
        raise ValueError(
            "a rollout trains on its first token, which no context predicts: it needs a prompt"
        )
    attention = (torch.arange(ids.shape[1]) < lengths.unsqueeze(-1)).long()
    # Hidden state t-1 predicts token t.
    hidden = hidden_states(model, ids.to(device), attention.to(device))[:, :-1]
    hidden = hidden[trained[:, 1:].to(device)]
    if torch.is_autocast_enabled(device.type):
        # The residual stream stays float32 under autocast. The head's products use half precision,
        # as all other matrix products do.
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    labels = ids[trained]

    scores = [_trained_scores(sample) for sample in samples if sample.scores is not None]
    ref_logprobs = support = None
    selected_ids = labels.unsqueeze(-1)
    if scores:
        ref_logprobs, support_ids, teacher_logprobs = (
            torch.cat(parts) for parts in zip(*scores, strict=True)
        )
        selected_ids = torch.cat([selected_ids, support_ids], dim=-1)
    logprobs = selected_logprobs(hidden, head.to(hidden.dtype), selected_ids.to(device))
    if selected_ids.shape[-1] > 1:
        support = Support(
            token_ids=support_ids.to(device),
            teacher_logprobs=teacher_logprobs.to(device),
            student_logprobs=logprobs[:, 1:],
        )

    counts = trained.sum(dim=1)
    advantages = [sample.advantage for sample in samples if sample.advantage is not None]
    return LossInputs(
        trainer_logprobs=logprobs[:, 0],
        inference_logprobs=torch.cat(
            [rollout.inference_logprobs[rollout.loss_mask] for rollout in rollouts]
        ).to(device),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.to(device),
        advantages=torch.tensor(advantages, dtype=torch.float32)
        .repeat_interleave(counts)
        .to(device)
        if advantages
        else None,
        loss_mask=torch.ones(labels.shape[0], dtype=torch.bool, device=device),
        support=support,
        token_ids=labels.to(device),
        segment_ids=torch.arange(len(samples)).repeat_interleave(counts).to(device),
    )


def _trained_scores(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q, support ids and log q on the support at the sample's trained tokens."""
    scores = given(sample.scores)
    mask = sample.rollout.loss_mask[sample.rollout.start :]
    return scores.ref_logprobs[mask], scores.token_ids[mask], scores.teacher_logprobs[mask]


def empty_inputs(like: LossInputs, support_size: int | Literal["full"]) -> LossInputs:
    """Return inputs without a token, in the graph of ``like``.

    They accompany a micro-batch that contains preference pairs only.
    """
    none = like.trainer_logprobs[:0]
    detached = none.detach()
    wide = detached.unsqueeze(-1).expand(0, 1 if support_size == "full" else max(1, support_size))
    return LossInputs(
        trainer_logprobs=none,
        inference_logprobs=detached,
        ref_logprobs=detached,
        advantages=detached,
        loss_mask=like.loss_mask[:0],
        support=Support(token_ids=wide.long(), teacher_logprobs=wide, student_logprobs=wide),
        token_ids=given(like.token_ids)[:0],
        segment_ids=given(like.segment_ids)[:0],
    )
