"""Ask Math-Verify in a process of its own, which is killed where an answer takes too long."""

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prime_composer.extras import pip_install

WORKER = Path(__file__).with_name("math_verify_worker.py")
START_SECONDS = 120.0  # To import the library, which takes half a second on a quiet machine

SECONDS_PER_ANSWER = 2.0  # CPU time for one answer. Nearly all take a few milliseconds.

SECONDS_WHEN_SPENT = 0.5  # CPU time for one answer when the budget is spent

WALL_SECONDS = 30.0  # Time for one answer on the clock, for a worker that gets no CPU time at all

GRACE_SECONDS = 5.0  # Time after that until the worker is killed from here


@dataclass
class TimeBudget:
    """The CPU time that answers without a verdict may cost together, for example in a step.

    A busy machine changes no verdict, because no clock is read.
    """

    seconds: float = 10.0  # once spent, an answer gets ``SECONDS_WHEN_SPENT``
    spent: float = 0.0  # the limits of the answers without a verdict so far
    timeouts: int = 0  # answers without a verdict

    @property
    def per_answer(self) -> float:
        """CPU seconds that the next answer may take."""
        return SECONDS_PER_ANSWER if self.spent < self.seconds else SECONDS_WHEN_SPENT


class MathVerifier:
    """Math-Verify, from any thread, in a process that is started at the first answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def verify(self, reference: str, text: str, budget: TimeBudget) -> bool:
        """Return whether an answer equals the reference. Without a verdict in time it does not."""
        with self._lock:
            limit = budget.per_answer
            verdict = self._ask(reference, text, limit)
            if verdict is None:
                budget.timeouts += 1
                budget.spent += limit
        return bool(verdict)

    def close(self) -> None:
        """End the process. The next answer starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has died on its own
            pass
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
        process.wait()

    def forget(self) -> None:
        """Leave the process to the parent, in a process that was forked."""
        self.__init__()  # type: ignore[misc]

    def _ask(self, reference: str, text: str, seconds: float) -> bool | None:
        process = self._started()
        assert process.stdin is not None
        try:
            question = json.dumps([reference, text, seconds, WALL_SECONDS])
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process, WALL_SECONDS + GRACE_SECONDS)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self.close()
            return None
        return json.loads(line)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        remedy = pip_install("metrics")
        if find_spec("math_verify") is None:
            raise ValueError(f'[data] metric = "math_verify" needs Math-Verify: {remedy}')
        # -P: the folder of the file has modules named like other people's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        answer = _read_line(self._process, START_SECONDS)
        if answer != b'"ready"\n':
            reason = answer.decode().strip() or "it gave no sign of life"
            self.close()
            raise ValueError(
                f'[data] metric = "math_verify": Math-Verify does not start ({reason}); '
                f"install it again: {remedy}"
            )
        return self._process


def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """Return a line of the process, or what there is of it when it ends or the time is over."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                break
            line += piece
    return line


VERIFIER = MathVerifier()  # The one of this process

atexit.register(VERIFIER.close)
os.register_at_fork(after_in_child=VERIFIER.forget)
