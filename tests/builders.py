"""Builders of test inputs, shared by the rooms."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prime_composer.contract import Logits, LossInputs, StopLogprobs, Support, TwoHeads
from prime_composer.losses import LossConfig
from prime_composer.recipe.schema import Recipe
from prime_composer.samplers.registry import BackendSpec

# Models ---------------------------------------------------------------------------------------


def student_spec(recipe: Recipe, model: str | Path = "m") -> BackendSpec:
    """Return how a run opens its student's sampler."""
    rollout, sizes = recipe.rollout, (recipe.rollout.context(), recipe.side_by_side)
    return BackendSpec(rollout, "[rollout]", rollout.backend, model, recipe.trainer.dtype, *sizes)


# Losses ---------------------------------------------------------------------------------------

VOCAB = 40
"""Vocabulary of ``packed_inputs``."""


def double(values: Any) -> Tensor:
    """Return numbers as a tensor in float64."""
    return torch.tensor(values, dtype=torch.float64)


def packed_inputs(
    config: LossConfig,
    seq: int = 12,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    first_segment: int = 0,
    mask: Tensor | None = None,
) -> LossInputs:
    """Return all inputs that a loss may read, random, for a pack of four sequences.

    In ``hidden_states`` the heads are identities, so that hidden states are logits. Every tensor
    that may carry a gradient is a leaf with one. The mask has three quarters of the tokens by
    default.
    """
    g = torch.Generator().manual_seed(seed)
    size = config.support_size
    k = VOCAB if size == "full" else min(VOCAB, size or 4)
    student = torch.randn(seq, VOCAB, generator=g, dtype=torch.float64)
    teacher = 1.5 * torch.randn(seq, VOCAB, generator=g, dtype=torch.float64) + 0.5 * student
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = log_q.topk(k).indices
    tokens = torch.randint(0, VOCAB, (seq,), generator=g)
    sampled = tokens.unsqueeze(-1)
    staleness = 0.3 * torch.randn(seq, generator=g, dtype=torch.float64)

    def leaf(values: Tensor) -> Tensor:
        return values.detach().to(dtype).clone().requires_grad_()

    return LossInputs(
        trainer_logprobs=leaf(log_p.gather(-1, sampled).squeeze(-1)),
        inference_logprobs=leaf((log_p.gather(-1, sampled).squeeze(-1) + staleness).clamp(max=0)),
        ref_logprobs=leaf(log_q.gather(-1, sampled).squeeze(-1)),
        advantages=torch.randn(seq, generator=g, dtype=torch.float64).to(dtype),
        loss_mask=torch.rand(seq, generator=g) > 0.25 if mask is None else mask,
        loss_weights=leaf(torch.rand(seq, generator=g, dtype=torch.float64) + 0.5),
        support=Support(ids, leaf(log_q.gather(-1, ids)), leaf(log_p.gather(-1, ids))),
        hidden_states=identity_heads(leaf(student), teacher.to(dtype)),
        token_ids=tokens,
        segment_ids=first_segment + torch.arange(seq) * 4 // seq,
        balance=torch.rand(seq, generator=g, dtype=torch.float64).to(dtype) + 0.5,
        stops=stop_logprobs(config.stop_ids, log_p, leaf),
    )


def stop_logprobs(
    ids: tuple[int, ...], log_p: Tensor, leaf: Callable[[Tensor], Tensor]
) -> StopLogprobs | None:
    """Return the student's log-probs at the stops of a loss, at two temperatures."""
    if not ids:
        return None
    tempered = (0.8 * log_p).log_softmax(-1)
    return StopLogprobs(ids, leaf(log_p[:, [*ids]]), leaf(tempered[:, [*ids]]))


def identity_heads(student_logits: Tensor, teacher_logits: Tensor) -> TwoHeads:
    """Return two heads that are identities: their hidden states are logits, or log-probs."""
    identity = torch.eye(student_logits.shape[-1], dtype=student_logits.dtype)
    return TwoHeads(Logits(student_logits, identity), (Logits(teacher_logits, identity),))


def with_trained_head(inputs: LossInputs) -> LossInputs:
    """Return the inputs with the student's head as one more leaf."""
    heads = inputs.hidden_states
    assert heads is not None
    weight = heads.student.weight.clone().requires_grad_()
    student = dataclasses.replace(heads.student, weight=weight)
    return dataclasses.replace(inputs, hidden_states=dataclasses.replace(heads, student=student))


