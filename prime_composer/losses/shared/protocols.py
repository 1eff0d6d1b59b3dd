"""What a loss may keep from step to step."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class LossState(Protocol):
    """State that a loss reads in each step, advanced once per optimizer step and checkpointed."""

    def end_step(self, mean_loss: float) -> None:
        """Advance by the step's loss per token."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
