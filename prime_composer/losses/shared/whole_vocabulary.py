"""Student and teacher over the whole vocabulary, for losses with k = "full"."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.contract import LossInputs, given
from prime_composer.losses.config import SupportLossConfig, TopKLossConfig
from prime_composer.two_heads import Terms, TwoHeads, compare


def whole_vocabulary(
    inputs: LossInputs, config: TopKLossConfig, mask: Bool[Tensor, " seq"] | None = None
) -> TwoHeads:
    """Return both heads with the rows of the mask, at the config's temperature.

    Args:
        inputs: the loss's inputs.
        config: its ``temperature`` is read, if it has one.
        mask: True at the tokens that count; the inputs' ``loss_mask`` if None.
    """
    heads = given(inputs.hidden_states).masked(inputs.loss_mask if mask is None else mask)
    if isinstance(config, SupportLossConfig):
        heads = dataclasses.replace(heads, temperature=heads.temperature * config.temperature)
    return heads


def sum_over_vocabulary(
    heads: TwoHeads, function: Callable[..., Tensor], *parameters: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the sum over the vocabulary of ``function``'s terms, per row (see ``Terms``)."""
    return given(compare(heads, divergence=Terms(function), parameters=parameters).divergence)


def separable(
    heads: TwoHeads, divergence: Callable[..., Tensor], **knobs: Any
) -> Float[Tensor, " n"]:
    """Return a function of ``prime_composer.divergences`` over the whole vocabulary, per row.

    It has to be a sum of one term per token. A knob is a constant, or a tensor with one number per
    row, [n].
    """
    per_row = {name: knob for name, knob in knobs.items() if isinstance(knob, Tensor)}

    def terms(log_p: Tensor, log_q: Tensor, *values: Tensor) -> Tensor:
        return divergence(
            log_p.unsqueeze(-1),
            log_q.unsqueeze(-1),
            normalization="full",
            **{**knobs, **dict(zip(per_row, values, strict=True))},
        )

    return sum_over_vocabulary(heads, terms, *per_row.values())