def cast(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    """Return the inputs in another floating point dtype, as new leaves."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    return mapped(inputs, change)


def student_leaves(inputs: LossInputs) -> list[Tensor]:
    """Return the tensors that a loss may send a gradient to."""
    assert inputs.support is not None and inputs.hidden_states is not None
    leaves = [
        inputs.trainer_logprobs,
        inputs.support.student_logprobs,
        inputs.hidden_states.student.hidden,
    ]
    leaves += [x for x in [inputs.hidden_states.student.weight] if x.requires_grad]
    leaves += [] if inputs.stops is None else [inputs.stops.logprobs, inputs.stops.tempered]
    return leaves


def rows(inputs: LossInputs, index: Tensor, **changed: Any) -> LossInputs:
    """Return the positions ``index`` of every tensor as new leaves, with some fields changed."""

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach()[index].requires_grad_(value.requires_grad)

    return mapped(inputs, take, **changed)


def mapped(inputs: LossInputs, change: Callable[[Any], Any], **changed: Any) -> LossInputs:
    """Return the inputs with ``change`` of every field and tensor, and some fields changed."""
    values = {f.name: change(getattr(inputs, f.name)) for f in dataclasses.fields(LossInputs)}
    values["support"] = inputs.support and Support(
        *(change(getattr(inputs.support, f.name)) for f in dataclasses.fields(Support))
    )
    values["hidden_states"] = with_hidden(inputs.hidden_states, change)
    values["stops"] = inputs.stops and StopLogprobs(
        inputs.stops.token_ids, change(inputs.stops.logprobs), change(inputs.stops.tempered)
    )
    return LossInputs(**{**values, **changed})


def with_hidden(heads: TwoHeads | None, change: Callable[[Tensor], Tensor]) -> TwoHeads | None:
    """Return two heads with changed hidden states, the student's first, and weights to match."""
    if heads is None:
        return None
    changed = [change(side.hidden) for side in heads.sides]
    student, *teachers = (
        dataclasses.replace(side, hidden=hidden, weight=side.weight.to(hidden.dtype))
        for side, hidden in zip(heads.sides, changed, strict=True)
    )
    return TwoHeads(student, tuple(teachers))


def concatenated(a: LossInputs, b: LossInputs) -> LossInputs:
    """Return the pack of two packs, as new leaves."""

    def cat(first: Any, second: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        return torch.cat([first.detach(), second.detach()]).requires_grad_(first.requires_grad)

    values = {
        f.name: cat(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(LossInputs)
    }
    values["support"] = a.support and Support(
        *(
            cat(getattr(a.support, f.name), getattr(b.support, f.name))
            for f in dataclasses.fields(Support)
        )
    )
    others = iter(b.hidden_states.sides if b.hidden_states else ())
    values["hidden_states"] = with_hidden(a.hidden_states, lambda x: cat(x, next(others).hidden))
    values["stops"] = a.stops and StopLogprobs(
        a.stops.token_ids, *map(cat, a.stops[1:], b.stops[1:])
    )
    return LossInputs(**values)


def with_garbage(inputs: LossInputs, *garbage: float) -> LossInputs:
    """Return the inputs with garbage at the masked positions of every tensor, one after another."""
    outside = ~inputs.loss_mask
    numbers = torch.tensor(garbage)[(outside.cumsum(0) - 1) % len(garbage)]

    def spoiled(values: Tensor) -> Tensor:
        at, fill = (x if values.dim() == 1 else x.unsqueeze(-1) for x in (outside, numbers))
        filled = torch.where(at, fill.to(values), values.detach())
        return filled.requires_grad_(values.requires_grad)

    assert inputs.support is not None
    return dataclasses.replace(
        inputs,
        trainer_logprobs=spoiled(inputs.trainer_logprobs),
        inference_logprobs=spoiled(inputs.inference_logprobs),
        ref_logprobs=spoiled(inputs.ref_logprobs),
        advantages=spoiled(inputs.advantages),
        loss_weights=spoiled(inputs.loss_weights),
        token_ids=inputs.token_ids.masked_fill(outside, 1),
        balance=spoiled(inputs.balance),
        support=Support(
            inputs.support.token_ids.masked_fill(outside.unsqueeze(-1), -1),
            spoiled(inputs.support.teacher_logprobs),
            spoiled(inputs.support.student_logprobs),
        ),
        hidden_states=with_hidden(inputs.hidden_states, spoiled),
        stops=inputs.stops
        and StopLogprobs(inputs.stops.token_ids, *map(spoiled, inputs.stops[1:])),
    )


class LargestTensor(TorchDispatchMode):
    """Within the block, notes the entries of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out
