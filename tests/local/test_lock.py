"""A run directory has one owner, which the kernel forgets when it dies."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_composer.local import lock as module
from prime_composer.local.lock import LOCK_FILE, InUse, RunLock, check_free

HOLDER = """
import runpy, sys, time
from pathlib import Path
lock = runpy.run_path(sys.argv[1])["RunLock"](Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_lock_names_its_holder_and_ends_when_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(module.__file__), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder = f"is in use by process {process.pid} on {socket.gethostname()}; wait for that run"
        for refused in (RunLock, check_free):
            with pytest.raises(InUse) as caught:
                refused(tmp_path)
            assert holder in str(caught.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while True:
        try:
            RunLock(tmp_path).release()
            break
        except InUse:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    check_free(tmp_path)
    assert not list(tmp_path.iterdir())
    RunLock(tmp_path).release()
    check_free(tmp_path)
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text() == f"{socket.gethostname()} {os.getpid()}\n"
    lock.release()


def test_lock_file_deleted_by_its_owner_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner removes its directory between our opening of the file and our locking of it."""
    original = module._lock

    def late(descriptor: int) -> bool:
        (tmp_path / LOCK_FILE).unlink()
        return original(descriptor)

    monkeypatch.setattr(module, "_lock", late)
    with pytest.raises(InUse):
        RunLock(tmp_path)


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.EBADF])
def test_file_system_without_locks_is_used_without_one(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    RunLock(tmp_path).release()
    check_free(tmp_path)


def test_check_free_over_nfs_finds_a_free_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, ``flock`` is a POSIX lock: EBADF for a descriptor that cannot be written."""
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    monkeypatch.setattr(module, "_NO_LOCKS", ())
    RunLock(tmp_path).release()
    check_free(tmp_path)


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("over_nfs", [False, True])
def test_check_free_reads_a_lock_it_may_not_write(
    over_nfs: bool, reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer of the system is made up."""
    original = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(reason, os.strerror(reason), str(path))
        return original(path, flags, *mode)

    if over_nfs:
        monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
        monkeypatch.setattr(module, "_NO_LOCKS", ())
    lock = RunLock(tmp_path)
    monkeypatch.setattr(os, "open", read_only)
    if not over_nfs:  # POSIX locks of one process do not exclude each other
        with pytest.raises(InUse):
            check_free(tmp_path)
    lock.release()
    check_free(tmp_path)
