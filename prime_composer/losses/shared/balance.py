"""Balance: whose tokens a step counts how much, where sequences or environments are unequal."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from prime_composer.contract import LossInputs, given
from prime_composer.losses.shared.modifiers import Modifier


class Balance(Modifier):
    """Weight sequences, so that long answers or large environments do not decide a step alone.

    The loss of a step is its sum over N tokens, divided by N. A sequence s of environment e has n_s
    of these tokens, and its environment N_e. With the weights v of ``weights`` (1 by default), each
    token of the sequence counts

        w_s = u_s N / sum_r u_r n_r,    u_s = v_e          by = "token"
                                        u_s = v_e / n_s    by = "sequence"
                                        u_s = v_e / N_e    by = "environment"

    The weights of a step's tokens add up to N. So by = "sequence" is the mean over sequences of
    their means, and by = "environment" that over the environments that have tokens in the step.

    "Open-MOPD" (2026), https://arxiv.org/abs/2608.19098, finds that with several teachers unequal
    token budgets lose more than conflicting gradients do.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"balance"})

    by: Literal["token", "sequence", "environment"] = "environment"
    """What counts alike: each token, each sequence, or each environment that is in the step."""

    weights: dict[str, PositiveFloat] = {}
    """Factors of environments, by name. 1 where none is named."""

    def of_sequences(self, tokens: Sequence[int], environments: Sequence[str]) -> list[float]:
        """Return w of each sequence of a step, by its trained tokens; 0 for one without a token."""
        totals = dict.fromkeys(environments, 0)
        for count, name in zip(tokens, environments, strict=True):
            totals[name] += count
        raw = [
            self.weights.get(name, 1.0) / self._divisor(count, totals[name]) if count else 0.0
            for count, name in zip(tokens, environments, strict=True)
        ]
        total = sum(weight * count for weight, count in zip(raw, tokens, strict=True))
        return [weight * sum(tokens) / total if total else 0.0 for weight in raw]

    def _divisor(self, of_sequence: int, of_environment: int) -> int:
        return {"token": 1, "sequence": of_sequence, "environment": of_environment}[self.by]

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        weights = given(inputs.balance)
        if inputs.loss_weights is not None:
            weights = torch.where(inputs.loss_mask, weights * inputs.loss_weights, 1.0)
        return dataclasses.replace(inputs, loss_weights=weights), {}
