"""The student's side of a step: rollouts to padded micro-batches, one forward, and the loss's inputs."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prime_composer.backends.hf_model import hidden_states, lm_head_weight, token_batches
from prime_composer.backends.protocols import Rollout, TeacherScores
from prime_composer.contract import LossInputs, Support
from prime_composer.lm_head import selected_logprobs


def micro_batches(rollouts: Sequence[Rollout], token_budget: int) -> list[list[int]]:
    """Indices of rollouts, grouped so that rows x longest row fits the budget; a longer rollout stands alone.

    The grouping never changes the gradient of a step beyond the rounding of its sums: losses are sums, divided once by
    the step's token count.
    """
    return token_batches([rollout.token_ids.shape[0] for rollout in rollouts], token_budget)


def student_inputs(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None = None,
    advantages: Sequence[float] | None = None,
) -> LossInputs:
    """One forward over right-padded rollouts; the trained tokens of all of them, packed, as ``LossInputs``.

    Only the tokens of the loss masks are kept, so every position of the result trains. The student's log-probs are of
    the full vocabulary at temperature 1, whatever the sampler did.

    Args:
        model: a causal language model of transformers' shape: ``model.model`` gives hidden states, the output
            embeddings are its head.
        rollouts: what the student sampled.
        scores: the teacher's view of the same rollouts, in order; None where the loss needs no teacher.
        advantages: one RL advantage per rollout; None where there is no reward.
    """
    head = lm_head_weight(model)
    device = head.device
    lengths = torch.tensor([rollout.token_ids.shape[0] for rollout in rollouts])
    ids = pad_sequence([rollout.token_ids for rollout in rollouts], batch_first=True)
    trained = pad_sequence([rollout.loss_mask for rollout in rollouts], batch_first=True)
    if trained[:, 0].any():
        raise ValueError(
            "a rollout trains on its first token, which no context predicts: it needs a prompt"
        )
    attention = (torch.arange(ids.shape[1]) < lengths.unsqueeze(-1)).long()
    # Hidden state t-1 predicts token t.
    hidden = hidden_states(model, ids.to(device), attention.to(device))[:, :-1][
        trained[:, 1:].to(device)
    ]
    if torch.is_autocast_enabled(device.type):
        # The residual stream stays float32 under autocast; the head's products are half precision like all others.
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    label = ids[trained]

    support_ids = None if scores is None else _cat([s.token_ids for s in scores], rollouts)
    if support_ids is not None and support_ids.shape[-1] > 0:
        wanted = torch.cat([label.unsqueeze(-1), support_ids], dim=-1)
        logprobs = selected_logprobs(hidden, head.to(hidden.dtype), wanted.to(device))
        trainer_logprobs = logprobs[:, 0]
        support = Support(
            token_ids=support_ids.to(device),
            teacher_logprobs=_cat([s.teacher_logprobs for s in scores], rollouts).to(device),
            student_logprobs=logprobs[:, 1:],
        )
    else:
        trainer_logprobs = selected_logprobs(
            hidden, head.to(hidden.dtype), label.unsqueeze(-1).to(device)
        )[:, 0]
        support = None

    counts = trained.sum(dim=1)
    return LossInputs(
        trainer_logprobs=trainer_logprobs,
        inference_logprobs=_cat([r.inference_logprobs for r in rollouts], rollouts).to(device),
        ref_logprobs=None
        if scores is None
        else _cat([s.ref_logprobs for s in scores], rollouts).to(device),
        advantages=None
        if advantages is None
        else torch.tensor(advantages, dtype=torch.float32).repeat_interleave(counts).to(device),
        loss_mask=torch.ones(label.shape[0], dtype=torch.bool, device=device),
        support=support,
        token_ids=label.to(device),
        segment_ids=torch.arange(len(rollouts)).repeat_interleave(counts).to(device),
    )


def empty_inputs(like: LossInputs, support_size: int | Literal["full"]) -> LossInputs:
    """Inputs without a token, in the graph of ``like``: for a micro-batch that only brings preference pairs."""
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
        token_ids=like.token_ids[:0],
        segment_ids=like.segment_ids[:0],
    )


def _cat(tensors: Sequence[Tensor], rollouts: Sequence[Rollout]) -> Tensor:
    """The trained positions of per-rollout tensors, packed."""
    return torch.cat(
        [tensor[rollout.loss_mask] for tensor, rollout in zip(tensors, rollouts, strict=True)]
    )
