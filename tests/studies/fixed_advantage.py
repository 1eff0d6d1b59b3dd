"""OPSA's control: a fixed negative advantage on tokens that the student found improbable.

Per token of the mask that was sampled with mu(y) < below,

    penalty rho,    rho = p(y)/mu(y)

It knows neither teacher nor rewards: what it gains, an objective from a teacher has to beat. The
teacher is asked all the same, so that evaluations measure the KL.

The idea is OPSA's, https://arxiv.org/abs/2608.31046; threshold, penalty and rho are chosen here.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat

from prime_composer import LossInputs, LossOutputs
from prime_composer.losses import LossConfig
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.losses.shared.trust_region import importance_ratios


class FixedAdvantageConfig(LossConfig):
    """Knobs of the control."""

    type: Literal["tests.studies.fixed_advantage:fixed_advantage"] = (
        "tests.studies.fixed_advantage:fixed_advantage"
    )
    needs_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    penalty: PositiveFloat = 1.0
    """Minus the advantage."""

    below: float = Field(0.1, gt=0, le=1)
    """Probability under the sampler below which a token has it."""


def fixed_advantage(inputs: LossInputs, config: FixedAdvantageConfig) -> LossOutputs:
    """Return sum w penalty rho over the improbable tokens."""
    mask = inputs.loss_mask
    sampled = torch.where(mask, inputs.inference_logprobs.detach(), 0.0)
    low = mask & (sampled < math.log(config.below))
    ratio = torch.where(low, importance_ratios(inputs).log_ratio, 0.0).exp()
    loss = masked_sum(torch.where(low, config.penalty * ratio, 0.0), mask, inputs.loss_weights)
    return LossOutputs(loss=loss, metrics={"improbable": token_mean(low, mask)})
