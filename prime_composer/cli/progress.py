"""The live progress of a run, on a terminal; plain lines where there is none."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_EVERY = 10
"""Steps between two lines where the output is no terminal."""


class Screen:
    """A progress bar with step, loss, reverse KL, accuracy and tokens per second.

    Args:
        total: steps of the run.
        done: steps that are already behind a resumed run.
    """

    def __init__(self, total: int, done: int = 0):
        self.console = Console()
        self.total = total
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),  # the numbers beside it need most of 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=True,
        )
        self._done = done
        self._task: Any = None

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self._progress.stop()

    def status(self, text: str) -> None:
        """What the run is doing before its first step."""
        self._finish_task()
        self._print(text)

    def preparing(self, role: str) -> Callable[[int, int, float], None]:
        """A callback that shows the supervised fine-tuning of a small model."""
        self.status(f"preparing the {role} (once; it is cached)")
        self._start_task(f"{role} SFT", total=1)

        def progress(done: int, steps: int, loss: float) -> None:
            if self._task is None:  # a pruned copy of a model that was just trained or found
                return
            self._progress.update(
                self._task, completed=done, total=steps, numbers=f"loss {loss:.3f}"
            )
            if not self.console.is_terminal and done == steps:
                self._print(f"{role}: {steps} steps of SFT, loss {loss:.3f}")
            if done == steps:
                self._finish_task()

        return progress

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step; what was measured last stays on screen until it is measured again."""
        self._latest |= metrics
        numbers = describe(self._latest)
        if self._task is None:
            self._start_task("step", total=self.total)
        self._progress.update(self._task, completed=step, numbers=numbers)
        if not self.console.is_terminal and (step % LINE_EVERY == 0 or "eval/accuracy" in metrics):
            self._print(f"step {step}/{self.total}  {numbers}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _start_task(self, name: str, total: int) -> None:
        self._finish_task()
        self._task = self._progress.add_task(name, total=total, completed=self._done, numbers="")

    def _finish_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def describe(metrics: dict[str, float]) -> str:
    """The numbers of a step in one line."""
    parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else ["no rollout had a teacher"]
    if "eval/reverse_kl" in metrics:
        parts.append(f"reverse KL {metrics['eval/reverse_kl']:.3f}")
    if "eval/accuracy" in metrics:
        parts.append(f"accuracy {metrics['eval/accuracy']:.1%}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    return "  ".join(parts)
