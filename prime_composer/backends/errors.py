"""What is raised where a server or the system cannot be used, and what installs a backend."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from prime_composer.extras import pip_install, requirement


def how_to_install() -> str:
    """Return the pip lines of the one-machine engine and its vLLM."""
    return f"{pip_install('local')} on a CPU machine, {requirement('gpu')} on a GPU machine"


class ServerError(ValueError):
    """The server at ``url`` (without credentials) cannot be used; the message names the remedy."""

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        section: str | None = None,
        key: str | None = None,
    ):
        super().__init__(message)
        self.url = url
        self.section = section
        self.key = key


@dataclass(eq=False)
class RequestRefused(Exception):
    """The server answered with an error that another try does not change."""

    status: int
    reason: str


class BackendFailed(ValueError):
    """A backend's library failed in a way of its own. The cause is its error."""


def is_invalid(error: BaseException) -> TypeGuard[Any]:
    """Return whether pydantic refused values, such as vLLM's settings. It need not be imported."""
    return hasattr(error, "errors") and type(error).__name__ == "ValidationError"


def own_words(error: BaseException) -> str:
    """Return the first line of an error's message, for a sentence; its class where it has none."""
    if is_invalid(error):  # whose first line is a count
        error = ValueError("; ".join(one["msg"] for one in error.errors()))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[0].split()).rstrip(".")[:300]


@contextmanager
def library_errors(table: str, library: str, work: str) -> Iterator[None]:
    """Within the block, turn a library's own errors into ``BackendFailed``, naming ``table``."""
    try:
        yield
    except (OSError, ImportError, MemoryError, RequestRefused, NotWanted):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and not is_invalid(error):
            raise
        raise BackendFailed(
            f"{table} {library} could not {work} ({type(error).__name__}: {own_words(error)}): it "
            "may not support this architecture here; choose another backend or model"
        ) from error


class NotWanted(Exception):
    """What this thread waits for is not wanted any more."""


_unwanted: ContextVar[threading.Event | None] = ContextVar("unwanted", default=None)


@contextmanager
def wanted_until(unwanted: threading.Event) -> Iterator[None]:
    """Within the block, let ``check_wanted`` raise in this thread once the event is set."""
    token = _unwanted.set(unwanted)
    try:
        yield
    finally:
        _unwanted.reset(token)


def check_wanted() -> None:
    """Raise ``NotWanted`` where another thread has given up what this one works at."""
    unwanted = _unwanted.get()
    if unwanted is not None and unwanted.is_set():
        raise NotWanted


def os_error(error: BaseException) -> OSError | None:
    """Return the ``OSError`` that an error is, or that torch or safetensors wrapped; else None."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, ValueError):  # ours, which may quote such a message
        return None
    if match := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(match[1])
        return OSError(number, os.strerror(number))
    if "inline_container" in str(error) and isinstance(error.__context__, OSError):
        return error.__context__
    return None


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Within the block, let the system's errors name this file; those of open files name none."""
    try:
        yield
    except Exception as error:
        refused = os_error(error)
        if refused is None:
            raise
        if refused.filename is None:
            refused.filename = os.fspath(path)
        if refused is error:
            raise
        raise refused from error
