"""Soft clamp: a few tokens far from the teacher do not decide a step."""

import dataclasses
from collections.abc import Callable

import torch
from pydantic import PositiveFloat
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import upcast
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.tables import Table


class SoftClamp(Table):
    """Weight the tokens whose own value D of the loss is above a limit c in size.

        w_t = min(1, c / |D_t|)

    w is a constant to the gradient, so that the gradient of a token is

        w_t grad D_t = grad f(D_t),    f(D) = D             up to c
                                              c (1 + ln(D / c))    above

    No token contributes more than c to the loss, and none loses its gradient, as it would if D
    were cut at c. D is the token's value before ``loss_weights``, as the loss has it: of a policy
    gradient it is the signal times the importance ratio.

    A soft clamp of extreme divergences per token is an idea of https://arxiv.org/abs/2607.07050
    (2026). This function f, linear and then logarithmic, is not taken from there.
    """

    limit: PositiveFloat = 5.0
    """c, in nats."""

    def bounded(
        self, loss_fn: Callable[[LossInputs], LossOutputs], inputs: LossInputs, section: str
    ) -> tuple[LossOutputs, dict[str, Tensor]]:
        """Return a loss with each token's value times w, and metrics of what was clamped.

        A loss is linear in ``loss_weights``, so that its derivative by a weight is the token's D.
        ``clamp/tokens`` is the share of the mask's tokens above the limit, ``clamp/divergence`` the
        mean of |D|, and ``clamp/removed`` what the weights take away of it, both in nats per token.
        """
        like = upcast(inputs.trainer_logprobs.detach())
        weights = torch.ones_like(like) if inputs.loss_weights is None else inputs.loss_weights
        weights = weights.detach().clone().requires_grad_()
        with torch.enable_grad():
            outputs = loss_fn(dataclasses.replace(inputs, loss_weights=weights))
            found = None
            if outputs.loss.requires_grad:
                (found,) = torch.autograd.grad(
                    outputs.loss, weights, create_graph=True, allow_unused=True
                )
        if found is None:
            raise ValueError(
                f"[{section}.clamp]: the loss does not multiply its tokens by loss_weights, so "
                "that no token's value can be bounded: leave the table out."
            )
        values = torch.where(inputs.loss_mask, found, 0.0)
        with torch.no_grad():
            size = values.abs()
            factors = self.limit / size.clamp(min=self.limit)
            metrics: dict[str, Tensor] = {
                "clamp/tokens": token_mean(size > self.limit, inputs.loss_mask),
                "clamp/divergence": token_mean(size, inputs.loss_mask),
                "clamp/removed": token_mean(size * (1 - factors), inputs.loss_mask),
            }
            factors = factors * torch.where(inputs.loss_mask, weights, 1.0)
        loss = (factors * values).sum()
        return LossOutputs(loss, outputs.metrics), metrics
