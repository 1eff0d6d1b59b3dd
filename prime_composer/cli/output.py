"""Print to whatever is there: an ASCII log, a closed pipe, a terminal that is gone."""

import codecs
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prime_composer.local.disk import describe_error

IN_ASCII = {"–": "-", "→": "->", "…": "...", "×": "x", "≥": ">="}
"""What is printed for our own signs where the output cannot show them."""

_ERRORS = "prime_composer"


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return what is printed for letters that the output's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = (
        IN_ASCII.get(letter) or letter.encode("ascii", "backslashreplace").decode()
        for letter in letters
    )
    return "".join(plain), error.end


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
    codecs.register_error(_ERRORS, _substitute)
    before = sys.stdout, sys.stderr, threading.excepthook

    def in_one_line(thread: Any) -> None:
        if isinstance(thread.exc_value, OSError) and not sys.flags.dev_mode:
            print(f"warning: a background thread ended: {describe_error(thread.exc_value)}")
        else:
            traceback.print_exception(thread.exc_value)

    streams: tuple[Any, Any] = sys.stdout, sys.stderr
    for stream in streams:
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors=_ERRORS)
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    threading.excepthook = in_one_line
    try:
        yield
    finally:
        for output in (sys.stdout, sys.stderr):
            output.flush()
        sys.stdout, sys.stderr, threading.excepthook = before
