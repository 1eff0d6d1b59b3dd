"""Check the student's weights after every optimizer step, before they are saved or sampled from.

And what is measured: at a run's start, for a teacher that seems to know nothing; at every step, for
a student whose tokens a teacher with a tokenizer of its own cannot judge.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prime_composer.step.gradients import NonFiniteLoss

LARGEST_GROWTH = 100.0
"""How often a tensor's norm at the run's start its norm may become."""

SMALLEST_RMS = 0.01
"""Root mean square below which a tensor's start counts as this.

A matrix that begins at 0 has no norm to compare with. At 0.01, half of the usual initialization of
a weight, it may grow to entries of 1.
"""

SMALLEST_RMS_OF_FEW = 0.1
"""The same for a tensor of fewer than ``FEW_ENTRIES``. A gate or a scale that begins at 0 has
entries beyond 1 by right; it may grow to 10."""

FEW_ENTRIES = 1000

LARGEST_SHARE = 0.05
"""Share of the student's tokens from which on a word is due, by metric and remedy."""

REMEDIES = {
    "xtok/noncanonical": (
        "of the student's tokens are none that its own tokenizer writes there, so that the teacher "
        "gives them a floor; lower rollout.temperature"
    ),
    "xtok/unscored": (
        "of the student's tokens have no score of the teacher, and do not train; compare both "
        "prompts, which each model's own chat template writes, and lower rollout.temperature"
    ),
}
"""What a teacher with a tokenizer of its own measures of a step, and what to do about it."""


class ExplodedWeights(NonFiniteLoss):
    """An optimizer step left weights that are not finite, or far larger than at the start."""


@dataclass(frozen=True, eq=False)
class WeightCheck:
    """The norms of the student's tensors at the start of the run.

    Attributes:
        norms: Euclidean norm of each parameter, in the model's order, on the CPU.
    """

    norms: Tensor

    @classmethod
    def of_model(cls, model: nn.Module) -> "WeightCheck":
        """Return the check of a run that begins with these weights."""
        return cls(norms_of([*model.parameters()]))

    def check(self, model: nn.Module, step: int) -> None:
        """Refuse weights that are NaN, infinite, or whose norm grew beyond ``LARGEST_GROWTH``.

        Args:
            model: the student, after the optimizer's step.
            step: the step's number, for the message.

        Raises:
            ExplodedWeights: a tensor is; the message names it.
        """
        names, parameters = zip(*model.named_parameters(), strict=True)
        norms = norms_of(parameters)
        sizes = torch.tensor([parameter.numel() for parameter in parameters])
        floors = torch.where(sizes < FEW_ENTRIES, SMALLEST_RMS_OF_FEW, SMALLEST_RMS)
        limits = LARGEST_GROWTH * self.norms.maximum(floors * sizes.sqrt())
        # Not written as norms > limits, which a NaN passes.
        failed = (~(norms <= limits)).nonzero()[:, 0].tolist()
        if not failed:
            return
        first = failed[0]
        others = f" and {len(failed) - 1} other tensors" if len(failed) > 1 else ""
        # In float64, where the squares of 1e30 have room.
        norm, start = float(parameters[first].detach().double().norm()), float(self.norms[first])
        if math.isfinite(norm):
            state = f"have norm {norm:.2g}, from {start:.2g} at the run's start"
        else:
            state = "are not finite numbers"
        raise ExplodedWeights(
            f"step {step}: after the optimizer's step the weights of {names[first]}{others} "
            f"{state}; this step is not saved. Lower trainer.lr or trainer.weight_decay"
        )


def teachers_without_success(measured: Mapping[str, float]) -> list[str]:
    """Return a warning for each teacher whose greedy answers are all wrong.

    A student becomes like it all the same, and the usual reason is another: its answers are in a
    form that the metric does not read, or are cut.
    """
    scores = {name: name.split("/")[1:-1] for name in measured if name.endswith("/accuracy")}
    return [
        f"{' '.join(['the teacher', *teacher])} has 0.0% accuracy on the held-out problems: "
        "rollout.max_tokens may cut its answers, or [data] metric and prompt_template do not suit "
        "it"
        for name, teacher in scores.items()
        if name.startswith("teacher/") and measured[name] == 0
    ]


def tokens_of_no_use(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a warning for each metric by which many tokens of a step say little to the student.

    Args:
        metrics: of the step. With several teachers, a teacher's name is in front of each.
    """
    return {
        name: f"{metrics[name]:.1%} {remedy} ({name})"
        for metric, remedy in REMEDIES.items()
        for name in metrics
        if name.endswith(metric) and metrics[name] > LARGEST_SHARE
    }


@torch.no_grad()
def norms_of(parameters: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor in float32, on the CPU."""
    return torch.stack(torch._foreach_norm(list(parameters))).float().cpu()
