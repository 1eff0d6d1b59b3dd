"""What a loss may compute beside its sum: credit of a group, and a state from step to step."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class GroupCredit(Protocol):
    """Credit of each token of a group's rollouts, from the log-probs of all of them.

    A loss reads it in ``LossInputs.credit``. A micro-batch does not contain whole groups, so that
    no loss function can compute it. Two of them with the same knobs are equal.
    """

    def __call__(
        self, ref_logprobs: Sequence[Tensor], inference_logprobs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the credit of each rollout's trained tokens, from their log q and log mu."""


@runtime_checkable
class LossState(Protocol):
    """State that a loss reads in each step, advanced once per optimizer step and checkpointed."""

    def end_step(self, mean_loss: float) -> None:
        """Advance by the step's loss per token."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
