"""What every loss shares: its config, and the bound loss that a trainer calls."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, PositiveInt

from prime_composer.contract import LossInputs, LossOutputs, Support
from prime_composer.modifiers import SpecialTokenMask

Need = Literal["ref_logprobs", "support", "advantages", "token_ids"]
"""Inputs that a trainer has to provide beyond trainer_logprobs, inference_logprobs and loss_mask."""

SupportSize = PositiveInt | Literal["full"]
"""K, the number of token ids per position; "full" is the whole vocabulary."""


class LossConfig(BaseModel):
    """Knobs of one loss. A subclass adds ``type: Literal["<name>"]`` and its fields, and says what it needs.

    The fields here are modifiers: they work with every loss.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    needs_inputs: ClassVar[frozenset[str]] = frozenset()

    special_tokens: SpecialTokenMask | None = None
    """Takes the tokens of a chat template out of the loss."""

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that this configuration of the loss cannot do without (``Need``)."""
        return self.needs_inputs | self.modifier_needs

    @property
    def modifier_needs(self) -> frozenset[str]:
        return frozenset({"token_ids"} if self.special_tokens else ())

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

    def require(self, available: Iterable[str]) -> None:
        """Raise ValueError unless all that the loss needs is among ``available``: the check at load, by recipe key."""
        for need in sorted(self.config.needs - set(available)):
            raise ValueError(
                f"[{self.section}] type = {self.config.type!r} needs {need}, and the trainer gave none. {REMEDIES[need]}"
            )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The SUM of the loss over the mask, and its metrics.

        Raises:
            ValueError: an input that the loss needs is missing, or advantages carry a graph.
        """
        self.require(need for need in self.config.needs if getattr(inputs, need) is not None)
        if inputs.advantages is not None and inputs.advantages.requires_grad:
            raise ValueError(
                f"[{self.section}] got advantages that carry a gradient. A divergence used as an advantage does not depend "
                "on the sampled token: its expected policy gradient is 0. Use it as a loss of its own, or detach a reward."
            )
        inputs = dataclasses.replace(inputs, support=self._first_k(inputs.support))
        metrics = {}
        if self.config.special_tokens is not None:
            inputs, metrics = self.config.special_tokens.apply(inputs)
        outputs = self._fn(inputs, self.config) if self.state is None else self._fn(inputs, self.config, self.state)
        return LossOutputs(loss=outputs.loss, metrics=outputs.metrics | metrics)

    def _first_k(self, support: Support | None) -> Support | None:
        """The K ids that this loss asked for, where another channel asked for more: most probable first."""
        k = self.config.support_size
        if support is None or k in (0, "full") or support.token_ids.shape[-1] <= k:
            return support
        return Support(support.token_ids[:, :k], support.teacher_logprobs[:, :k], support.student_logprobs[:, :k])

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


def check_normalization(k: SupportSize, normalization: str, allow_biased: bool = False) -> None:
    """Refuse, when a recipe is read, a normalisation that K does not allow (``divergences`` refuses the same in a call)."""
    if normalization == "full" and k != "full":
        raise ValueError(
            f"normalization = 'full' is the whole vocabulary, and k = {k}: set k = 'full', or normalization = 'tail'."
        )
    if normalization == "renorm" and k == 1:
        raise ValueError("normalization = 'renorm' with k = 1 is identically 0. Use normalization = 'tail', or k of at least 2.")
    if normalization == "raw" and not allow_biased:
        raise ValueError(
            "normalization = 'raw' is biased: its gradient does not vanish at p = q and its value can be negative. "
            "Use 'tail' or 'generalized', or set allow_biased = true."
        )
