"""Soft clamp: a few tokens far from the teacher do not decide a step."""

import dataclasses

import torch
from jaxtyping import Bool, Float
from pydantic import PositiveFloat
from torch import Tensor

from prime_composer.contract import LossInputs, given
from prime_composer.divergences import reverse_kl, upcast
from prime_composer.full_vocabulary import on_support
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.modifiers import Modifier


class SoftClamp(Modifier):
    """Weight the tokens whose divergence D from the teacher is above a limit c.

        w_t = min(1, c / D_t)

    w is a constant to the gradient. So with a loss that is D itself (``topk_reverse_kl`` with the
    tail, or the whole vocabulary), the gradient of a token is

        w_t grad D_t = grad f(D_t),    f(D) = D             up to c
                                              c (1 + ln(D / c))    above

    No token contributes more than c to the loss, and none loses its gradient, as it would if D
    were cut at c.

    D is the reverse KL on the loss's support and a tail, at temperature 1, in nats. For a loss
    without a support it is |log q - log p| at the sampled token.

    A soft clamp of extreme divergences per token is an idea of https://arxiv.org/abs/2607.07050
    (2026). This function f, linear and then logarithmic, is not taken from there.
    """

    limit: PositiveFloat = 5.0
    """c, in nats."""

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the inputs with ``loss_weights`` times w, and metrics of what was clamped.

        ``clamp/tokens`` is the share of the mask's tokens above the limit, ``clamp/divergence`` the
        mean of D, and ``clamp/removed`` what the weights take away of it, both in nats per token.
        """
        mask = inputs.loss_mask
        with torch.no_grad():
            distance = _divergence(inputs, mask)
            weights = self.limit / distance.clamp(min=self.limit)
            metrics = {
                "clamp/tokens": token_mean(distance > self.limit, mask),
                "clamp/divergence": token_mean(distance, mask),
                "clamp/removed": token_mean(distance * (1 - weights), mask),
            }
            if inputs.loss_weights is not None:
                weights = weights * inputs.loss_weights
        return dataclasses.replace(inputs, loss_weights=weights), metrics


def _divergence(inputs: LossInputs, mask: Bool[Tensor, " seq"]) -> Float[Tensor, " seq"]:
    """Return D per token, 0 outside the mask."""
    if inputs.support is not None:
        return on_support(inputs.support.masked(mask), reverse_kl, "tail")
    gap = upcast(given(inputs.ref_logprobs)) - upcast(inputs.trainer_logprobs)
    return torch.where(mask, gap, 0.0).abs()
