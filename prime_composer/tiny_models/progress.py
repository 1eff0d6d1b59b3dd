"""Report the progress of fine-tuning."""

from collections.abc import Callable

Progress = Callable[[int, int, float], None]
"""Called after every step of fine-tuning with the steps done, the total steps, and the loss."""
