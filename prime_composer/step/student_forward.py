"""Run the student over padded micro-batches and pack its log-probs into ``LossInputs``."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prime_composer.backends.hf_model import hidden_states, lm_head_weight, logits_over
from prime_composer.contract import (
    HiddenStates,
    Logits,
    LossInputs,
    Scores,
    StopLogprobs,
    Support,
    TeacherHead,
    TwoHeads,
    given,
)
from prime_composer.full_vocabulary import teacher_logprobs
from prime_composer.lm_head import logprobs_at
from prime_composer.losses.shared.stops import refuse_beyond
from prime_composer.scoring.shared_vocabulary import lacking
from prime_composer.step.batch import Sample
from prime_composer.step.states import check_states


def autocast(model: nn.Module, dtype: str) -> torch.autocast:
    """Return the context in which the student's matrix products have the trainer's dtype."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


def student_inputs(
    model: nn.Module,
    samples: Sequence[Sample],
    temperature: float = 1.0,
    stop_ids: Sequence[int] = (),
) -> LossInputs:
    """Run one forward over right-padded rollouts, and pack their trained tokens.

    Every position of the result trains. The student's log-probs are those of the full vocabulary,
    whatever top-p the sampler used. ``trainer_logprobs`` have its temperature, all others 1. Either
    all samples have scores or none has, and the same holds for advantages. A value that no sample
    has is None.
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
    stops = torch.tensor(stop_ids, dtype=torch.long).expand(len(labels), -1)
    refuse_beyond(stop_ids, head.shape[0])
    if scores:
        ref_logprobs = torch.cat([one.ref_logprobs for one in scores])
        support_ids = torch.cat([one.token_ids for one in scores])
        known = ~lacking(support_ids, head.shape[0])
        if any(one.known is not None for one in scores):
            known &= torch.cat([one.all_known for one in scores])
        # The entry of an id that is not known is not read, whichever row of the head it has.
        selected_ids = torch.cat([selected_ids, support_ids.masked_fill(~known, 0)], dim=-1)
    student = logits_over(model, hidden)
    heads = heads_of(samples)
    both = compared(student, heads, samples) if heads else None
    if both is not None and any(head.tolerance is not None for head in heads):
        own = given(ref_logprobs)
        computed = _by_hidden_states(both, labels.to(device), own.to(device))
        check_states(computed, own, heads, partial(place_of, samples))
    with_stops = torch.cat([selected_ids, stops], dim=-1).to(device)
    logprobs = logprobs_at(student, with_stops)
    logprobs, of_stops = logprobs.split([selected_ids.shape[-1], len(stop_ids)], dim=-1)
    if selected_ids.shape[-1] > 1:
        support = Support(
            token_ids=support_ids.to(device),
            teacher_logprobs=torch.cat([one.teacher_logprobs for one in scores]).to(device),
            student_logprobs=logprobs[:, 1:],
            known=None if known.all() else known.to(device),
        )

    log_mu = torch.cat([one.inference_logprobs for one in rollouts])
    sampled, tempered = logprobs[:, 0], None
    if temperature != 1:
        those = torch.cat([labels.unsqueeze(-1), stops], dim=-1).to(device)
        at_other = logprobs_at(student, those, temperature)
        sampled, tempered = at_other[:, 0], at_other[:, 1:]
    return LossInputs(
        trainer_logprobs=sampled,
        untempered_logprobs=None if temperature == 1 else logprobs[:, 0],
        inference_logprobs=log_mu[torch.cat([one.loss_mask for one in rollouts])].to(device),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.to(device),
        loss_mask=torch.ones(labels.shape[0], dtype=torch.bool, device=device),
        support=support,
        hidden_states=both,
        token_ids=labels.to(device),
        stops=StopLogprobs(tuple(stop_ids), of_stops, tempered) if stop_ids else None,
        **_of_sequences(samples, trained.sum(dim=1), device),
    )


def _of_sequences(
    samples: Sequence[Sample], counts: Int[Tensor, " b"], device: torch.device
) -> dict[str, Any]:
    """Return what the samples say of their tokens, by its name in ``LossInputs``."""

    def per_token(values: Iterable[Any]) -> Tensor | None:
        known = [value for value in values if value is not None]
        return torch.tensor(known).repeat_interleave(counts).to(device) if known else None

    return {
        "advantages": per_token(sample.advantage for sample in samples),
        "segment_ids": per_token(range(len(samples))),
        "balance": per_token(sample.weight for sample in samples),
    }


def _by_hidden_states(
    both: TwoHeads, labels: Int[Tensor, " n"], own: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return log q of the labels by hidden states and heads; ``own`` where a head lacks the id."""
    alone = lacking(labels, min(side.size for side in both.sides))
    computed = teacher_logprobs(both, labels.masked_fill(alone, 0).unsqueeze(-1))[:, 0]
    return torch.where(alone, own.to(computed), computed)


def heads_of(samples: Sequence[Sample]) -> list[TeacherHead]:
    """Return the output heads of the teachers that were asked for hidden states, once each."""
    return list(dict.fromkeys(share.head for sample in samples for share in _hidden(sample)))


def compared(student: Logits, heads: Sequence[TeacherHead], samples: Sequence[Sample]) -> TwoHeads:
    """Return the student's and the teachers' logits of the trained tokens."""
    device = student.hidden.device
    teachers, weights = [], []
    for head in heads:
        states, shares = [], []
        for sample in samples:
            mask = sample.rollout.trained
            own = next((share for share in _hidden(sample) if share.head is head), None)
            if own is None:  # a weight of 0, beside which the states may be anything
                states.append(torch.zeros(int(mask.sum()), head.weight.shape[1]))
            else:
                states.append(own.states[mask].to(head.weight.dtype))
            share = 0.0 if own is None else own.weight
            shares.append(torch.full((len(states[-1]),), share, dtype=torch.float64))
        teachers.append(head.over(torch.cat(states).to(device)))
        weights.append(torch.cat(shares).to(device))
    mixed = len(teachers) > 1
    return TwoHeads(student, tuple(teachers), torch.stack(weights, dim=1) if mixed else None)


def place_of(samples: Sequence[Sample], row: int) -> str:
    """Return where the token of a packed row is."""
    places = [
        f"{position} of rollout {index}"
        for index, sample in enumerate(samples)
        for position in sample.rollout.loss_mask.nonzero()[:, 0].tolist()
    ]
    return places[row]


def _hidden(sample: Sample) -> Sequence[HiddenStates]:
    return () if sample.scores is None else sample.scores.hidden


def _trained_scores(sample: Sample) -> Scores:
    """Return the scores of the sample's trained tokens, without hidden states."""
    return replace(given(sample.scores), hidden=()).rows(sample.rollout.trained)
