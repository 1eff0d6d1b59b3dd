"""Huber loss on the log-ratio of teacher and student: a loss outside the package, complete.

Per token of the mask, with the gap g = log p(y) - log q(y),

    g^2 / 2 where |g| <= delta,    delta (|g| - delta / 2) elsewhere

Put this folder on PYTHONPATH and name the loss in a recipe:

    [loss]
    type = "my_loss:huber"
    delta = 0.5
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat

from prime_composer import LossInputs, LossOutputs
from prime_composer.losses import LossConfig


class HuberConfig(LossConfig):
    type: Literal["my_loss:huber"] = "my_loss:huber"
    needs_inputs = frozenset({"ref_logprobs"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"delta": 0.1}, {"position_weights": {}})

    delta: PositiveFloat = 1.0
    """Gap, in nats, beyond which the loss grows linearly."""


def huber(inputs: LossInputs, config: HuberConfig) -> LossOutputs:
    mask = inputs.loss_mask
    # Mask the inputs first: NaN at a masked position would reach the gradient otherwise.
    student = torch.where(mask, inputs.own_logprobs, 0.0)  # at temperature 1, as the teacher's
    teacher = torch.where(mask, inputs.ref_logprobs.detach(), 0.0)
    gap = student - teacher
    size = gap.abs()
    linear = config.delta * (size - config.delta / 2)
    per_token = torch.where(size <= config.delta, gap**2 / 2, linear)
    if inputs.loss_weights is not None:
        per_token = per_token * torch.where(mask, inputs.loss_weights, 1.0)
    with torch.no_grad():
        tokens = mask.sum().clamp(min=1)
        metrics = {"gap": size.sum() / tokens, "linear": (size > config.delta).sum() / tokens}
    return LossOutputs(loss=per_token.sum(), metrics=metrics)
