"""The student in training: weights, optimizer, loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prime_composer.backends.cpu_guard import return_freed_memory
from prime_composer.local.engine import Engine
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.shared.modifiers import with_token_ids
from prime_composer.recipe.schema import Recipe, TrainerConfig
from prime_composer.step.batch import Batch
from prime_composer.step.gradients import NonFiniteLoss, accumulate_gradients
from prime_composer.step.mismatch import Mismatch, SamplerCheck

LARGEST_GROWTH = 100.0  # How often a tensor's norm at the run's start its norm may become

SMALLEST_RMS = 0.01
"""Root mean square below which a tensor's start counts as this.

A matrix that begins at 0 has no norm to compare with. At 0.01 it may grow to entries of 1.
"""

SMALLEST_RMS_OF_FEW = 0.1
"""The same for a tensor of fewer than ``FEW_ENTRIES``. A gate or a scale that begins at 0 has
entries beyond 1 by right; it may grow to 10."""

FEW_ENTRIES = 1000


class ExplodedWeights(NonFiniteLoss):
    """An optimizer step left weights that are not finite, or far larger than at the start."""


@dataclass(frozen=True, eq=False)
class WeightCheck:
    """The Euclidean norms of the tensors that train, at the run's start, in the model's order."""

    norms: Tensor

    @classmethod
    def of_model(cls, model: nn.Module) -> "WeightCheck":
        """Return the check of a run that begins with these weights."""
        return cls(norms_of([*trained(model).values()]))

    def check(self, model: nn.Module, step: int) -> None:
        """Refuse weights that are NaN, infinite, or whose norm grew beyond ``LARGEST_GROWTH``."""
        names, parameters = zip(*trained(model).items(), strict=True)
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


class Student:
    """What the optimizer changes from step to step: the student of an open engine."""

    def __init__(self, recipe: Recipe, engine: Engine):
        self.model = engine.model  # with the weights that it is served with
        self.config = recipe.trainer
        self.loss = setup_loss_fn(with_token_ids(recipe.loss, engine.problems.tokenizer))
        # None where sampler and student compute different distributions
        self.sampler_check = SamplerCheck.of_recipe(recipe)
        self.latent = engine.latent
        self.steps = 0  # finished
        self.metrics: dict[str, float] = {}  # of the last finished step
        self.trained = (
            [*trained(self.model).values()]
            if self.latent is None
            else self.latent.trained(self.model)
        )
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.weight_check = WeightCheck.of_model(self.model)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        lr = self.config.lr * lr_factor(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mismatch = None if self.sampler_check is None else Mismatch(self.sampler_check)
        return_freed_memory(self.model)
        metrics = accumulate_gradients(self.model, self.loss, batch, self.config, step, mismatch)
        if mismatch is not None:
            metrics |= mismatch.result(step)
        if self.latent is not None:
            self.latent.take_gradients()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.trained, self.config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            # A finite loss may have such a gradient. Weights are not to be saved after it.
            raise NonFiniteLoss(
                f"step {step}: the gradient of the loss {self.loss.config.type!r} is "
                f"{float(grad_norm)}; training stops here"
            )
        self.optimizer.step()
        if self.latent is not None:
            self.latent.round()
        self.weight_check.check(self.model, step)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.end_step()
        self.steps = step
        self.metrics = metrics | {"grad_norm": float(grad_norm), "lr": lr}
        return self.metrics

    def sizes(self) -> dict[str, float]:
        """Return the weights of a student that trains quantized, and how many of them are."""
        if self.latent is None:
            return {}
        share = self.latent.share(self.model)
        return {"student/weights": float(share.weights), "student/rounded": float(share.rounded)}

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes but the model's weights, which a checkpoint stores as a model.

        torch's random state is not part of it: every draw has a generator of its own.
        """
        latent = {} if self.latent is None else {"latent": self.latent.state_dict()}
        return {
            "optimizer": self.optimizer.state_dict(),
            "loss": self.loss.state_dict(),
            "norms": self.weight_check.norms,
            **latent,
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore what ``state_dict`` returned after a step. The model has its weights already."""
        self.steps = step
        if self.latent is not None:
            self.latent.load_state_dict(state["latent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss.load_state_dict(state["loss"])
        self.weight_check = WeightCheck(state["norms"])


def lr_factor(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step (from 1) as a share of the peak.

    The first step of the decay is at the peak. It would reach 0 one step after the last.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name: all, or those of an adapter."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


@torch.no_grad()
def norms_of(parameters: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor in float32, on the CPU."""
    return torch.stack(torch._foreach_norm(list(parameters))).float().cpu()
