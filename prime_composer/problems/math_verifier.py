"""Ask Math-Verify in a process of its own, which ends where an answer takes too long."""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from prime_composer.extras import pip_install

WORKER = Path(__file__).with_name("math_verify_worker.py")
START_SECONDS = 120.0  # to import the library, which takes half a second on a quiet machine
SECONDS_PER_ANSWER = 2.0  # of CPU time; nearly all take a few milliseconds
SECONDS_WHEN_SPENT = 0.5  # the same when the budget is spent
WALL_SECONDS = 30.0  # on the clock, for a worker that gets no CPU time at all
GRACE_SECONDS = 5.0  # after that until the worker is killed from here


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
            if self._process is None or self._process.poll() is not None:
                self._start()
            question = json.dumps([reference, text, limit, WALL_SECONDS])
            line = self._ask(question.encode() + b"\n", WALL_SECONDS + GRACE_SECONDS)
            is_whole = line.endswith(b"\n")
            if not is_whole:
                self.close()
            verdict = json.loads(line) if is_whole else None
            if verdict is None:
                budget.timeouts += 1
                budget.spent += limit
        return bool(verdict)

    def close(self) -> None:
        """End the process. The next answer starts another one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has died on its own
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def forget(self) -> None:
        """Leave the process to the parent, in a process that was forked."""
        self.__init__()  # type: ignore[misc]

    def _start(self) -> None:
        self.close()
        remedy = pip_install("metrics")
        # -P: the folder of the file has modules named like other people's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        answer = self._ask(b"", START_SECONDS)
        if answer != b'"ready"\n':
            reason = answer.decode().strip() or "it gave no sign of life"
            self.close()
            raise ValueError(
                f'[data] metric = "math_verify": Math-Verify does not start ({reason}); '
                f"install it again: {remedy}"
            )

    def _ask(self, question: bytes, seconds: float) -> bytes:
        """Return the worker's line, empty or cut where it has ended or the time is over."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(question)
            stdin.flush()
            if select.select([stdout], [], [], seconds)[0]:
                return stdout.readline()  # the worker writes whole lines
        return b""


VERIFIER = MathVerifier()  # the one of this process

atexit.register(VERIFIER.close)
os.register_at_fork(after_in_child=VERIFIER.forget)
