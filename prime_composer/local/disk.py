"""Write a file whole, say what the operating system refused, and whether a disk has room."""

import errno
import os
import shutil
from pathlib import Path

from prime_composer.backends.errors import naming_file

FULL = (errno.ENOSPC, errno.EDQUOT)

REMEDIES = {
    errno.ENOSPC: "free some room, or use another disk",
    errno.EDQUOT: "free some of the quota, or use another disk",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


class NoRoom(ValueError):
    """The disk has no room for the checkpoints of a run."""


def describe_error(error: BaseException) -> str:
    """Return an error as one sentence; one of the operating system as path, reason, remedy."""
    if not isinstance(error, OSError):
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or str(error) or type(error).__name__
    shown = [name if len(name) <= 200 else f"{name[:120]}...{name[-60:]}" for name in names]
    where = f"{' -> '.join(shown)}: " if names else ""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")


def replace_text(path: Path, text: str) -> None:
    """Write a file, at once and on the disk, by way of one that ends in ``.tmp``."""
    unfinished = path.with_suffix(".tmp")
    with naming_file(unfinished), unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def free_bytes(folder: Path) -> int | None:
    """Return the free room of the disk that holds ``folder``; None where it does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None
