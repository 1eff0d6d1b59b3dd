"""Print to whatever is there: an ASCII log, a closed pipe, a terminal that is gone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Output:
    """A text stream whose errors end nothing: what cannot be written is lost."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, unless the stream is gone."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush, unless the stream is gone."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Send the rest to nowhere: Python would otherwise try it again at its exit."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_output() -> Iterator[None]:
    """Within the block, a command survives the loss of its output and letters that it lacks."""
    before = sys.stdout, sys.stderr
    streams: tuple[Any, Any] = sys.stdout, sys.stderr
    for stream in streams:
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    try:
        yield
    finally:
        for output in (sys.stdout, sys.stderr):
            output.flush()
        sys.stdout, sys.stderr = before
