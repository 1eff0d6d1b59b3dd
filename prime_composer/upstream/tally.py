"""Count what each hook is meant to see and how often it runs, and judge the ones that never ran.

prime-rl runs what we put in the place of its own functions because it looks them up by name. Where
it stops doing so nothing fails: its own code runs, and the run trains something else. So each unit
of work has a ``Tally``, a batch of the trainer or an episode of the orchestrator. ``judge`` ends
the process if a hook had work in this unit and did not run.

This module uses the standard library alone.
"""

from collections import Counter

DOCTOR = "`prime-composer doctor` says what differs, and what works with it."  # The remedy


class SilentHook(RuntimeError):
    """prime-rl went past a hook of ours that had work."""


class Tally:
    """The work and the calls of hooks in one unit of work."""

    def __init__(self, whole: "Tally | None" = None):
        self.meant: Counter[str] = Counter()  # how much work was meant for each hook
        self.calls: Counter[str] = Counter()  # how often each hook ran
        self._whole = whole
        self._sentences: dict[str, str] = {}

    def expect(self, hook: str, work: int, sentence: str) -> None:
        """Note work that is meant for a hook."""
        self.meant[hook] += work
        self._sentences[hook] = sentence

    def called(self, hook: str) -> None:
        """Note that a hook ran."""
        self.calls[hook] += 1
        if self._whole is not None:
            self._whole.called(hook)

    def judge(self) -> None:
        """Check that every hook with work has run."""
        for hook, work in self.meant.items():
            if work and not self.calls[hook]:
                ran = ", ".join(f"{name} {times}x" for name, times in sorted(self.calls.items()))
                raise SilentHook(
                    f"prime_composer: {self._sentences[hook]} Hooks that ran on it: "
                    f"{ran or 'none'}."
                )
