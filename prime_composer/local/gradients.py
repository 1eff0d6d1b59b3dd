"""From a step's batch to gradients: (sum of the losses) / (tokens of the whole step), micro-batch by micro-batch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from prime_composer.backends.protocols import Rollout, TeacherScores
from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.local.replay import Pair, empty_pack, pair_inputs
from prime_composer.local.student_forward import empty_inputs, micro_batches, student_inputs
from prime_composer.losses.base import Loss
from prime_composer.recipe.schema import TrainerConfig

REPLAY_METRICS = "compose/replay/"
PAIRS = f"{REPLAY_METRICS}pairs"
"""The one metric that is a count: the step's is the sum of its micro-batches'."""


class NonFiniteLoss(RuntimeError):
    """The loss, or its gradient, is NaN or infinite: the message names step and loss, and the sequence of a loss."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What a step trains on.

    Attributes:
        rollouts: what the student sampled (and, under GKD's lambda, solutions of the data).
        scores: the teacher's view of each; None where the loss needs no teacher.
        advantages: of each rollout; None where the loss reads none.
        pairs: preference pairs of the replay channel.
    """

    rollouts: Sequence[Rollout]
    scores: Sequence[TeacherScores] | None = None
    advantages: Sequence[float] | None = None
    pairs: Sequence[Pair] = ()

    @property
    def tokens(self) -> int:
        return sum(int(rollout.loss_mask.sum()) for rollout in self.rollouts)


def accumulate_gradients(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    config: TrainerConfig,
    step: int,
    reference: nn.Module | None = None,
) -> dict[str, float]:
    """Backward of the step's loss. The preference pairs count as their mean, times the weight of their channel.

    Args:
        reference: the frozen policy r of the replay channel's loss, where that needs one.

    Returns:
        "loss", the loss per token of the step, and the loss's own metrics, averaged over micro-batches by tokens (those
        of the replay channel by pairs, of which there are the sum). Nothing where there is nothing to train on.

    Raises:
        NonFiniteLoss: before the bad micro-batch's backward.
    """
    total = batch.tokens or 1
    loss_sum = 0.0
    sums: dict[str, float] = {}
    tokens = pairs = 0
    for names, inputs in micro_batch_inputs(model, loss, batch, config, total, reference):
        outputs = loss(inputs)
        if not torch.isfinite(outputs.loss):
            raise NonFiniteLoss(describe_non_finite(loss, inputs, outputs, names, step))
        (outputs.loss / total).backward()
        n_tokens = inputs.loss_mask.shape[0]
        n_pairs = 0 if n_tokens else len(names)
        tokens, pairs = tokens + n_tokens, pairs + n_pairs
        loss_sum = loss_sum + outputs.loss.detach()
        for name, value in outputs.metrics.items():
            weight = (
                1 if name == PAIRS else n_pairs if name.startswith(REPLAY_METRICS) else n_tokens
            )
            sums[name] = sums.get(name, 0.0) + weight * value
    if not tokens and not pairs:
        return {}
    counts = {
        name: 1 if name == PAIRS else pairs if name.startswith(REPLAY_METRICS) else tokens
        for name in sums
    }
    return {"loss": float(loss_sum) / total} | {
        name: float(sums[name]) / count for name, count in counts.items() if count
    }


def micro_batch_inputs(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    config: TrainerConfig,
    total: int,
    reference: nn.Module | None,
) -> Iterator[tuple[list[str], LossInputs]]:
    """The inputs of each micro-batch, forward included, with the names of its sequences for an error message."""
    device = next(model.parameters()).device.type
    with_replay = "replay" in loss.config.needs
    for indices in micro_batches(batch.rollouts, config.micro_batch_tokens):
        with torch.autocast(device, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            inputs = student_inputs(
                model,
                [batch.rollouts[i] for i in indices],
                None if batch.scores is None else [batch.scores[i] for i in indices],
                None if batch.advantages is None else [batch.advantages[i] for i in indices],
            )
        if with_replay:
            inputs.replay = empty_pack(inputs)
        yield [f"rollout {i}" for i in indices], inputs
    if not with_replay:
        return
    for indices in micro_batches(
        [pair.longer for pair in batch.pairs], max(1, config.micro_batch_tokens // 2)
    ):
        with torch.autocast(device, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            pack = pair_inputs(model, [batch.pairs[i] for i in indices], reference)
        # A loss divides by tokens; weights of tokens / pairs make that the mean over pairs.
        pack.loss_weights = torch.full_like(
            pack.trainer_logprobs.detach(), total / len(batch.pairs)
        )
        inputs = empty_inputs(pack, loss.config.support_size)
        inputs.replay = pack
        yield [f"pair {i}" for i in indices], inputs


def describe_non_finite(
    loss: Loss, inputs: LossInputs, outputs: LossOutputs, names: Sequence[str], step: int
) -> str:
    """Which sequence made the loss NaN or infinite: each one alone, the others masked."""
    kind = f"step {step}: the loss {loss.config.type!r}"
    if inputs.loss_mask.shape[0]:
        for segment, name in enumerate(names):
            alone = LossInputs(**{**vars(inputs), "loss_mask": inputs.segment_ids == segment})
            value = float(loss(alone).loss.detach())
            if not math.isfinite(value):
                return f"{kind} of {name} is {value}; training stops here"
    return f"{kind} of {', '.join(names)} is {float(outputs.loss.detach())}; training stops here"
