"""Show the progress of a run: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from prime_composer.cli.formatting import is_evaluated, kl_title, score, scores_in
from prime_composer.problems.metrics import TITLES

LINE_EVERY = 10
"""Steps between two lines where the output is no terminal."""


class Screen:
    """Show step, loss, reverse KL, accuracy and tokens per second.

    Args:
        total: steps of the run.
        done: steps that a resumed run has behind it.
    """

    def __init__(self, total: int, done: int = 0):
        # Paths and the names of sections contain brackets and colons that are no markup.
        self.console = Console(markup=False, emoji=False, highlight=False)
        self.total = total
        self._done = done
        self._metrics: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),  # the numbers beside it need most of 80 columns
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._progress.stop()

    def status(self, text: str) -> None:
        """Print what the run does before its first step."""
        self._finish_task()
        self._print(text)

    def preparing(self, name: str, steps: int) -> Callable[[int, int, float], None]:
        """Announce the preparation of a model, and return the callback of its SFT.

        Args:
            name: the model as a person reads it, for example ``student`` or ``teacher math``.
            steps: steps of its SFT; 0 for one that is not trained.
        """
        self.status(f"preparing the {name} (once; it is cached)")
        task = self._start_task(f"{name} SFT", steps) if steps else None

        def progress(done: int, steps: int, loss: float) -> None:
            # A pruned copy of a model reports the end of a training that is over.
            if task is None or self._task != task:
                return
            self._progress.update(task, completed=done, numbers=f"loss {loss:.3f}")
            if done == steps:
                if not self.console.is_terminal:
                    self._print(f"{name}: {steps} steps of SFT, loss {loss:.3f}")
                self._finish_task()

        return progress

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step, with the latest value of each metric."""
        self._metrics |= metrics
        numbers = describe(self._metrics)
        if self._task is None:
            self._task = self._start_task("step", self.total, self._done)
        self._progress.update(self._task, completed=step, numbers=numbers)
        if not self.console.is_terminal and (step % LINE_EVERY == 0 or is_evaluated(metrics)):
            self._print(f"step {step}/{self.total}  {numbers}")

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _start_task(self, name: str, total: int, done: int = 0) -> TaskID:
        self._finish_task()
        self._task = self._progress.add_task(name, total=total, completed=done, numbers="")
        return self._task

    def _finish_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def describe(metrics: dict[str, float]) -> str:
    """Format the numbers of a step as one line."""
    parts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else ["no rollout had a teacher"]
    if "eval/reverse_kl" in metrics:
        parts.append(f"{kl_title(metrics)} {metrics['eval/reverse_kl']:.3f}")
    for name in scores_in([metrics]):
        parts.append(f"{TITLES[name]} {score(name, metrics[f'eval/{name}'])}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    return "  ".join(parts)
