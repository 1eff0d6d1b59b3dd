"""Hold a run directory, so that no second process trains in it."""

import errno
import os
import socket
import time
from pathlib import Path

LOCK_FILE = ".lock"
"""In every run directory: host and process of the run that is or was the last one there."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)

TRIES = 10
TRY_SECONDS = 0.02


class InUse(ValueError):
    """Another process holds the run directory. The message names it."""


class RunLock:
    """A kernel lock on a run directory, which ends with its process however that dies.

    Args:
        run_dir: an existing directory.

    Raises:
        InUse: another process holds it.
    """

    def __init__(self, run_dir: Path):
        path = run_dir / LOCK_FILE
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            tries = 1
            while not _lock(self._descriptor):
                # A process that only looks has it for a moment.
                if tries == TRIES:
                    raise InUse(_message(run_dir, self._descriptor))
                tries += 1
                time.sleep(TRY_SECONDS)
            if not _is(path, self._descriptor):
                raise InUse(_message(run_dir, self._descriptor))
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Give the directory back."""
        os.close(self._descriptor)


def check_free(run_dir: Path) -> None:
    """Check that no process holds a run directory. Write nothing.

    Raises:
        InUse: one does.
    """
    import fcntl

    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # Shared: two that look at the same moment do not take each other for the holder.
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise InUse(_message(run_dir, descriptor))
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int | None = None) -> bool:
    """Return whether the file is now ours, or of a file system that knows no such locks.

    Args:
        descriptor: the open lock file.
        how: ``fcntl.LOCK_SH``, or None and ``fcntl.LOCK_EX``: for us alone.
    """
    import fcntl

    try:
        fcntl.flock(descriptor, (how or fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Return whether the open file still has its name: its owner may just have deleted it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _message(run_dir: Path, descriptor: int) -> str:
    words: list[str] = []
    for _ in range(TRIES):  # the holder writes its name a moment after it has the lock
        words = os.pread(descriptor, 1000, 0).decode(errors="replace").split()
        if len(words) == 2:
            break
        time.sleep(TRY_SECONDS)
    holder = "another process"
    if len(words) == 2:
        holder = f"process {words[1]} on {words[0]}"
    return (
        f"{run_dir} is in use by {holder}; wait for that run, stop it, or name another --output-dir"
    )
