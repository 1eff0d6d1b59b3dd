"""Hold a folder for files on their way, which a later process removes if its owner was killed."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of a file system without locks."""


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder with a random name, and remove it when the block ends.

    What killed processes left beside it is removed first. The kernel's lock on a folder, which ends
    with its process, says whose folder is in use. ``parent`` None: the system's temporary
    directory.
    """
    remove_left(prefix, parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # taken for a left one before it was locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            lock(descriptor, wait=True)
            if folder.exists():
                break
            os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_left(prefix: str, parent: Path | None = None) -> None:
    """Remove the scratch folders whose processes are gone. What cannot be removed stays."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if lock(descriptor, wait=False):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def lock(descriptor: int, wait: bool) -> bool:
    """Return whether the open folder is now ours; False where another process has it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (*NO_LOCKS, errno.EWOULDBLOCK):
            raise
        return False
    return True
