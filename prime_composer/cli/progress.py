"""Show the progress of a run: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from prime_composer.cli.quantities import kl_title, score_text, scores_in
from prime_composer.local.tracker import is_evaluated
from prime_composer.problems.metrics import TITLES

LINE_EVERY = 10  # Steps between two lines where the output is no terminal


class Screen:
    """Show step, loss and tokens per second in a bar, and a line for each evaluation above it."""

    def __init__(self, total: int, done: int = 0):
        # Paths and the names of sections contain brackets and colons that are no markup.
        self.console = Console(markup=False, emoji=False, highlight=False)
        self.total = total
        self._done = done
        # In a narrow terminal the numbers are cut, and the step stays.
        what_is_left = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False, table_column=what_is_left),
            console=self.console,
            transient=True,
            expand=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._progress.stop()

    def status(self, text: str) -> None:
        """Print what the run does before its first step."""
        self._finish_task()
        self._print(text)

    def preparing(self, name: str, steps: int) -> Callable[[int, int, float], None]:
        """Announce the preparation of a model, and return the callback of its SFT, if any."""
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

    def start(self, metrics: dict[str, float]) -> None:
        """Show what was measured before the first step."""
        self._finish_task()
        self._print_step(0, "  ".join(evaluation_numbers(metrics)))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step. The line of one that was evaluated stays on the terminal."""
        if self._task is None:
            self._task = self._start_task("step", self.total, self._done)
        numbers = "  ".join(training_numbers(metrics))
        self._progress.update(self._task, completed=step, numbers=numbers)
        evaluated = is_evaluated(metrics)
        if evaluated or (step % LINE_EVERY == 0 and not self.console.is_terminal):
            self._print_step(step, step_line(metrics))

    def _print_step(self, step: int, numbers: str) -> None:
        # A line of a log stays one line; a terminal would break it within a number.
        text = f"step {step}/{self.total}  {numbers}"
        self.console.print(text, soft_wrap=not self.console.is_terminal)

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


def step_line(metrics: dict[str, float]) -> str:
    """Format the numbers of a step as one line."""
    loss, *speed = training_numbers(metrics)
    return "  ".join([loss, *evaluation_numbers(metrics), *speed])


def training_numbers(metrics: dict[str, float]) -> list[str]:
    """Format what every step has: its loss and its speed."""
    loss = f"loss {metrics['loss']:.4f}" if "loss" in metrics else "no rollout had a teacher"
    return [loss, f"{metrics['tokens_per_second']:,.0f} tok/s"]


def evaluation_numbers(metrics: dict[str, float]) -> list[str]:
    """Format what was measured after a step, if anything: of the student, and of the teacher."""
    parts = []
    if "eval/reverse_kl" in metrics:
        parts.append(f"{kl_title(metrics)} {metrics['eval/reverse_kl']:.3f}")
    for name in scores_in([metrics]):
        part = f"{TITLES[name]} {score_text(name, metrics[f'eval/{name}'])}"
        if (teacher := metrics.get(f"teacher/{name}")) is not None:
            part += f" (the teacher {score_text(name, teacher)})"
        parts.append(part)
    return parts
