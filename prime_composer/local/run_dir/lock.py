"""Hold a run directory, so that no second process trains in it."""

import errno
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from prime_composer.backends.errors import naming

LOCK_FILE = ".lock"
HOLDER_FILE = ".holder"  # Host and process of the run that is or was the last one here

WAIT_SECONDS = 0.2  # ``check_free`` may hold the lock briefly

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)


class InUse(ValueError):
    """Another process holds the run directory. The message names it."""


class RunLock:
    """A kernel lock on a run directory, which ends with its process however that dies."""

    def __init__(self, run_dir: Path):
        self._lock = _acquired(run_dir)
        # Beside the lock: over NFS, closing the lock file a second time would release it.
        holder = run_dir / HOLDER_FILE
        try:
            with naming(holder):
                holder.write_text(f"{socket.gethostname()} {os.getpid()}\n", encoding="utf-8")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the directory back."""
        self._lock.release()


def check_free(run_dir: Path) -> None:
    """Check that no process holds a run directory. Write nothing."""
    if os.access(run_dir / LOCK_FILE, os.W_OK):
        _acquired(run_dir).release()


def _acquired(run_dir: Path) -> FileLock:
    """Return the lock of a directory, which is free on a file system that knows no locks."""
    lock = FileLock(run_dir / LOCK_FILE, timeout=WAIT_SECONDS, thread_local=False)
    try:
        lock.acquire(poll_interval=WAIT_SECONDS / 10)
    except (Timeout, FileNotFoundError):  # its owner may just have deleted the directory
        raise InUse(
            f"{run_dir} is in use by {_holder(run_dir)}; wait for that run, stop it, or name "
            "another --output-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return lock


def _holder(run_dir: Path) -> str:
    try:
        host, process = (run_dir / HOLDER_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "another process"
    return f"process {process} on {host}"
