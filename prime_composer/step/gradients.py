"""Compute a step's gradients: (sum of the losses) / (tokens of the step), by micro-batches."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from prime_composer.backends.hf_model import token_batches
from prime_composer.contract import LossInputs, LossOutputs, Mean, given
from prime_composer.losses.bound import Objective, setup_loss_fn
from prime_composer.losses.shared.metrics import DISTILLATION_KL, distillation_kl, token_mean
from prime_composer.losses.shared.reductions import summed_over_ranks
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step.balance import part_names, shares
from prime_composer.step.batch import Batch
from prime_composer.step.mismatch import Mismatch
from prime_composer.step.student_forward import autocast, student_inputs


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is NaN or infinite. The message names step, loss and sequence."""


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """Inputs of one forward, whose graph leads to the model's parameters."""

    inputs: LossInputs
    names: Sequence[str]  # of its sequences, for messages
    parts: Sequence[str] = ()  # of the step, one for each sequence

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.inputs.loss_mask.shape[0]


def accumulate_gradients(
    model: nn.Module,
    loss: Objective,
    batch: Batch,
    config: TrainerConfig,
    step: int,
    mismatch: Mismatch | None = None,
) -> dict[str, float]:
    """Run the backward pass of the step's loss, which adds to the parameters' ``grad``.

    With N tokens in the step, the gradient is that of (1/N) sum_t loss_t. The result has "loss",
    the step's loss per token, and the loss's own metrics. It is empty where there is nothing to
    train on. ``NonFiniteLoss`` is raised before the backward pass of its micro-batch.
    """
    divisor = float(batch.tokens) or 1.0  # where there is nothing to train on
    loss_sum = torch.zeros(())
    averages = MetricAverages()
    divided = len(set(part_names(batch.samples))) > 1
    for micro_batch in prepare_micro_batches(model, loss, batch, config):
        if mismatch is not None:
            mismatch.add(micro_batch.inputs)
        outputs = loss(micro_batch.inputs)
        if not torch.isfinite(outputs.loss):
            raise NonFiniteLoss(describe_non_finite(loss, micro_batch, outputs, step))
        (outputs.loss / divisor).backward()
        loss_sum = loss_sum + outputs.loss.detach()
        metrics = outputs.metrics
        if batch.of_teacher:
            parts = micro_batch.parts if divided else ()
            series = kl_metrics(loss, micro_batch.inputs, parts)
            metrics = metrics | {name: mean for name, mean in series.items() if mean.count}
        averages.add(metrics, micro_batch.tokens)
    if averages.empty:
        return {}
    return {"loss": float(loss_sum) / divisor} | averages.result()


def kl_metrics(loss: Objective, inputs: LossInputs, parts: Sequence[str] = ()) -> dict[str, Mean]:
    """Return ``distillation/kl``, and that of each of the parts."""
    if not loss.config.compares_with_teacher or inputs.ref_logprobs is None:
        return {}
    kl, compared = distillation_kl(inputs)
    masks = {DISTILLATION_KL: compared}
    for name in dict.fromkeys(parts):
        own = torch.tensor([part == name for part in parts], device=kl.device)
        masks[f"{DISTILLATION_KL}/{name}"] = compared & own[given(inputs.segment_ids)]
    return {name: Mean(token_mean(kl, mask), mask.sum()) for name, mask in masks.items()}


def gradient_shares(
    model: nn.Module, loss: Objective, batch: Batch, config: TrainerConfig, step: int
) -> dict[str, float]:
    """Return ``rollout/gradient_share/NAME`` of each of ``part_names``; nothing where there is one.

    With g = sum_e g_e the gradient of a step's rollouts, the share of a part is |g_e| / sum_r
    |g_r|. It takes another forward and backward pass.
    """
    names = part_names(batch.samples)
    if len(set(names)) < 2:
        return {}
    same = setup_loss_fn(loss.config, loss.section)  # a schedule must not see the step twice
    same.load_state_dict(loss.state_dict())
    norms = []
    for name in dict.fromkeys(names):
        own = [one for one, of in zip(batch.samples, names, strict=True) if of == name]
        part = dataclasses.replace(batch, samples=own)
        accumulate_gradients(model, same, part, config, step)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Undone is what the part was divided by. The step's own divisor would be a factor of all.
        norms.append((part.tokens or 1) * float(torch.nn.utils.get_total_norm(gradients)))
        model.zero_grad(set_to_none=True)
    return shares("rollout/gradient_share", [*dict.fromkeys(names)], norms)


class MetricAverages:
    """A loss's metrics of a step: sums and counts of its micro-batches."""

    def __init__(self) -> None:
        self._tokens = 0
        self._totals: dict[str, Tensor] = {}

    @property
    def empty(self) -> bool:
        """Whether no token was added."""
        return not self._tokens

    def add(self, metrics: dict[str, Tensor], tokens: int) -> None:
        """Add one micro-batch's metrics, which hold for ``tokens`` tokens."""
        self._tokens += tokens
        for name, value in metrics.items():
            own = value.count if isinstance(value, Mean) else torch.tensor(tokens)
            count = own.to(value.device, torch.float64)
            # What is no mean of anything may be any number, NaN included.
            total = torch.stack([torch.where(count > 0, value.double() * count, 0.0), count])
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def over_ranks(self) -> "MetricAverages":
        """Add up all ranks of a distributed run, which have the same metrics. Each has to call."""
        tokens = torch.tensor([self._tokens], dtype=torch.float64)
        sums = summed_over_ranks(torch.cat([tokens, *(own.cpu() for own in self._totals.values())]))
        self._tokens = int(sums[0])
        self._totals = dict(zip(self._totals, sums[1:].view(-1, 2), strict=True))
        return self

    def result(self) -> dict[str, float]:
        """Return the step's mean of each metric, 0 over none of its tokens; nothing where empty."""
        totals = {} if self.empty else self._totals
        return {name: float(total) / max(float(n), 1.0) for name, (total, n) in totals.items()}


def prepare_micro_batches(
    model: nn.Module,
    loss: Objective,
    batch: Batch,
    config: TrainerConfig,
) -> Iterator[ForwardPass]:
    """Run the student's forward and yield the micro-batches.

    The grouping changes a step's gradient only by the rounding of its sums.
    """
    lengths = [sample.length for sample in batch.samples]
    for indices in token_batches(lengths, config.micro_batch_tokens):
        with autocast(model, config.dtype):
            samples = [batch.samples[i] for i in indices]
            inputs = student_inputs(model, samples, batch.temperature, loss.config.stop_ids)
        yield ForwardPass(inputs, [f"rollout {i}" for i in indices], part_names(samples))


def describe_non_finite(
    loss: Objective, micro_batch: ForwardPass, outputs: LossOutputs, step: int
) -> str:
    """Return an error message that names the sequence whose loss is NaN or infinite, alone."""
    prefix = f"step {step}: the loss {loss.config.type!r}"
    inputs = micro_batch.inputs
    for segment, name in enumerate(micro_batch.names):
        alone = dataclasses.replace(inputs, loss_mask=given(inputs.segment_ids) == segment)
        value = float(loss(alone).loss.detach())
        if not math.isfinite(value):
            return f"{prefix} of {name} is {value}; training stops here"
    names = ", ".join(micro_batch.names)
    return f"{prefix} of {names} is {float(outputs.loss.detach())}; training stops here"
