"""Losses from outside the package: one with a state, and one that reads the whole vocabulary."""

from typing import ClassVar, Literal

import torch

from prime_composer import LossInputs, LossOutputs
from prime_composer.contract import Mean
from prime_composer.losses import LossConfig, SupportLossConfig

NAME = "tests.upstream.scheduled_loss:scheduled"
MARGIN = "tests.upstream.scheduled_loss:margin"


class Means:
    """A state: the mean loss of every step."""

    def __init__(self):
        self.means = []

    def end_step(self, mean_loss):
        self.means.append(mean_loss)

    def state_dict(self):
        return {"means": self.means}

    def load_state_dict(self, state):
        self.means = list(state["means"])


class ScheduledConfig(LossConfig):
    type: Literal["tests.upstream.scheduled_loss:scheduled"] = NAME
    needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    steps: int = 10

    def make_state(self):
        return Means()


def scheduled(inputs: LossInputs, config: ScheduledConfig, state: Means) -> LossOutputs:
    """Return the SUM of log p - log q, and a metric of each kind of average."""
    gap = (inputs.trainer_logprobs - inputs.ref_logprobs)[inputs.loss_mask]
    metrics = {"gap": gap.detach().mean(), "last": Mean(gap[-1], torch.tensor(1))}
    return LossOutputs(loss=gap.sum(), metrics=metrics)


class MarginConfig(SupportLossConfig):
    type: Literal["tests.upstream.scheduled_loss:margin"] = MARGIN


def margin(inputs: LossInputs, config: MarginConfig) -> LossOutputs:
    """Stand for a loss of a support, which no test calls."""
    raise NotImplementedError
