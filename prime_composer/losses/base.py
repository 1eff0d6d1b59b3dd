"""What every loss shares: its config, and the bound loss that a trainer calls."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from prime_composer.contract import LossInputs, LossOutputs

Need = Literal["ref_logprobs", "support", "advantages", "token_ids"]
"""Inputs that a trainer has to provide beyond trainer_logprobs, inference_logprobs and loss_mask."""


class LossConfig(BaseModel):
    """Knobs of one loss. A subclass adds ``type: Literal["<name>"]`` and its fields, and says what it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs_inputs: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that this configuration of the loss cannot do without (``Need``)."""
        return self.needs_inputs

    @property
    def support_size(self) -> int | Literal["full"]:
        """K, the number of teacher token ids per position that the scorer has to bring; 0 for none."""
        return getattr(self, "k", 0) if "support" in self.needs else 0

    def make_state(self) -> "LossState | None":
        """State that lives across optimiser steps (a schedule), or None."""
        return None


class LossState(Protocol):
    """State of a loss across optimiser steps: read by the loss, advanced once per step, saved in checkpoints."""

    def end_step(self, mean_loss: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loss:
    """A loss function bound to its config and state: what a trainer calls with ``LossInputs``.

    Args:
        config: the loss's knobs.
        fn: ``fn(inputs, config)``, or ``fn(inputs, config, state)`` where the config makes a state.
        section: where the config stands in the recipe, for error messages.
    """

    def __init__(self, config: LossConfig, fn: Callable[..., LossOutputs], section: str = "loss"):
        self.config = config
        self.section = section
        self.state = config.make_state()
        self._fn = fn

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The SUM of the loss over the mask, and its metrics.

        Raises:
            ValueError: an input that the loss needs is missing.
        """
        for need in sorted(self.config.needs):
            if getattr(inputs, need) is None:
                raise ValueError(
                    f"[{self.section}] type = {self.config.type!r} needs {need}, and the trainer gave none. {REMEDIES[need]}"
                )
        if self.state is None:
            return self._fn(inputs, self.config)
        return self._fn(inputs, self.config, self.state)

    def end_step(self, mean_loss: float) -> None:
        """Advance the state, once per optimiser step, with the step's loss per token (global over micro-batches)."""
        if self.state is not None:
            self.state.end_step(mean_loss)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.state is not None:
            self.state.load_state_dict(state)


REMEDIES = {
    "ref_logprobs": "Configure a [teacher] that scores the student's tokens.",
    "support": "Configure a [teacher]: its scorer returns the top-K support of each position.",
    "advantages": "Configure rewards: [rollout] group_size of at least 2 and a dataset with answers.",
    "token_ids": "Pass LossInputs.token_ids.",
}
