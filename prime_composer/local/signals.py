"""Stop on Ctrl-C, SIGTERM and SIGHUP: at once outside the steps, after the step in training."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler that takes the machine back, and a terminal that is closed."""


class Stopped(KeyboardInterrupt):
    """A signal, whose number is ``signum``, ends the command at once."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StepAbandoned(Exception):
    """A step that waits for a server is given up, because the run was asked to stop."""


@dataclass
class StopRequest:
    """Whether a signal asked the run to stop."""

    signum: int | None = None  # number of the first signal; None before it
    waiting: bool = False  # what is under way waits for a server and may be given up
    background: int | None = None  # the thread that collects batches ahead; None without one
    background_waits: bool = False  # that thread waits for a server
    _may_wait: bool = False

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Mark a part of a step that leaves no half of a change when it is given up.

        A server is not waited for there after a signal: a scheduler grants half a minute.
        """
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = self.waiting = False

    def wait_begins(self) -> None:
        """Note that a server is waited for. A signal that has come before abandons the step."""
        if threading.get_ident() == self.background:
            self.background_waits = True
            return
        self.waiting = self._may_wait
        if self.waiting and self.requested:
            raise StepAbandoned


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within the block, the first signal ends the process, as the system does it.

    An exception in the middle of torch's import aborts the process in C++.
    """
    with _handling(signal.SIG_DFL):
        yield


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Within the block, Ctrl-C, SIGTERM and SIGHUP raise ``Stopped``.

    A library that is being imported may turn it into an error of its own; the block ends with
    ``Stopped`` all the same. A second signal ends the process.
    """
    came: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        for own in SIGNALS:
            if signal.getsignal(own) is stop:
                signal.signal(own, signal.SIG_DFL)
        came.append(signum)
        raise Stopped(signum)

    with _handling(stop):
        try:
            yield
        except Exception as error:
            if came:
                raise Stopped(came[0]) from error
            raise


@contextmanager
def finishing_the_step(stop: StopRequest) -> Iterator[None]:
    """Within the block, note the first signal in ``stop``; the second one raises ``Stopped``."""

    def note(signum: int, frame: Any) -> None:
        if stop.requested:
            raise Stopped(signum)
        stop.signum = signum
        if stop.waiting:
            raise StepAbandoned

    with _handling(note):
        yield


@contextmanager
def _handling(handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Handle ``SIGNALS``, except those that whoever started the process ignores (``nohup``)."""
    previous: dict[int, Any] = {}
    try:
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                previous[signum] = signal.signal(signum, handler)
    except ValueError:  # not in the main thread: the caller keeps its own handling
        pass
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
